"""The asynchronous hybrid on unlike devices: throughput, accuracy against time and samples, bytes."""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.bench.emulated import check_links
from labkit.bench.harness import Report, interleave
from labkit.bench.partition import true_limit, unlike_devices
from labkit.config import ExperimentConfig, from_overrides
from labkit.lab.heterogeneity import accuracy_points, probe
from labkit.lab.run_all import run_one
from labkit.launch import warm_up
from labkit.launch.emulation import build

_RATES = (1000.0, 100.0)
_REPEATS = 5
_NUM_SEEDS = 3
_TRIES = list(itertools.product((0.1, 0.3, 0.6, 1.2), (0.5, 0.9)))  # learning rate, momentum
_TOLERANCE = 0.005  # half a point

_SIDES: dict[str, dict[str, Any]] = {
    "allreduce": {"sync": "allreduce", "shares.name": "even"},
    "async": {"sync": "async_parameter_server", "shares.name": "even"},
    "hybrid": {"sync": "hybrid", "shares.name": "planned"},
}


def measure(say: Callable[[str], None]) -> Report:
    """Measure at both link rates, then accuracy; about twenty minutes on two cores.

    Raises:
        ConfigError: nodes can't be emulated here.
        LabkitError: a link is not what it is said to be.
    """
    warm_up()
    report = Report("hybrid")
    for mbit in _RATES:
        base = _probed(_base(mbit, batch=500, padding_s=0.625))
        with build(base.cluster) as network:
            check_links(network, say)
        _add_throughput(report, base, "" if mbit == _RATES[0] else f"_{mbit:g}mbit", say)
    _add_accuracy(report, say)
    report.notes.append(
        "over_limit: samples/s over the sum of the devices' own speeds; vs_allreduce: over a flat all-reduce "
        "with equal batches; time_to_accuracy: seconds of the other over ours to the accuracy that "
        f"synchronous SGD ends with, less {100 * _TOLERANCE:g} points; accuracy_gap: ours less that of "
        "synchronous SGD after the same samples, in points; rate and momentum tuned with equal tries on a "
        "seed of their own"
    )
    return report


def _base(mbit: float, *, batch: int, padding_s: float) -> ExperimentConfig:
    return unlike_devices(
        {
            "name": "bench-hybrid",
            "cluster.link_mbit": mbit,
            "engine.global_batch_size": batch,
            "engine.step_padding_s": padding_s,
            "engine.num_epochs": 20,
        }
    )


def _probed(base: ExperimentConfig) -> ExperimentConfig:
    return probe(base, wait=lambda run: run.wait()).applied_to(base)


@dataclass(frozen=True)
class _Outcome:
    """What a run came to.

    Attributes:
        samples_per_s: Without its first fifth.
        accuracies: (seconds since the first step, accuracy) of each evaluation.
        bytes_per_sample: On all links.
    """

    samples_per_s: float
    accuracies: tuple[tuple[float, float], ...]
    bytes_per_sample: float

    @property
    def final(self) -> float:
        return self.accuracies[-1][1] if self.accuracies else 0.0

    def seconds_to(self, accuracy: float) -> float | None:
        return next((seconds for seconds, value in self.accuracies if value >= accuracy), None)


