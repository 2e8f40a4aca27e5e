"""What a run costs beside its training."""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from labkit.bench.harness import Report, interleave, ratios
from labkit.cluster.placement import placements
from labkit.comm import Communicator
from labkit.config import AllReduceConfig, ExperimentConfig, from_overrides
from labkit.engine.events import EventLog
from labkit.engine.train import Trainer
from labkit.lab.batch import run_notebook
from labkit.launch import start, warm_up
from labkit.launch.forked import run_workers
from labkit.runfolder import ProcessId, RunFolder, RunState, project_root
from labkit.sync import AllReduce

_NUM_WORKERS = 4


def measure(say: Callable[[str], None]) -> Report:
    """Measure all figures; about two minutes on two cores."""
    report = Report("overhead")
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        os.environ["LABKIT_RUNS"] = str(Path(folder) / "runs")
        say("first step: local against elastic")
        _first_steps(report)
        say("all-reduce against DistributedDataParallel")
        _allreduce_against_ddp(report)
        say("events and tracking: on against off")
        _tracking(report, Path(folder))
        say("size of an executed notebook")
        _notebook(report, Path(folder))
    return report


# --- first step -----------------------------------------------------------------------------------------


def _first_steps(report: Report) -> None:
    warm_up()

    def first_step_s(launcher: str) -> float:
        config = from_overrides(
            ["cluster=2x2", "engine.max_steps=1", f"launch.launcher={launcher}", "launch.is_tracked=false"]
        )
        began_at = time.time()
        run = start(config, is_repeat=True)
        run.wait(120)
        return float(run.folder.history()[0]["t"]) - began_at

    local = [first_step_s("local") for _ in range(6)][1:]  # the first one waits for the fork server
    report.add("first_step_s", local, "<= 1.5")
    report.add("first_step_elastic_s", [first_step_s("elastic") for _ in range(3)])


# --- all-reduce -----------------------------------------------------------------------------------------


def _big_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1024, 2560), nn.ReLU(), nn.Linear(2560, 2560), nn.ReLU(), nn.Linear(2560, 320)
    )  # 10.0 million parameters


def _step_times(comm: Communicator) -> dict[str, list[float]]:
    """Step times of both ways, in turn, on one worker. Each side has a model of its own."""
    inputs, targets = torch.randn(16, 1024), torch.randint(320, (16,))
    ours, theirs = _big_model(), nn.parallel.DistributedDataParallel(_big_model())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (ours, theirs)]
    strategy = AllReduce(ours, optimizers[0], comm, AllReduceConfig())
    flat = torch.zeros(sum(parameter.numel() for parameter in ours.parameters()))

    def labkit_step() -> None:
        strategy.begin_step(len(inputs), 1, expected_samples=_NUM_WORKERS * len(inputs))
        losses = nn.functional.cross_entropy(ours(inputs), targets, reduction="none")
        strategy.backward(losses, losses.detach())
        strategy.end_step(0.01)

    def ddp_step() -> None:
        optimizers[1].zero_grad()
        nn.functional.cross_entropy(theirs(inputs), targets).backward()
        optimizers[1].step()

    def timed(step: Callable[[], object]) -> Callable[[], float]:
        def once() -> float:
            comm.barrier()
            began_at = time.perf_counter()
            for _ in range(3):
                step()
            comm.barrier()
            return (time.perf_counter() - began_at) / 3

        return once

    sides = {
        "labkit": timed(labkit_step),
        "ddp": timed(ddp_step),
        "bare": timed(lambda: dist.all_reduce(flat)),
    }
    times = interleave(sides, repeats=9, warmup=2)
    strategy.close()
    return times


def _allreduce_against_ddp(report: Report) -> None:
    times = run_workers(_step_times, _NUM_WORKERS, timeout_s=300)[0]
    report.add("allreduce_vs_ddp", ratios(times["ddp"], times["labkit"]), ">= 1.0")
    report.add("allreduce_over_bare", ratios(times["labkit"], times["bare"]))
    report.notes.append(
        "allreduce_vs_ddp: step time of DistributedDataParallel over ours, 10 million parameters, 4 workers; "
        "allreduce_over_bare: our whole step over a bare all-reduce of the same bytes, its lower bound"
    )


# --- events and tracking ----------------------------------------------------------------------------------

_BLOCK_STEPS = 60
_NUM_BLOCKS = 40


class _Muted:
    """Stands in for an event log while a block without events is measured."""

    def write(self, kind: str, **fields: object) -> None:
        return None


def _blocks(
    comm: Communicator, config: ExperimentConfig, path: str, tracker_pid: int
) -> dict[str, list[float]]:
    """Mean step times of blocks of steps, with events and a running tracker, and without both."""
    folder = RunFolder(path)
    log = EventLog(folder.events_file(comm.rank), 1)
    trainer = Trainer(
        config, placements(config.cluster)[comm.rank], comm, log, folder, device=torch.device("cpu")
    )
    times: dict[str, list[float]] = {"on": [], "off": []}
    for block in range(2 + _NUM_BLOCKS):
        side = "on" if block % 2 == 0 else "off"
        trainer.log = log if side == "on" else _Muted()  # type: ignore[assignment]
        if comm.rank == 0:
            os.kill(tracker_pid, signal.SIGCONT if side == "on" else signal.SIGSTOP)
        comm.barrier()
        began_at = time.perf_counter()
        for _ in range(_BLOCK_STEPS):
            trainer.step_and_say()
        comm.barrier()
        if block >= 2:
            times[side].append((time.perf_counter() - began_at) / _BLOCK_STEPS)
    if comm.rank == 0:
        os.kill(tracker_pid, signal.SIGCONT)
    return times


def _tracking(report: Report, folder: Path) -> None:
    config = from_overrides(
        ["cluster=2x2", "model=mlp", "engine.step_padding_s=0.005", "engine.num_epochs=1000", "name=tracking"]
    )
    run = RunFolder(folder / "runs" / "tracking" / "bench")
    run.create(config)
    run.write_status(
        run.read_status().model_copy(update={"state": RunState.RUNNING, "owner": ProcessId.current()})
    )
    with (
        open(run.tracker_log, "ab") as log,
        subprocess.Popen(
            [sys.executable, "-m", "labkit.lab.tracking", str(run.path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        ) as tracker,
    ):
        deadline = time.monotonic() + 90
        while "run_id" not in run.read_json(run.tracking_file) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(3)
        times = run_workers(_blocks, _NUM_WORKERS, config, str(run.path), tracker.pid, timeout_s=240)[0]
        run.write_status(run.read_status().model_copy(update={"state": RunState.FINISHED}))
        tracker.wait(60)
    pairs = zip(times["on"], times["off"], strict=True)
    report.add("tracking_share", [(on - off) / on for on, off in pairs], "<= 0.02")
    report.add("tracking_step_ms", [1e3 * statistics.median(times["off"])])


# --- notebook ---------------------------------------------------------------------------------------------


def _notebook(report: Report, folder: Path) -> None:
    root = project_root()
    if root is None:
        report.notes.append("notebook_kb: not measured, the notebooks are not beside the package")
        return
    overrides = {"num_epochs": 2, "cluster": "1x2"}
    result = run_notebook(
        root / "notebooks" / "02_train.ipynb", overrides, output=folder / "out.ipynb", echo=lambda _: None
    )
    report.add("notebook_kb", [result.notebook.stat().st_size / 1000], "<= 300")
