"""Measure what a plan needs: how long each device computes, what fits in its memory, how fast the links are.

All workers measure at the same time, as they train at the same time, in rounds over the same batch sizes,
until every one's prediction has settled. Then the links, one pair after the other, while nothing else runs.

Events, beside `start` and `metrics` (a round counts as a step):

    probe    round, seconds {size: seconds}, uncertainty     every worker, every round
    ceiling  max_micro_batch_size, reason                    a worker whose memory was too small for more
    link     source, target (nodes), mbit, latency_s         the first worker of the source
"""

import contextlib
from collections.abc import Callable, Sequence
from itertools import combinations

import torch

from labkit.cluster.placement import Placement, placements
from labkit.cluster.profile import Round, uncertainty
from labkit.comm import Communicator
from labkit.config import ExperimentConfig
from labkit.engine.device import clock_of, to_device
from labkit.engine.events import EventLog
from labkit.engine.memory import build_memory
from labkit.engine.pace import pace_of, spread_over_backward
from labkit.engine.random_state import seed_everything
from labkit.errors import ConfigError
from labkit.memory import Infeasible, is_out_of_memory
from labkit.runfolder import RunFolder
from labkit.tasks import build_model, load_data

MIN_ROUNDS = 6
MAX_ROUNDS = 30
SETTLED = 0.02
_PASSES_S = 0.02  # of one size in one round: a single pass of a small batch is noise
_MOST_PASSES = 8
_LONGEST_PASS_S = 1.0
_PINGS = 20
_TRIAL_BYTES = 2**20
_LARGEST_BYTES = 2**26
_BULK_S = 0.25  # so long that the first burst through an emulated link does not count


