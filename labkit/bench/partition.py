"""Unlike devices under a plan: two fast machines and two that are a quarter as fast."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from labkit.bench.emulated import check_links
from labkit.bench.harness import Report, interleave, ratios
from labkit.bench.points import measured_point
from labkit.cluster.partition import partition
from labkit.cluster.plan import devices_of, make_plan, predict, workers_of
from labkit.config import ExperimentConfig, from_overrides
from labkit.lab.heterogeneity import Study, probe
from labkit.launch import warm_up
from labkit.launch.emulation import build
from labkit.runfolder import find_run

_RATES = (1000.0, 100.0)
_REPEATS = 5
_RECOVERIES = 3
_NEAR = 1.10


def measure(say: Callable[[str], None]) -> Report:
    """Measure at both link rates; about six minutes on two cores.

    Raises:
        ConfigError: nodes can't be emulated here.
        LabkitError: a link is not what it is said to be.
    """
    warm_up()
    report = Report("partition")
    for mbit in _RATES:
        study = _study(mbit)
        with build(study.base.cluster) as network:
            check_links(network, say)
        suffix = "" if mbit == _RATES[0] else f"_{mbit:g}mbit"
        _add_plan(report, study, suffix, say)
    report.notes.append(
        "over_limit: samples/s under the plan over the sum of the devices' own speeds, which are known here; "
        "at 100 Mbit/s the sum of all gradients takes longer than the part of the backward pass that could "
        "hide it, whatever the plan: bound says what is possible at best. recovery_steps: steps from the one "
        "at which a fast worker becomes three times as slow until steps stay within 10 % of the new best plan"
    )
    return report


def unlike_devices(changes: Mapping[str, Any]) -> ExperimentConfig:
    """An experiment on emulated devices of speeds 4, 4, 1, 1, each on a node of its own."""
    return from_overrides(
        {
            "model": {"name": "mlp", "hidden_sizes": [320] * 4},
            "cluster": "4x1-unlike",
            "engine.num_threads": 1,
            "engine.checkpoint_every_steps": 1_000_000,
            "launch.is_emulated": True,
            "launch.is_tracked": False,
            **changes,
        }
    )


def _study(mbit: float) -> Study:
    base = unlike_devices(
        {
            "name": "bench-partition",
            "cluster.link_mbit": mbit,
            "sync": "hierarchical",
            "engine.global_batch_size": 160,
            "engine.step_padding_s": 0.2,
            "engine.num_epochs": 100,
            "engine.max_steps": 50,
            "engine.eval_every_steps": 1_000_000,
        }
    )
    return Study(base, throttled_rank=1, throttle_factor=3.0, remark="")


def true_limit(config: ExperimentConfig) -> float:
    """The sum of the emulated devices' own speeds, samples/s."""
    workers = workers_of(config.cluster)
    even_share = config.engine.global_batch_size / len(workers)
    return sum(worker.speed * even_share / config.engine.step_padding_s for worker in workers)


def _add_plan(report: Report, study: Study, suffix: str, say: Callable[[str], None]) -> None:
    found = probe(study.base, wait=lambda run: run.wait())
    planned = study.planned(found)
    prediction = predict(planned, make_plan(planned))
    assert prediction is not None  # a probe gives every worker a profile

    def side(name: str) -> Callable[[], float]:
        def once() -> float:
            point = measured_point(study.config(name, found), say)
            say(f"{name}{suffix}: {1e3 * point.step_s:.1f} ms {'; '.join(point.doubts)}")
            return point.step_s

        return once

    step_s = interleave({name: side(name) for name in ("equal split", "planned")}, _REPEATS, warmup=0)
    batch, limit = study.base.engine.global_batch_size, true_limit(study.base)
    is_fast = not suffix
    report.add(
        f"over_limit{suffix}", [batch / s / limit for s in step_s["planned"]], ">= 0.95" if is_fast else ""
    )
    bound = batch / max(prediction.step_s, batch / limit) / limit
    report.add(f"bound{suffix}", [bound])
    report.add(
        f"vs_equal_split{suffix}",
        ratios(step_s["equal split"], step_s["planned"]),
        ">= 2.3" if is_fast else "",
    )
    report.add(
        f"prediction_error{suffix}",
        [abs(prediction.step_s / seconds - 1) for seconds in step_s["planned"]],
        "<= 0.05",
    )
    if is_fast:
        steps = [
            _recovery_steps(study, study.config("planned, throttled, rebalanced", found), say)
            for _ in range(_RECOVERIES)
        ]
        report.add("recovery_steps", steps, "<= 20")


def _recovery_steps(study: Study, config: ExperimentConfig, say: Callable[[str], None]) -> float:
    """Steps from the throttle on after which every median of five stays near the new best plan's time."""
    devices = devices_of(config)
    assert devices is not None
    slowed = [
        device.scaled(study.throttle_factor) if rank == study.throttled_rank else device
        for rank, device in enumerate(devices)
    ]
    best_s = partition(slowed, config.engine.global_batch_size).step_time_s
    point = measured_point(config, say)
    seconds = [event["step_s"] for event in find_run(point.key).history(0, ("step",))]
    after = seconds[study.throttled_from - 1 :]
    for start in range(len(after) - 5):
        windows = [statistics.median(after[i : i + 5]) for i in range(start, len(after) - 4)]
        if max(windows) <= _NEAR * best_s:
            return float(start)
    return float(len(after))
