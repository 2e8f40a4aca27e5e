"""The training loop, the same for every strategy and any number of workers."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from labkit.cluster.placement import Placement, placements
from labkit.cluster.plan import capped_devices, make_plan
from labkit.cluster.rebalance import Rebalancer, RebalanceRule
from labkit.comm import Communicator, resident_bytes, sent_bytes
from labkit.config import ExperimentConfig, format_bytes
from labkit.data.sampler import FullShuffle, GlobalSampler, Indices, SamplerState, even_extent, own_part
from labkit.engine import checkpoint, random_state
from labkit.engine.device import clock_of, to_device
from labkit.engine.events import EventLog
from labkit.engine.feed import Feed, Piece
from labkit.engine.memory import build_memory
from labkit.engine.pace import pace_of, spread_over_backward, spread_over_forward
from labkit.errors import ConfigError
from labkit.optim.schedule import learning_rate_at
from labkit.runfolder import RunFolder
from labkit.sync import StepTotals, Strategy, build_strategy, synchronize_batch_norm
from labkit.tasks import Data, Samples, StreamedSamples, build_model, load_data

_SLOW_READER = 0.05  # of a worker's time
_LEAST_WAIT_S = 0.5  # in all that is worth a word


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        step: Steps done.
        samples: Samples trained on, over all workers.
        sampler: Position in the data.
    """

    step: int = 0
    samples: int = 0
    sampler: SamplerState = SamplerState()