class Probe:
    """One worker's part of a probe."""

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
        """Load the data and build the model, as a run of this experiment would."""
        self._config, self._placement, self._comm, self._log = config, placement, comm, log
        self._device = device
        self._clock = clock_of(device)
        self._is_stop_wanted = is_stop_wanted
        self._dtype: torch.dtype = getattr(torch, config.engine.dtype)
        self._data = load_data(config.data)
        seed_everything(config.seed, "model")
        self._model = build_model(config.model, self._data.info).to(device, self._dtype)
        self._model.train()
        self._memory = build_memory(config, self._model, placement, device, folder)
        self._pace = pace_of(config, placement.rank, self._clock)
        spread_over_backward(self._model.parameters(), self._pace)
        self._num_parameters = sum(p.numel() for p in self._model.parameters() if p.requires_grad)

    def run(self) -> None:
        """Measure devices, then links.

        Raises:
            ConfigError: the model does not run with a single sample.
        """
        self._log.start(
            self._placement,
            str(self._device),
            num_params=self._num_parameters,
            gradient_bytes=self._num_parameters * self._dtype.itemsize,
            total_steps=MAX_ROUNDS,
            start_step=0,
        )
        self._measure_device(self._find_sizes())
        for pair in self._pairs():
            self._measure_link(*pair)
        self._data.close()
        if self._memory is not None:
            self._memory.close()
        self._log.write("end", step=0)

    # --- devices -----------------------------------------------------------------------------------------

    def _find_sizes(self) -> list[int]:
        """Powers of two that this device can compute in reasonable time, up to the global batch."""
        most = min(len(self._data.train), self._config.engine.global_batch_size)
        if self._config.engine.micro_batch_size:
            most = min(most, self._config.engine.micro_batch_size)
        wanted = sorted({min(2**power, most) for power in range(most.bit_length() + 1)})
        sizes: list[int] = []
        for size in wanted:
            fault = self._try(size)
            if fault is not None:
                self._say_ceiling(sizes[-1] if sizes else 0, size, fault)
                break
            sizes.append(size)
            if self._seconds(size, 1) > _LONGEST_PASS_S and len(sizes) > 1:
                break
        return sizes

    def _say_ceiling(self, good: int, bad: int, fault: str) -> None:
        """Find the largest batch that fits, by halving, or give up where none does."""
        if good == 0:
            raise ConfigError(
                f"model must run with one sample on worker {self._placement.rank} "
                f"({self._placement.node}), got {fault}. Use a smaller model."
            )
        while bad - good > max(1, good // 16):
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self._try(middle) is None else (good, middle)
        self._log.write("ceiling", max_micro_batch_size=good, reason=fault)

    def _try(self, size: int) -> str | None:
        """Compute one batch; what went wrong when the memory is too small for it."""
        try:
            for _ in range(1 if self._memory is None else 2):  # once to be recorded, once as planned
                self._compute(size)
        except (RuntimeError, MemoryError, Infeasible) as error:
            text = next(iter(str(error).strip().splitlines()), type(error).__name__)
            if not is_out_of_memory(error):
                raise ConfigError(
                    f"model must run with {size} samples on worker {self._placement.rank} "
                    f"({self._placement.node}), got {text}. Train it alone first."
                ) from error
            self._model.zero_grad(set_to_none=True)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return text
        return None

    def _compute(self, size: int) -> None:
        inputs, targets = to_device(self._data.train.batch(range(size)), self._device, self._dtype)
        self._pace.begin(size)
        with self._memory.step() if self._memory is not None else contextlib.nullcontext():
            losses, _ = self._data.losses(self._model(inputs), targets)
        self._pace.end_forward()
        losses.mean().backward()
        self._pace.end()
        self._model.zero_grad(set_to_none=True)

    def _seconds(self, size: int, num_passes: int) -> float:
        began_at = self._clock()
        for _ in range(num_passes):
            self._compute(size)
        return (self._clock() - began_at) / num_passes

    def _measure_device(self, sizes: Sequence[int]) -> None:
        passes = {
            size: max(1, min(_MOST_PASSES, int(_PASSES_S / max(self._seconds(size, 1), 1e-6))))
            for size in sizes
        }
        rounds: list[Round] = []
        per_round = sum(size * count for size, count in passes.items())
        for number in range(1, MAX_ROUNDS + 1):
            rounds.append({size: self._seconds(size, passes[size]) for size in sizes})
            gap = uncertainty(rounds)
            seconds = {str(size): round(value, 9) for size, value in rounds[-1].items()}
            self._log.write("probe", round=number, seconds=seconds, uncertainty=round(gap, 6))
            if self._placement.rank == 0:
                self._log.write("metrics", step=number, epoch=0.0, samples=number * per_round, values={})
            is_settled = number >= MIN_ROUNDS and (gap <= SETTLED or len(sizes) < 2)
            if self._is_over(is_settled):
                break

    def _is_over(self, is_settled: bool) -> bool:
        """Whether every worker's prediction has settled, or one wants to stop."""
        flags = torch.tensor([float(not is_settled), float(self._is_stop_wanted())], device=self._device)
        self._comm.all_reduce_(flags).wait()
        num_open, num_stops = flags.tolist()
        return bool(num_open == 0 or num_stops > 0)

    # --- links -------------------------------------------------------------------------------------------

    def _pairs(self) -> list[tuple[Placement, Placement]]:
        """The first workers of every two nodes, both ways, and the first two of every node."""
        places = placements(self._config.cluster)
        heads = [place for place in places if place.local_rank == 0]
        seconds = [place for place in places if place.local_rank == 1]
        between = [pair for a, b in combinations(heads, 2) for pair in ((a, b), (b, a))]
        return between + [(heads[place.node_index], place) for place in seconds]

    def _measure_link(self, source: Placement, target: Placement) -> None:
        self._comm.barrier()
        own = self._placement.rank
        if own not in (source.rank, target.rank):
            return
        is_source, other = own == source.rank, target.rank if own == source.rank else source.rank
        self._exchange(other, is_source, 8, 3)
        latency_s = self._exchange(other, is_source, 8, _PINGS) / 2
        trial_s = self._exchange(other, is_source, _TRIAL_BYTES, 2)
        size = torch.tensor([min(_LARGEST_BYTES, _TRIAL_BYTES * _BULK_S / trial_s)], device=self._device)
        if is_source:
            self._comm.send(size, other)
        else:
            self._comm.receive_(size, other)
        num_bytes = int(size) // 4 * 4
        bulk_s = max(1e-9, self._exchange(other, is_source, num_bytes, 1) - latency_s)
        if is_source:
            self._log.write(
                "link",
                source=source.node,
                target=target.node,
                mbit=round(8e-6 * num_bytes / bulk_s, 3),
                latency_s=round(latency_s, 7),
            )

    def _exchange(self, other: int, is_source: bool, num_bytes: int, times: int) -> float:
        """Send so many bytes and get a small answer; seconds of one such turn, the shortest of all."""
        tensor = torch.zeros(num_bytes // 4, device=self._device)
        answer = torch.zeros(1, device=self._device)
        found = []
        for _ in range(times):
            began_at = self._clock()
            if is_source:
                self._comm.send(tensor, other)
                self._comm.receive_(answer, other)
            else:
                self._comm.receive_(tensor, other)
                self._comm.send(answer, other)
            found.append(self._clock() - began_at)
        return min(found)
