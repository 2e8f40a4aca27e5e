"""The ladder: from the native strategy to ours, one part at a time.

The native strategy is the flat synchronous parameter server of 2016-2020 in float32, without overlap and with
a small batch. Every rung keeps what the ones below it have. All rungs train for equally many epochs; those up
to `bfloat16` with the same batches in the same order, so they differ in speed and hardly in weights.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from labkit.config import ExperimentConfig, from_overrides
from labkit.lab import large_batch
from labkit.lab._values import json_safe
from labkit.lab.scaling._point import Point, memory_floor, run_point
from labkit.lab.scaling._study import NEVER, emulated_or_loopback
from labkit.runfolder import runs_root, write_atomically

_CHUNK_BYTES = 2**20
_NOTHING = 0.03
"""A gain below this share is called nothing: repeats differ by as much."""

PARTS: dict[str, str] = {
    "native": "flat server, float32, small batch",
    "two_levels": "two levels, shared memory",
    "chunks": "chunks of 1 MiB, pipelined",
    "overlap": "overlap with back-propagation",
    "bfloat16": "bfloat16 on the wire",
    "large_batch": "larger batch with LARS",
}


@dataclass(frozen=True)
class Ladder:
    """What is climbed.

    Attributes:
        base: Model, cluster, links and epochs of all rungs.
        batch_size: Samples per step of all rungs but the last.
        large_batch_size: That of the last rung.
        step_padding_s: Emulated compute of a step at `batch_size`, so that the processor is free to send.
        compute_growth: How much longer the compute of a step is at `large_batch_size`.
        sgd_rates: Learning rates tried at `batch_size`.
        lars_rates: Learning rates tried at `large_batch_size`, equally many.
        num_tuning_seeds: Runs of each rate that is tried, on seeds that are not used again.
        remark: Whether links are shaped, in words.
    """

    base: ExperimentConfig
    batch_size: int = 64
    large_batch_size: int = 128
    step_padding_s: float = 0.06
    compute_growth: float = 1.1
    sgd_rates: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8)
    lars_rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    num_tuning_seeds: int = 2
    remark: str = ""

    @classmethod
    def default(cls, name: str = "ladder", **changes: Any) -> "Ladder":
        """A network of 1.1 million parameters on digits, 4x4 workers, links of 1 Gbit/s.

        Its layers are alike: overlap can hide little where one layer holds most of the parameters, since that
        one's gradient comes last.

        Args:
            name: Folder under `runs/`.
            changes: Fields of this class, or dotted keys of the configuration.
        """
        fields = {key: changes.pop(key) for key in list(changes) if key in cls.__dataclass_fields__}
        base = from_overrides(
            {
                "name": name,
                "model": {"name": "mlp", "hidden_sizes": [704] * 3},
                "cluster": "4x4-1gbit",
                "engine.num_epochs": 6,
                "engine.num_threads": 1,
                "engine.eval_every_steps": NEVER,
                "engine.checkpoint_every_steps": NEVER,
                "optimizer.weight_decay": 1e-4,
                "launch.is_emulated": True,
                "launch.is_tracked": False,
                **changes,
            }
        )
        placed, remark = emulated_or_loopback(base, base)
        return cls(placed, remark=remark, **fields)

    @property
    def study(self) -> large_batch.Study:
        """How both rates are tuned: on one worker, since all synchronous strategies are one algorithm."""
        alone = {"cluster": "1x1", "launch.is_emulated": False, "cluster.link_mbit": None}
        return large_batch.Study(
            base=from_overrides(alone, base=self.base),
            batch_sizes=(self.batch_size, self.large_batch_size),
            rates={"sgd": self.sgd_rates, "lars": self.lars_rates},
            trust_coefficient=0.02,
            warmup_epochs=1.0,
            num_samples=1500,
            num_seeds=1,
            num_tuning_seeds=self.num_tuning_seeds,
            num_at_once=2,
        )

    def configs(self, sgd_rate: float, lars_rate: float) -> dict[str, ExperimentConfig]:
        """The rungs from the lowest on."""
        small = self.study.config("sgd", self.batch_size, sgd_rate, 0)
        large = self.study.config("lars", self.large_batch_size, lars_rate, 0)
        place = {
            "cluster": self.base.cluster.model_dump(mode="json"),
            "launch.is_emulated": self.base.launch.is_emulated,
            "engine.step_padding_s": self.step_padding_s,
        }
        whole_bytes = 2**30  # more than any model here: one chunk
        two_levels = {"sync.name": "hierarchical", "sync.is_overlapped": False, "sync.num_senders": 1}
        chunks = {**two_levels, "sync.chunk_bytes": _CHUNK_BYTES}
        overlap = {**chunks, "sync.is_overlapped": True}
        bfloat16 = {**overlap, "sync.wire": "bfloat16"}
        padded = {**place, "engine.step_padding_s": self.step_padding_s * self.compute_growth}
        return {
            "native": from_overrides({**place, "sync.name": "parameter_server"}, base=small),
            "two_levels": from_overrides(
                {**place, **two_levels, "sync.chunk_bytes": whole_bytes}, base=small
            ),
            "chunks": from_overrides({**place, **chunks}, base=small),
            "overlap": from_overrides({**place, **overlap}, base=small),
            "bfloat16": from_overrides({**place, **bfloat16}, base=small),
            "large_batch": from_overrides({**padded, **bfloat16}, base=large),
        }

    def climb(
        self,
        say: Callable[[str], object] = print,
        measure: Callable[[ExperimentConfig], Point] = run_point,
    ) -> "Climb":
        """Tune both rates, then train the rungs, one after the other.

        Args:
            say: Takes a line for each run.
            measure: Trains one configuration and sums it up.

        Raises:
            RunFailed: a run did not finish.
        """
        tuning = self.study.tune(say)
        sgd_rate = tuning.best("sgd", self.batch_size)
        lars_rate = tuning.best("lars", self.large_batch_size)
        sgd_large = tuning.scores["sgd", self.large_batch_size, tuning.best("sgd", self.large_batch_size)]
        lars_large = tuning.scores["lars", self.large_batch_size, lars_rate]
        rungs, bases = {}, {}
        for name, config in self.configs(sgd_rate, lars_rate).items():
            rungs[name] = measure(config)
            floor = memory_floor(config)
            bases[name] = run_point(floor).node_bytes if floor is not None else 0.0
            climb = Climb(rungs, bases, self.remark)
            say(f"{name}: {climb.gives(name)}")
        return Climb(
            rungs,
            bases,
            self.remark,
            step_padding_s=self.step_padding_s,
            compute_growth=self.compute_growth,
            rates={"sgd": sgd_rate, "lars": lars_rate},
            tuned_accuracies={"sgd": sgd_large.accuracy, "lars": lars_large.accuracy},
        )


@dataclass(frozen=True)
class Climb:
    """The rungs that were measured, from the lowest on.

    Attributes:
        rungs: By name, see `PARTS`.
        bases: Resident memory of a node without the model, bytes, by rung.
        remark: Whether links were shaped.
        step_padding_s: Emulated compute of a step with the small batch.
        compute_growth: How much longer it was with the large one.
        rates: Learning rate by optimizer.
        tuned_accuracies: At the large batch, mean over the tuning seeds, by optimizer.
    """

    rungs: dict[str, Point]
    bases: dict[str, float]
    remark: str = ""
    step_padding_s: float = 0.0
    compute_growth: float = 1.0
    rates: dict[str, float] = field(default_factory=dict)
    tuned_accuracies: dict[str, float] = field(default_factory=dict)

    def vs_native(self, name: str) -> float:
        """Throughput of a rung over that of the native strategy."""
        return self.rungs[name].samples_per_s / self.rungs["native"].samples_per_s

    def bytes_per_sample(self, name: str) -> float:
        """Bytes that all links together carry for one sample."""
        return self.rungs[name].all_bytes / self.rungs[name].batch_size

    def memory_bytes(self, name: str) -> float:
        """Memory of a node for the model."""
        return self.rungs[name].node_bytes - self.bases[name]

    def gives(self, name: str) -> str:
        """What a rung gives beside the one below it, in words; also where it gives nothing."""
        names = list(self.rungs)
        own = self.rungs[name]
        if name == names[0]:
            return (
                f"{own.samples_per_s:,.0f} samples/s, {self.bytes_per_sample(name) / 1e6:.2f} MB per sample"
            )
        below = names[names.index(name) - 1]
        points = 100 * ((own.accuracy or 0.0) - (self.rungs[below].accuracy or 0.0))
        gains = [
            ("throughput", own.samples_per_s / self.rungs[below].samples_per_s),
            ("bytes", self.bytes_per_sample(name) / self.bytes_per_sample(below)),
        ]
        texts = [f"{what} x{gain:.2f}" for what, gain in gains if abs(gain - 1) > _NOTHING]
        moved = f"; accuracy {points:+.1f} points" if abs(points) >= 0.05 else ""
        return (", ".join(texts) or "nothing in throughput or bytes") + moved

    def proportional_samples_per_s(self) -> float:
        """Throughput of the last rung had its compute grown with the batch, as on a device that is full."""
        last, first = self.rungs["large_batch"], self.rungs["native"]
        growth = last.batch_size / first.batch_size - self.compute_growth
        return last.batch_size / (last.step_s + growth * self.step_padding_s)

    def to_json(self) -> str:
        """As strict JSON, for `read_climb`."""
        return json.dumps(json_safe(asdict(self)), indent=1, allow_nan=False)


def record_climb(climb: Climb, name: str = "ladder") -> Path:
    """Write a climb to `ladder.json` in its experiment's folder under `runs/`."""
    path = runs_root() / name / "ladder.json"
    write_atomically(path, climb.to_json())
    return path


def read_climb(name: str = "ladder") -> Climb | None:
    """The climb that was recorded last; None when there is none."""
    try:
        content = json.loads((runs_root() / name / "ladder.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    lists = ("block_step_s", "sent_bytes", "expected_bytes", "memory_bytes", "doubts")
    for values in content["rungs"].values():
        values.update({key: tuple(values[key]) for key in lists})
    rungs = {rung: Point(**values) for rung, values in content.pop("rungs").items()}
    return Climb(rungs, **content)
