"""Does a batch that does not fit train at full speed? Budgets, the largest batch, and devices on one link."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from labkit.config import ExperimentConfig, format_bytes, from_overrides, from_parameters, parse_bytes
from labkit.errors import ConfigError
from labkit.lab._values import json_safe
from labkit.lab.activations._max_batch import MaxBatch, max_batch
from labkit.lab.activations._recorded import MemoryRun, read_memory
from labkit.lab.report import Verdict
from labkit.lab.run_all import run_one
from labkit.memory.planner import make_plan
from labkit.memory.recorded import Recorded
from labkit.memory.simulate import Limits, simulate_shared
from labkit.memory.uplink import Uplink
from labkit.runfolder import runs_root, write_atomically

AIM_OF_SPEED = 0.95
AIM_OF_PREDICTION = 1.1
_NO_LIMIT = 2**50
_OWN = ("budgets", "link_rate", "devices", "most_measured")


@dataclass(frozen=True)
class Contention:
    """Several devices on one link.

    Attributes:
        num_devices: Behind it.
        predicted_s: Seconds of a step, planned with their share of the link.
        predicted_alone_s: Planned as if each had the link to itself.
        floor_s: Computing, or the bytes that move over what the link brings through: no schedule beats it.
        peak_bytes: Of blocks on each device, planned with their share.
        moved_bytes: By each device in a step, likewise.
        measured_s: What the slowest worker took in training, as far; None: not measured.
    """

    num_devices: int
    predicted_s: float
    predicted_alone_s: float
    floor_s: float
    peak_bytes: int
    moved_bytes: int
    measured_s: float | None = None

    def __str__(self) -> str:
        return (
            f"{self.num_devices} on the link: {1e3 * self.predicted_s:.1f} ms a step (planned as if alone "
            f"{1e3 * self.predicted_alone_s:.1f}, floor {1e3 * self.floor_s:.1f}); each moves "
            f"{format_bytes(self.moved_bytes)}, peak {format_bytes(self.peak_bytes)}"
        )


@dataclass(frozen=True)
class Result:
    """All that was measured.

    Attributes:
        runs: By budget, as a part of what a step without limit has on the device; 1.0 first.
        batches: The largest batch by budget.
        contention: By number of devices.
    """

    runs: Mapping[float, MemoryRun]
    batches: Mapping[float, MaxBatch]
    contention: tuple[Contention, ...]

    @property
    def plain(self) -> MemoryRun:
        """Without limit."""
        return self.runs[1.0]

    def kept(self, budget: float) -> float:
        """Part of the speed without limit that is left."""
        return self.runs[budget].samples_per_s / self.plain.samples_per_s


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        base: The experiment, on one device.
        budgets: Parts of what a step without limit has on the device beside the parameters.
        uplink: The link.
        devices: Numbers of devices on it.
        most_measured: Devices that are really trained with; larger numbers are simulated alone.
    """

    base: ExperimentConfig
    budgets: tuple[float, ...]
    uplink: Uplink
    devices: tuple[int, ...]
    most_measured: int

    @classmethod
    def from_parameters(cls, namespace: Mapping[str, Any]) -> "Study":
        """From a notebook's parameters cell: `budgets`, `link_rate`, `devices`, `most_measured`; every other
        name as in `labkit.from_parameters`.

        Raises:
            ConfigError: an unknown name or a bad value.
        """
        others = {name: value for name, value in namespace.items() if name not in _OWN}
        never = 2**31 - 1
        quiet = {"engine.eval_every_steps": never, "engine.checkpoint_every_steps": never}
        base = from_parameters(others, defaults=quiet)
        budgets = tuple(float(part) for part in namespace["budgets"])
        if not budgets or not all(0 < part < 1 for part in budgets):
            raise ConfigError(
                f"budgets must be between 0 and 1, got {list(budgets)}. For example [0.7, 0.5]."
            )
        devices = tuple(int(count) for count in namespace["devices"])
        if not devices or min(devices) < 1:
            raise ConfigError(f"devices must be at least 1 each, got {list(devices)}. Use [1, 2, 4].")
        try:
            rate = float(parse_bytes(namespace["link_rate"]))
        except ValueError as error:
            raise ConfigError(f"link_rate: {error}") from None
        if base.cluster.num_workers != 1:
            raise ConfigError(
                f"cluster must have one worker, got {base.cluster.num_workers}: `devices` says how many "
                "share the link. Use cluster=1x1."
            )
        most = int(namespace["most_measured"])
        return cls(base, tuple(sorted(budgets, reverse=True)), Uplink.ideal(rate), devices, most)

    @property
    def middle(self) -> float:
        """The budget that is looked at closely."""
        return self.budgets[(len(self.budgets) - 1) // 2]

    def config(self, budget_bytes: int, num_devices: int = 1, **changes: Any) -> ExperimentConfig:
        """The experiment under a budget, on some devices behind one link."""
        rate = round(self.uplink.out_rates[0])
        node = {
            "name": "node0",
            "workers": num_devices,
            "uplinks": [{"out_rates": [rate], "in_rates": [rate]}],
        }
        values = {
            "cluster": {"nodes": [node]},
            "engine.global_batch_size": self.base.engine.global_batch_size * num_devices,
            # As long for each as it is for one.
            "engine.step_padding_s": self.base.engine.step_padding_s,
            "memory.device_budget": budget_bytes,
            **changes,
        }
        return from_overrides(values, base=self.base)

    def run(self, say: Callable[[str], object] = print) -> Result:
        """Train under every budget, search the largest batches, put more devices on the link.

        Raises:
            RunFailed: a training did not finish.
        """
        plain = read_memory(run_one(self.config(_NO_LIMIT)))
        reserved, peak = plain.recorded.reserved_bytes, plain.predicted.peak_bytes
        runs, batches = {1.0: plain}, {}
        for budget in self.budgets:
            limit = reserved + round(budget * peak)
            runs[budget] = read_memory(run_one(self.config(limit)))
            say(f"budget {budget:.0%}: {runs[budget].samples_per_s:,.0f} samples/s")
        for budget in self.budgets:
            limit = reserved + round(budget * peak)
            batches[budget] = max_batch(self.config(limit), is_repeat=False, wait=lambda run: run.wait())
            say(f"budget {budget:.0%}: batch {batches[budget].plain} without, {batches[budget].hybrid} with")
        contention = []
        limit = reserved + round(self.middle * peak)
        for num_devices in self.devices:
            contention.append(self._share(runs[self.middle], num_devices, limit))
            say(str(contention[-1]))
        return Result(runs, batches, tuple(contention))

    def _share(self, alone: MemoryRun, num_devices: int, limit: int) -> Contention:
        """Predict, and measure where that is asked for."""
        found = what_if(alone.recorded, self.uplink, num_devices)
        if num_devices > self.most_measured:
            return found
        run = run_one(self.config(limit, num_devices))
        workers = [read_memory(run, rank) for rank in range(num_devices)]
        return replace(found, measured_s=max(float(w.report["measured_step_s"]) for w in workers))


def what_if(recorded: Recorded, uplink: Uplink, num_devices: int) -> Contention:
    """A step of like devices on one link, from the profile of one: planned anew, simulated together.

    Raises:
        Infeasible: nothing fits the budget.
    """
    limits = Limits(recorded.budget_bytes, recorded.window_bytes)
    outcomes = []
    for link in (uplink.share(num_devices), uplink.share(1)):
        plan = make_plan(
            recorded.profile,
            link,
            budget_bytes=limits.budget_bytes,
            host_bytes=recorded.host_bytes,
            window_bytes=limits.window_bytes,
            allowed=recorded.allowed,
            reserved_bytes=recorded.reserved_bytes,
        )
        together = simulate_shared(
            [recorded.profile] * num_devices, [plan.decisions] * num_devices, uplink, limits=limits
        )
        outcomes.append(max(together, key=lambda outcome: outcome.step_s))
    shared, alone = outcomes
    link_s = num_devices * shared.moved_bytes / uplink.rate("out", num_devices)
    return Contention(
        num_devices,
        shared.step_s,
        alone.step_s,
        max(recorded.profile.step_s, link_s),
        shared.peak_bytes,
        shared.moved_bytes,
    )


def verdict(result: Result) -> Verdict:
    """Whether the smallest budget that keeps its speed also predicts well."""
    free = [budget for budget in result.batches if result.kept(budget) >= AIM_OF_SPEED]
    worst = max(_apart(run) for run in result.runs.values())
    if free:
        best = min(free)
        growth = result.batches[best].growth
        first = (
            f"At {best:.0%} of the memory training keeps {result.kept(best):.0%} of its speed, and the "
            f"largest batch is {growth:.2f} times that without."
        )
    else:
        first = f"No budget keeps {AIM_OF_SPEED:.0%} of the speed: the link is too slow for what has to move."
    text = f"{first} Predicted and measured step times are within {worst - 1:.0%}."
    return Verdict(text, bool(free) and worst <= AIM_OF_PREDICTION, time.time())


def _apart(run: MemoryRun) -> float:
    """How many times apart the predicted and the measured time of a step by the plan are."""
    predicted_s, measured_s = float(run.report["predicted_step_s"]), float(run.report["measured_step_s"])
    return max(predicted_s, measured_s) / max(min(predicted_s, measured_s), 1e-9)


def record(study: Study, result: Result) -> Verdict:
    """Write all numbers and the verdict to `memory.json` in the experiment's folder under `runs/`.

    Returns:
        The verdict, to show as the cell's value.
    """
    final = verdict(result)
    content = {
        "verdict": asdict(final),
        "runs": [
            {
                "budget": budget,
                "key": run.key,
                "samples_per_s": run.samples_per_s,
                "kept": result.kept(budget),
                **run.report,
            }
            for budget, run in result.runs.items()
        ],
        "batches": [{"budget": budget, **asdict(found)} for budget, found in result.batches.items()],
        "contention": [asdict(one) for one in result.contention],
    }
    write_atomically(runs_root() / study.base.name / "memory.json", json.dumps(json_safe(content), indent=1))
    return final
