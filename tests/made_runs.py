"""Run folders written by hand, in the schema of `labkit.engine.events`, for tests of what reads them."""

import math
import time
from pathlib import Path
from typing import Any

from labkit.config import ExperimentConfig, from_overrides
from labkit.engine.events import EventLog
from labkit.runfolder import ProcessId, RunError, RunFolder, RunState, RunStatus, WorkerRecord

PARTS_S = {"data_s": 0.001, "compute_s": 0.010, "node_s": 0.0, "communicate_s": 0.004, "wait_s": 0.002}


class MadeRun:
    """A run whose events the test writes, step by step."""

    def __init__(
        self, root: Path, cluster: str = "2x2", key: str = "made000000", total_steps: int = 100
    ) -> None:
        self.config: ExperimentConfig = from_overrides([f"cluster={cluster}", "name=made"])
        self.folder = RunFolder(root / "made" / key)
        self.folder.create(self.config)
        self.total_steps = total_steps
        self.attempt = 0
        self._logs: dict[int, EventLog] = {}
        self._status = RunStatus(created_at=time.time())

    def start(self, start_step: int = 0) -> "MadeRun":
        """A new attempt: every worker says hello."""
        self.attempt += 1
        self.close()
        records = []
        for rank, (node, local_rank) in enumerate(self._places()):
            self._logs[rank] = EventLog(self.folder.events_file(rank), self.attempt)
            self._logs[rank].write(
                "start",
                rank=rank,
                node=node,
                local_rank=local_rank,
                world_size=self.config.cluster.num_workers,
                total_steps=self.total_steps,
                start_step=start_step,
                local_batch_size=16,
            )
            records.append(WorkerRecord(rank=rank, node=node, local_rank=local_rank))
        self.set_state(RunState.RUNNING, workers=tuple(records), attempt=self.attempt)
        return self

    def _places(self) -> list[tuple[str, int]]:
        return [(node.name, i) for node in self.config.cluster.nodes for i in range(len(node.workers))]

    def step(self, step: int, loss: float | None = None, scale: float = 1.0) -> None:
        """One step of all workers; worker 1 is half as fast in computing."""
        for rank, log in self._logs.items():
            parts = {name: value * scale for name, value in PARTS_S.items()}
            parts["compute_s"] *= 2 if rank == 1 else 1
            log.write("step", step=step, samples=16, step_s=sum(parts.values()), **parts)
        loss = 2.3 * math.exp(-step / 30) if loss is None else loss
        values = {
            "train/loss": loss,
            "train/accuracy": 1 - math.exp(-step / 30),
            "optim/learning_rate": 0.1,
            "perf/samples_per_s": 64 / sum(PARTS_S.values()),
            "perf/step_ms": 17.0 * scale,
            **{f"perf/{name.removesuffix('_s')}_ms": 1e3 * value * scale for name, value in PARTS_S.items()},
        }
        self._logs[0].write("metrics", step=step, epoch=0, samples=64 * step, values=values)

    def steps(self, first: int, last: int, **how: Any) -> "MadeRun":
        """Steps first to last, with an evaluation after every tenth."""
        for step in range(first, last + 1):
            self.step(step, **how)
            if step % 10 == 0:
                self.evaluate(step)
        return self

    def evaluate(self, step: int) -> None:
        """One evaluation."""
        values = {"val/loss": 2.4 * math.exp(-step / 30), "val/accuracy": 1 - math.exp(-step / 35)}
        self._logs[0].write("eval", step=step, epoch=0, samples=64 * step, values=values)

    def say_staleness(self, step: int, counts: dict[str, int]) -> None:
        """What the coordinator of the parameter servers writes."""
        self._logs[0].write("staleness", step=step, counts=counts, repeated=0, dropped=0, refused={})

    def set_state(self, state: RunState, **fields: Any) -> None:
        """What the supervisor writes; the owner is this process, so the run counts as alive."""
        now = time.time()
        ended = {"ended_at": now} if state.is_final else {"started_at": now}
        owner = ProcessId.current()
        update = {"state": state, "owner": owner, "heartbeat_at": now, **ended, **fields}
        self._status = self._status.model_copy(update=update)
        self.folder.write_status(self._status)

    def fail(self, rank: int = 2) -> None:
        """The run fails at one worker."""
        text = 'Traceback (most recent call last):\n  File "model.py", line 3\nValueError: odd shape'
        self.folder.log_files(rank)[1].write_text("warming up\nodd shape ahead\n")
        message = f"worker {rank} on node1 failed: ValueError: odd shape"
        self.set_state(
            RunState.FAILED, error=RunError(message=message, rank=rank, node="node1", traceback=text)
        )

    def beat(self) -> None:
        """The supervisor's heartbeat."""
        self.set_state(self._status.state)

    def status(self) -> RunStatus:
        """As a run's handle says it."""
        return self.folder.read_status()

    def stop(self) -> RunStatus:
        """As a run's handle does it."""
        self.folder.stop_file.touch()
        return self.status()

    def close(self) -> None:
        """Close the event files."""
        for log in self._logs.values():
            log.close()
        self._logs = {}

    def __del__(self) -> None:
        self.close()
