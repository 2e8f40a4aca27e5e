"""Does the input keep up? Write shards, read them cold and warm in several ways, then train on them."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from labkit.config import ExperimentConfig, format_bytes, from_overrides, from_parameters, parse_bytes
from labkit.data.shards.reader import drop_cache
from labkit.errors import ConfigError, LabkitError
from labkit.lab._values import json_safe
from labkit.lab.failure import raise_if_failed
from labkit.lab.report import Verdict
from labkit.lab.run_all import run_one
from labkit.runfolder import runs_root, write_atomically

AIM_OF_WAIT = 0.02
_OWN = ("source", "source_options", "shards", "extents", "windows", "readers")


@dataclass(frozen=True)
class Setting:
    """One way to write and read.

    Attributes:
        shard_bytes: Of one file, at the most.
        extent_bytes: Of one request.
        window_bytes: That rows are drawn from.
        num_readers: Requests under way at once.
    """

    shard_bytes: int
    extent_bytes: int
    window_bytes: int
    num_readers: int

    def __str__(self) -> str:
        sizes = (self.shard_bytes, self.extent_bytes, self.window_bytes)
        shard, extent, window = (format_bytes(size) for size in sizes)
        return f"shards of {shard}, extents of {extent}, window of {window}, {self.num_readers} readers"


@dataclass(frozen=True)
class Measured:
    """What came of a setting: samples a second, and the order's quality beside a full shuffle's."""

    disk: float
    cold: float
    warm: float
    decode: float
    class_imbalance: float | None
    neighbours: float


@dataclass(frozen=True)
class Trained:
    """What a training on shards came to.

    Attributes:
        model: Samples a second that training computes, its waiting for data left out.
        wait_share: Part of the steps' time in which workers waited for data.
        start_share: Part of that waiting that was for the first batch.
        waits: The same by worker's rank.
        key: Of the run.
    """

    model: float
    wait_share: float
    start_share: float
    waits: Mapping[int, float]
    key: str


@dataclass(frozen=True)
class Result:
    """All that was measured, by setting; the first one is the experiment's own."""

    measured: Mapping[Setting, Measured]
    trained: Mapping[Setting, Trained]

    @property
    def training(self) -> Trained:
        """With the experiment's own setting."""
        return next(iter(self.trained.values()))

    @property
    def own(self) -> Measured:
        """Of the experiment's own setting."""
        return next(iter(self.measured.values()))

    @property
    def bottleneck(self) -> str:
        """The slowest side: disk, decode or model."""
        sides = {"model": self.training.model, "disk": self.own.disk, "decode": self.own.decode}
        return min(sides, key=lambda side: sides[side])


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        base: The experiment that trains, without its shards.
        source: As of `labkit shards write`.
        source_options: Keyword arguments of the source's function.
        settings: Ways to write and read; the first one is trained with.
    """

    base: ExperimentConfig
    source: str
    source_options: Mapping[str, Any]
    settings: tuple[Setting, ...]

    @classmethod
    def from_parameters(cls, namespace: Mapping[str, Any]) -> "Study":
        """From a notebook's parameters cell: `source`, `source_options`, and the lists `shards`, `extents`,
        `windows` and `readers`, whose first entries are the experiment's own; every other name as in
        `labkit.from_parameters`.

        Raises:
            ConfigError: an unknown name or a bad value.
        """
        others = {name: value for name, value in namespace.items() if name not in _OWN}
        never = 2**31 - 1
        quiet = {"engine.eval_every_steps": never, "engine.checkpoint_every_steps": never}
        base = from_parameters(others, defaults=quiet)
        sizes: dict[str, list[int]] = {}
        for name in _OWN[2:]:
            if not namespace[name]:
                raise ConfigError(f"{name} must have at least one entry, got none.")
            try:
                sizes[name] = [int(parse_bytes(value)) for value in namespace[name]]
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from None
        own = Setting(sizes["shards"][0], sizes["extents"][0], sizes["windows"][0], sizes["readers"][0])
        settings = [own]
        settings += [replace(own, shard_bytes=size) for size in sizes["shards"]]
        settings += [replace(own, extent_bytes=size) for size in sizes["extents"]]
        settings += [replace(own, window_bytes=size) for size in sizes["windows"]]
        settings += [replace(own, num_readers=count) for count in sizes["readers"]]
        for setting in settings:
            if setting.shard_bytes < setting.extent_bytes:
                raise ConfigError(f"shards must be at least as large as extents, got {setting}.")
        found = tuple(dict.fromkeys(settings))
        return cls(base, str(namespace["source"]), dict(namespace["source_options"]), found)

    def folder(self, setting: Setting) -> Path:
        """Where shards of a setting's sizes lie."""
        what = json.dumps([self.source, dict(self.source_options)], sort_keys=True)
        digest = hashlib.blake2b(what.encode(), digest_size=4).hexdigest()
        return (
            runs_root() / self.base.name / "shards" / f"{digest}-{setting.shard_bytes}-{setting.extent_bytes}"
        )

    def write(self, say: Callable[[str], object] = print) -> None:
        """Write what is not there yet; rows stay as the source has them, so that mixing is left to reading.

        Raises:
            LabkitError: the source can't be read, or there is no room.
        """
        for folder, setting in {self.folder(setting): setting for setting in self.settings}.items():
            if all(self._is_written(folder / part) for part in ("train", "val")):
                continue
            options = [f"--option={name}={json.dumps(value)}" for name, value in self.source_options.items()]
            sizes = [f"--extent-size={setting.extent_bytes}", f"--shard-size={setting.shard_bytes}"]
            command = [sys.executable, "-m", "labkit", "shards", "write", self.source, str(folder)]
            done = subprocess.run(
                [*command, "--no-shuffle", *sizes, *options], capture_output=True, text=True
            )
            if done.returncode:
                raise LabkitError((done.stderr.strip().splitlines() or ["writing failed"])[-1])
            extent = format_bytes(setting.extent_bytes)
            say(f"extents of {extent}: {done.stdout.splitlines()[0]}")

    @staticmethod
    def _is_written(folder: Path) -> bool:
        try:
            content = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        except OSError:
            return False
        return bool(content["is_complete"])

    def run(self, say: Callable[[str], object] = print) -> Result:
        """Read in every way, then train.

        Raises:
            LabkitError: shards can't be read.
            RunFailed: the training did not finish.
        """
        measured = dict(zip(self.settings, self._measure(), strict=True))
        for setting, found in measured.items():
            say(f"{setting}: {found.cold:,.0f} samples/s cold, {found.warm:,.0f} warm")
        trained = {setting: self._train(setting) for setting in self.settings}
        for setting, own in trained.items():
            say(f"{setting}: training waits for data {own.wait_share:.1%} of its time")
        return Result(measured, trained)

    def _train(self, setting: Setting) -> "Trained":
        """Train from a cold disk."""
        drop_cache(self.folder(setting).rglob("*.arrow"))
        run = run_one(self.config(setting))
        raise_if_failed(run)
        waits, data_s, first_s, step_s, samples = {}, 0.0, 0.0, 0.0, 0
        for rank in run.folder.ranks():
            steps = run.folder.history(rank, ("step",))
            own_data_s, own_step_s = (sum(event[name] for event in steps) for name in ("data_s", "step_s"))
            waits[rank] = own_data_s / own_step_s
            data_s, step_s = data_s + own_data_s, step_s + own_step_s
            first_s += steps[0]["data_s"]
            samples += sum(event["samples"] for event in steps)
        model = samples / ((step_s - data_s) / max(1, len(waits)))
        return Trained(model, data_s / step_s, first_s / max(data_s, 1e-9), waits, run.folder.key)

    def config(self, setting: Setting) -> ExperimentConfig:
        """The experiment that trains on shards."""
        changes = {
            "data": {
                "name": "shards",
                "path": str(self.folder(setting)),
                "window": setting.window_bytes,
                "num_readers": setting.num_readers,
            }
        }
        return from_overrides(changes, base=self.base)

    def _measure(self) -> list[Measured]:
        batch_size = self.base.engine.global_batch_size
        wanted = [
            {"path": str(self.folder(s)), "window": s.window_bytes, "num_readers": s.num_readers}
            for s in self.settings
        ]
        text = json.dumps([{**one, "batch_size": batch_size} for one in wanted])
        command = [sys.executable, "-m", "labkit.tasks.read_speed"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode:
            raise LabkitError((done.stderr.strip().splitlines() or ["reading failed"])[-1])
        return [Measured(**json.loads(line)) for line in done.stdout.splitlines()]


_REMEDIES = {
    "disk": "Read fewer bytes (smaller types, encoded images), or keep the shards on a faster disk.",
    "decode": "Decode in more threads or processes (data.num_decoders), or write rows decoded.",
    "model": "Disk and decoding are faster than it; a faster device or a smaller model would be next.",
}


def verdict(result: Result) -> Verdict:
    """Whether training waits for data no more than 2 % of its time, and which side is slowest."""
    own, training = result.own, result.training
    text = (
        f"Training waits for data {training.wait_share:.1%} of its time (aim: at most {AIM_OF_WAIT:.0%}), "
        f"{training.start_share:.0%} of that for the first batch. The "
        f"slowest side is the {result.bottleneck}: disk {own.disk:,.0f}, decoding {own.decode:,.0f}, model "
        f"{training.model:,.0f} samples/s. {_REMEDIES[result.bottleneck]}"
    )
    return Verdict(text, training.wait_share <= AIM_OF_WAIT, time.time())


def record(study: Study, result: Result) -> Verdict:
    """Write all numbers and the verdict to `input.json` in the experiment's folder under `runs/`.

    Returns:
        The verdict, to show as the cell's value.
    """
    final = verdict(result)
    content = {
        "verdict": asdict(final),
        "measured": [{**asdict(s), **asdict(m)} for s, m in result.measured.items()],
        "trained": [{**asdict(s), **asdict(t)} for s, t in result.trained.items()],
        "bottleneck": result.bottleneck,
    }
    write_atomically(runs_root() / study.base.name / "input.json", json.dumps(json_safe(content), indent=1))
    return final