class Trainer:
    """One worker's part of a run."""

    def __init__(
        self,
        config: ExperimentConfig,
        placement: Placement,
        comm: Communicator,
        log: EventLog,
        folder: RunFolder,
        *,
        device: torch.device,
        is_stop_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load the data, build the model and its strategy, the same on every worker.

        Raises:
            ConfigError: the data has fewer samples than there are workers, or makes fewer steps than the
                warm-up.
        """
        self.config, self.placement, self.comm, self.log, self.folder = config, placement, comm, log, folder
        self.device = device
        self._clock = clock_of(device)
        self.dtype: torch.dtype = getattr(torch, config.engine.dtype)
        self.is_stop_wanted = is_stop_wanted
        self.data: Data = load_data(config.data, config.seed)
        num_samples = len(self.data.train)
        if num_samples < placement.world_size:
            raise ConfigError(
                f"cluster must have at most as many workers as training samples ({num_samples}), got "
                f"{placement.world_size}. Use fewer workers."
            )
        if num_samples < config.engine.global_batch_size:
            raise ConfigError(
                f"engine.global_batch_size must be at most the number of training samples ({num_samples}), "
                f"got {config.engine.global_batch_size}. Lower it."
            )
        self.total_steps = config.total_steps(num_samples)
        try:
            config.require_warmup_within(self.total_steps)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        random_state.seed_everything(config.seed, "model")
        self.model = self._place(build_model(config.model, self.data.info))
        self.pace = pace_of(config, placement.rank, self._clock)
        spread_over_backward(self.model.parameters(), self.pace)
        self.strategy = self._build_strategy()
        random_state.seed_everything(config.seed, "worker", placement.rank)
        self.memory = build_memory(config, self.model, placement, device, folder)
        if self.memory is not None:
            self.memory.is_tracing = True
            self.pace.stalled_s = self.memory.not_computing_s
            spread_over_forward(self.model, self.pace)
        self.sampler = self._make_sampler()
        self._feed: Feed | None = None
        self.plan = make_plan(config)
        self.local_batch_sizes = list(self.plan.local_batch_sizes)
        self.micro_batch_sizes = list(self.plan.micro_batch_sizes)
        self._rebalancer = self._build_rebalancer()
        self.progress = Progress()
        self._step_began_at = 0.0
        self._batch_size = 0
        self._costs: dict[str, int | None] = {"node_sent_bytes": None, "resident_bytes": None}
        self._data_s = self._trained_s = 0.0
        self._num_missing = 0

    def _place(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device, self.dtype)
        if self.config.sync.batch_norm == "synchronized":
            model = synchronize_batch_norm(model, self.comm.duplicate())
        return model

    def _make_sampler(self) -> GlobalSampler:
        train, seed = self.data.train, self.config.seed
        order = train.order(seed) if isinstance(train, StreamedSamples) else FullShuffle(len(train), seed)
        return GlobalSampler(order, self.config.engine.global_batch_size)

    def _build_strategy(self) -> Strategy:
        return build_strategy(
            self.config,
            self.model,
            self.comm,
            placements(self.config.cluster),
            clock=self._clock,
            say=lambda text: self.log.write("message", text=text),
        )

    def _build_rebalancer(self) -> Rebalancer | None:
        if not self.config.shares.is_rebalanced:
            return None
        return Rebalancer(
            self.plan.devices or capped_devices(self.config),
            self.config.engine.global_batch_size,
            self.local_batch_sizes,
            rule=RebalanceRule(dead_band=self.config.shares.dead_band),
        )

    def resume(self) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        say = lambda text: self.log.write("message", text=text)  # noqa: E731
        data = checkpoint.newest_checkpoint(self.folder, say) if self.comm.rank == 0 else None
        content = checkpoint.load_everywhere(data, self.comm, self.device)
        if content is None:
            return
        self.model.load_state_dict(content["model"])
        self.strategy.load_state_dict(content["strategy"])
        self.progress = Progress(content["step"], content["samples"], SamplerState(**content["sampler"]))
        streams = content["random"]
        if len(streams) == self.placement.world_size:
            self.strategy.load_local_state(content["local"][self.placement.rank])
            random_state.restore(streams[self.placement.rank])
        else:
            random_state.seed_everything(
                self.config.seed, "worker", self.placement.rank, self.placement.world_size, self.progress.step
            )

    def train(self) -> bool:
        """Train to the end, or until a worker wants to stop.

        Returns:
            Whether it got to the end.

        Raises:
            PeerError: another worker is gone.
        """
        self._say_start()
        sent_before = self._node_sent_bytes()
        try:
            while self.progress.step < self.total_steps:
                totals = self.step_and_say()
                is_last = self.progress.step >= self.total_steps or totals.is_stop_wanted
                if is_last:
                    self._take_costs(sent_before)
                if is_last or self._is_due(self.config.engine.eval_every_steps):
                    self.evaluate()
                if is_last or self._is_due(self.config.engine.checkpoint_every_steps):
                    self.save()
                if totals.is_stop_wanted:
                    break
            self._say_slow_readers()
            self._say_memory()
        finally:
            self.close()
        if self.pace.remark():
            self.log.write("message", text=self.pace.remark())
        self._say_end()
        return self.progress.step >= self.total_steps

    def close(self) -> None:
        """End what reads ahead and what moves activations."""
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        self.data.close()

    def step_and_say(self) -> StepTotals:
        """One step and its events."""
        self._step_began_at = time.perf_counter()
        totals, data_s, samples = self.step()
        step_s, parts = self._say_step(totals, data_s, samples)
        if self.comm.rank == 0:
            self._say_means(totals, step_s, parts)
        return totals

    def step(self) -> tuple[StepTotals, float, int]:
        """One update from one global batch.

        Returns:
            Totals over all workers, this worker's seconds of waiting for data, and its samples.
        """
        batch, after = self.sampler.batch(self.progress.sampler)
        self._batch_size = len(batch)
        data_s, num_own = self._compute(batch)
        peak = self.config.optimizer.learning_rate
        rate = learning_rate_at(self.config.schedule, peak, self.progress.step + 1, self.total_steps)
        totals = self.strategy.end_step(rate)
        if len(batch) == self.config.engine.global_batch_size:
            self._rebalance(totals)
        self.progress = Progress(self.progress.step + 1, self.progress.samples + len(batch), after)
        return totals, data_s, num_own

    def _compute(self, batch: Indices) -> tuple[float, int]:
        """This worker's gradients of its part of a batch.

        Returns:
            Seconds of waiting for data, and this worker's samples.
        """
        own, pieces = self._own_pieces(batch, self.local_batch_sizes)
        micro = self.micro_batch_sizes
        if self.config.sync.batch_norm == "synchronized":
            # Every worker takes part in every batch statistic, so all need equally many micro-steps.
            counts = zip(self.local_batch_sizes, micro, strict=True)
            wanted = max(-(-count // (limit or max(1, count))) for count, limit in counts)
            pieces += [own[:0]] * (wanted - len(pieces))
        self.strategy.begin_step(
            len(own), len(pieces), expected_samples=len(batch), is_stop_wanted=self.is_stop_wanted()
        )
        data_s = 0.0
        self.pace.factor = self._throttle()
        self.model.train()
        for piece in pieces:
            inputs, targets, waited_s = self._fetch_training(piece)
            data_s += waited_s
            num_missing = len(piece) - len(targets)
            self.strategy.count_data(waited_s, num_missing)
            self._num_missing += num_missing
            self.pace.begin(len(piece))
            with self.memory.step() if self.memory is not None else contextlib.nullcontext():
                losses, accuracies = self.data.losses(self.model(inputs), targets)
            self.pace.end_forward()
            self.strategy.backward(losses, accuracies)
            del losses, accuracies  # and what their graph has saved
            self.pace.end()
        return data_s, len(own)

    def _own_pieces(self, batch: Indices, sizes: Sequence[int]) -> tuple[Indices, list[Indices]]:
        """This worker's part of a batch, and its micro-steps."""
        own = own_part(batch, sizes, self.comm.rank)
        size = self.micro_batch_sizes[self.comm.rank] or max(1, len(own))
        return own, [own[start : start + size] for start in range(0, len(own), size)]

    def _fetch_training(self, piece: Indices) -> tuple[Tensor, Tensor, float]:
        """A micro-step's inputs and targets, and the seconds of waiting for them."""
        train = self.data.train
        if not isinstance(train, StreamedSamples) or len(piece) == 0:
            return self._fetch(train, piece)
        taken = self._feed.take(piece) if self._feed is not None else None
        if taken is None:  # at the beginning, and when shares have changed
            began_at = time.perf_counter()
            if self._feed is not None:
                self._feed.close()
            self._feed = Feed(train, self._pieces_from(piece), self.device, self.dtype)
            taken = self._feed.take(piece)
            assert taken is not None
            taken = taken[0], time.perf_counter() - began_at
        (inputs, targets), waited_s = taken
        return inputs, targets, waited_s

    def _pieces_from(self, piece: Indices) -> Iterator[Piece]:
        """All pieces of this worker from one on, to the end of the run, with the shares as they are now."""
        sampler, sizes = self._make_sampler(), tuple(self.local_batch_sizes)
        state, step = self.progress.sampler, self.progress.step
        is_begun = False

        def pieces() -> Iterator[Piece]:
            nonlocal state, is_begun
            for _ in range(step, self.total_steps):
                epoch = state.epoch
                batch, state = sampler.batch(state)
                for found in self._own_pieces(batch, sizes)[1]:
                    is_begun = is_begun or np.array_equal(found, piece)
                    if is_begun:
                        yield epoch, found

        return pieces()

    def _say_memory(self) -> None:
        """What moved between device and host, and what that was good for."""
        if self.memory is None:
            return
        report = self.memory.report()
        per_step = 1 / max(1, report.num_steps)
        values = {
            "memory/peak_mib": report.measured_peak_bytes / 2**20,
            "memory/moved_mib": report.moved_bytes * per_step / 2**20,
            "memory/freed_mib": report.freed_bytes * per_step / 2**20,
            "memory/stall_ms": 1e3 * report.stall_s * per_step,
        }
        self.log.write("memory", step=self.progress.step, values=values, **asdict(report))
        recorded = self.memory.recorded()
        if recorded is not None:
            live, copies = self.memory.trace()
            self.log.write(
                "memory_plan", step=self.progress.step, live=live, copies=copies, **recorded.to_mapping()
            )
        saved, moved, freed = (
            format_bytes(size * per_step)
            for size in (report.saved_bytes, report.moved_bytes, report.freed_bytes)
        )
        self.log.write(
            "message",
            text=f"memory of worker {self.placement.label}: {self.memory.plan or 'no plan yet'}; a step "
            f"saves {saved}, moves {moved} and frees {freed}, waits {1e3 * report.stall_s * per_step:.2f} ms"
            + (f"; {report.remark}" if report.remark else ""),
        )

    def _comm_places(self) -> list[Placement]:
        """The workers that this one communicates with, by their rank there."""
        return placements(self.config.cluster)

    def _say_slow_readers(self) -> None:
        """Name the workers whose data came late, so that nobody takes their devices for slow."""
        if not isinstance(self.data.train, StreamedSamples):
            return
        counts = self.data.train.counts
        own = [self._data_s, self._trained_s, counts.bytes_read, self._num_missing]
        found = self.comm.gather(torch.tensor(own, dtype=torch.float64, device=self.device))
        self.log.write("reads", step=self.progress.step, **asdict(counts), data_s=round(self._data_s, 6))
        if self.comm.rank != 0:
            return
        for place, numbers in zip(self._comm_places(), found, strict=True):
            data_s, trained_s, bytes_read, num_missing = numbers.tolist()
            if data_s > max(_LEAST_WAIT_S, _SLOW_READER * trained_s):
                self.log.write(
                    "message",
                    text=f"worker {place.label} waited for data {100 * data_s / trained_s:.0f} % of its time "
                    f"({bytes_read / 2**20 / trained_s:.0f} MiB/s): its reader is slow, not its device",
                )
            if num_missing:
                self.log.write(
                    "message",
                    text=f"worker {place.label} left out {num_missing:.0f} samples that can't be read",
                )

    def _throttle(self) -> float:
        """How many times as long the step to come takes on this emulated device."""
        place, step = self.placement, self.progress.step + 1
        throttle = self.config.cluster.nodes[place.node_index].workers[place.local_rank].throttle
        if throttle is None or step < throttle.from_step or step > (throttle.to_step or step):
            return 1.0
        return throttle.factor

    def _rebalance(self, totals: StepTotals) -> None:
        """Let shares follow the measured times; every worker comes to the same answer from the same times."""
        if self._rebalancer is None:
            return
        sizes = self._rebalancer.observe(totals.busy_s)
        if sizes is None:
            return
        self.local_batch_sizes = list(sizes)
        if self.comm.rank == 0:
            values = {f"shares/rank{rank:02d}": size for rank, size in enumerate(sizes)}
            self.log.write("shares", step=self.progress.step + 1, values=values)

    def _fetch(self, samples: Samples, indices: "range | object") -> tuple[Tensor, Tensor, float]:
        began_at = time.perf_counter()
        inputs, targets = to_device(samples.batch(indices), self.device, self.dtype)  # type: ignore[arg-type]
        return inputs, targets, time.perf_counter() - began_at

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the held-out samples, each counted once, over all workers."""
        with self.strategy.merged_buffers(), torch.no_grad():
            values = self._evaluate()
        if self.comm.rank == 0:
            self.log.write("eval", **self._position(), values=values)
        return values

    def _evaluate(self) -> dict[str, float]:
        self.model.eval()
        own = even_extent(len(self.data.val), self.comm.rank, self.comm.world_size)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        size = self.config.engine.micro_batch_size or 256
        for start in range(0, len(own), size):
            inputs, targets, _ = self._fetch(self.data.val, own[start : start + size])
            losses, accuracies = self.data.losses(self.model(inputs), targets)
            sums += torch.stack(
                [losses.sum().double(), accuracies.sum().double(), sums.new_tensor(len(targets))]
            )
        self.comm.all_reduce_(sums).wait()
        loss_sum, accuracy_sum, count = sums.tolist()
        return {"val/loss": loss_sum / count, "val/accuracy": accuracy_sum / count}

    def save(self) -> None:
        """Write a checkpoint of everything that decides how the run goes on."""
        began_at = time.perf_counter()
        streams = self.comm.gather(random_state.capture().to(self.device))
        local_states = self.comm.gather(self.strategy.local_state().to(self.device))
        strategy_state = self.strategy.state_dict()
        with self.strategy.merged_buffers():
            if self.comm.rank != 0:
                return
            path = self.folder.checkpoint_file(self.progress.step)
            size_bytes = checkpoint.write_checkpoint(
                path,
                {
                    "step": self.progress.step,
                    "samples": self.progress.samples,
                    "sampler": self.progress.sampler.to_dict(),
                    "model": self.model.state_dict(),
                    "strategy": strategy_state,
                    "random": [stream.cpu() for stream in streams],
                    "local": [state.cpu() for state in local_states],
                },
            )
        checkpoint.prune(self.folder, self.config.engine.keep_checkpoints)
        self.log.write(
            "checkpoint",
            step=self.progress.step,
            file=path.name,
            size_bytes=size_bytes,
            save_s=round(time.perf_counter() - began_at, 6),
        )

    def _is_due(self, every_steps: int | None) -> bool:
        if every_steps is None:
            return self.progress.sampler.cursor == 0
        return self.progress.step % every_steps == 0

    def _position(self) -> dict[str, float]:
        epoch = self.progress.sampler.epoch + self.progress.sampler.cursor / self.sampler.num_samples
        return {"step": self.progress.step, "epoch": round(epoch, 6), "samples": self.progress.samples}

    def _say_start(self) -> None:
        self.log.start(
            self.placement,
            str(self.device),
            num_params=sum(parameter.numel() for parameter in self.model.parameters()),
            local_batch_size=self.local_batch_sizes[self.comm.rank],
            total_steps=self.total_steps,
            start_step=self.progress.step,
        )

    def _node_sent_bytes(self) -> int | None:
        """What the node has sent so far; its first worker tells for all of them."""
        return sent_bytes() if self.placement.local_rank == 0 else None

    def _take_costs(self, sent_before: int | None) -> None:
        """What the steps cost, before an evaluation and a checkpoint add to it and while all workers live."""
        sent = self._node_sent_bytes()
        is_counted = sent is not None and sent_before is not None
        self._costs = {
            "node_sent_bytes": (sent or 0) - (sent_before or 0) if is_counted else None,
            "resident_bytes": resident_bytes(),
        }

    def _say_end(self) -> None:
        self.log.write("end", step=self.progress.step, **self._costs)

    def _say_step(
        self,
        totals: StepTotals,
        data_s: float,
        samples: int,
        *,
        fetched_s: float = 0.0,
        held_s: float = 0.0,
    ) -> tuple[float, dict[str, float]]:
        """Write what the step's time was made of.

        Args:
            totals: Of the step.
            data_s: Waiting for data.
            samples: This worker's.
            fetched_s: Parameters were under way before the step.
            held_s: Waiting before that until others had got as far.

        Returns:
            Seconds of the step, and of its parts by name.
        """
        step_s = time.perf_counter() - self._step_began_at
        self._data_s += data_s
        self._trained_s += step_s
        slowest_s = max(totals.busy_s)
        # The slowest worker never waits; what others spend beyond waiting for it is communication.
        wait_s = max(0.0, min(totals.exposed_s, slowest_s - totals.busy_s[self.comm.rank]))
        exposed_s = totals.exposed_s + fetched_s
        parts = {
            "data": data_s,
            "compute": max(0.0, step_s - data_s - exposed_s - held_s - totals.node_busy_s),
            "node": totals.node_busy_s + totals.node_exposed_s,
            "communicate": max(0.0, exposed_s - totals.node_exposed_s - wait_s),
            "wait": min(wait_s, totals.exposed_s - totals.node_exposed_s) + held_s,
        }
        self.log.write(
            "step",
            step=self.progress.step,
            samples=samples,
            step_s=round(step_s, 7),
            **{f"{name}_s": round(seconds, 7) for name, seconds in parts.items()},
        )
        return step_s, parts

    def _say_means(self, totals: StepTotals, step_s: float, parts: dict[str, float]) -> None:
        """Write the run's figures of the step: worker 0's times, with everybody's mean wait."""
        slowest_s = max(totals.busy_s)
        mean_wait_s = min(totals.exposed_s, slowest_s - sum(totals.busy_s) / len(totals.busy_s))
        parts["compute"] = max(0.0, parts["compute"] + parts["wait"] - mean_wait_s)
        parts["wait"] = mean_wait_s
        self._say_metrics(totals, step_s, parts)

    def _say_metrics(self, totals: StepTotals, step_s: float, parts: dict[str, float]) -> None:
        peak = self.config.optimizer.learning_rate
        self.log.write(
            "metrics",
            **self._position(),
            values={
                **_means(totals),
                "optim/learning_rate": learning_rate_at(
                    self.config.schedule, peak, self.progress.step, self.total_steps
                ),
                "perf/samples_per_s": self._batch_size / step_s,
                "perf/step_ms": 1e3 * step_s,
                **{f"perf/{name}_ms": 1e3 * seconds for name, seconds in parts.items()},
            },
        )


def _means(totals: StepTotals) -> dict[str, float]:
    """Loss and accuracy by sample; nothing when this worker knows of no sample."""
    if totals.num_samples == 0:
        return {}
    return {
        "train/loss": totals.loss_sum / totals.num_samples,
        "train/accuracy": totals.accuracy_sum / totals.num_samples,
    }