def _run(config: ExperimentConfig) -> _Outcome:
    folder = run_one(config, is_repeat=True).folder
    metrics = folder.history(0, ("metrics",))
    first, last = metrics[len(metrics) // 5], metrics[-1]
    ends = [event for rank in folder.ranks() for event in folder.history(rank, ("end",))]
    return _Outcome(
        (last["samples"] - first["samples"]) / (last["t"] - first["t"]),
        tuple(accuracy_points(folder)[1]),
        sum(event.get("node_sent_bytes") or 0 for event in ends) / last["samples"],
    )


def _add_throughput(report: Report, base: ExperimentConfig, suffix: str, say: Callable[[str], None]) -> None:
    limit = true_limit(base)
    outcomes: dict[str, list[_Outcome]] = {"allreduce": [], "hybrid": []}

    def side(name: str) -> Callable[[], float]:
        config = from_overrides({**_SIDES[name], "engine.eval_every_steps": 1_000_000}, base=base)

        def once() -> float:
            outcomes[name].append(_run(config))
            say(f"{name}{suffix}: {outcomes[name][-1].samples_per_s:,.0f} samples/s")
            return outcomes[name][-1].samples_per_s

        return once

    rates = interleave({name: side(name) for name in outcomes}, _REPEATS, warmup=0)
    report.add(f"over_limit{suffix}", [rate / limit for rate in rates["hybrid"]], ">= 0.95")
    pairs = zip(rates["hybrid"], rates["allreduce"], strict=True)
    report.add(f"vs_allreduce{suffix}", [ours / theirs for ours, theirs in pairs], ">= 2.3")


def _add_accuracy(report: Report, say: Callable[[str], None]) -> None:
    # Long enough that synchronous SGD gains nothing more, with the schedule that is usual for it.
    small = {"model": {"name": "mlp", "hidden_sizes": [128]}, "engine.num_epochs": 30, "schedule": "cosine"}
    base = _probed(from_overrides(small, base=_base(_RATES[0], batch=160, padding_s=0.08)))
    best = {name: _tuned(from_overrides(changes, base=base), say) for name, changes in _SIDES.items()}
    found: dict[str, list[_Outcome]] = {name: [] for name in _SIDES}
    for seed, name in itertools.product(range(_NUM_SEEDS), _SIDES):
        changes = {**_SIDES[name], **best[name], "seed": seed}
        found[name].append(_run(from_overrides(changes, base=base)))
        say(f"{name}, seed {seed}: {found[name][-1].final:.4f}")
    gaps, over_sync, over_async = [], [], []
    for sync, other, ours in zip(*(found[name] for name in _SIDES), strict=True):
        gaps.append(100 * (ours.final - sync.final))
        target = sync.final - _TOLERANCE
        own_s, sync_s, other_s = (outcome.seconds_to(target) for outcome in (ours, sync, other))
        if own_s and sync_s:
            over_sync.append(sync_s / own_s)
        if own_s and other_s:
            over_async.append(other_s / own_s)
    report.add("accuracy_gap", gaps, ">= -0.5")
    for figure, values in (("allreduce", over_sync), ("async", over_async)):
        if values:
            report.add(f"time_to_accuracy_vs_{figure}", values, ">= 1")
        if len(values) < _NUM_SEEDS:
            missed = _NUM_SEEDS - len(values)
            report.notes.append(
                f"time_to_accuracy_vs_{figure}: one of both did not get there, {missed} times"
            )
    pairs = zip(found["hybrid"], found["async"], strict=True)
    report.add("network_vs_async", [a.bytes_per_sample / b.bytes_per_sample for a, b in pairs])


def _tuned(config: ExperimentConfig, say: Callable[[str], None]) -> dict[str, float]:
    """Rate and momentum with the best accuracy over the last epochs, on a seed of its own.

    Momentum is tuned too, since asynchrony acts like more of it (Mitliagkas et al., Asynchrony Begets
    Momentum, 2016).
    """
    quick = from_overrides(
        {"engine.step_padding_s": config.engine.step_padding_s / 2, "seed": 100}, base=config
    )
    scores = {}
    for rate, momentum in _TRIES:
        changes = {"optimizer.learning_rate": rate, "optimizer.momentum": momentum}
        last = _run(from_overrides(changes, base=quick)).accuracies[-3:]
        scores[rate, momentum] = statistics.fmean(value for _, value in last)
    rate, momentum = max(scores, key=lambda tried: scores[tried])
    say(f"{config.sync.name}: rate {rate:g}, momentum {momentum:g}: {scores[rate, momentum]:.4f}")
    return {"optimizer.learning_rate": rate, "optimizer.momentum": momentum}
