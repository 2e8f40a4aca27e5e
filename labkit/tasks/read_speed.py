"""How fast shards are read, from the disk alone, from memory with decoding, all together; and how mixed."""

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.config import ShardsConfig
from labkit.data.sampler import GlobalSampler, Indices, SamplerState
from labkit.data.shards import ShardIndex, read_index, shuffle_quality
from labkit.data.shards.reader import drop_cache
from labkit.tasks.shard_sources import targets_of
from labkit.tasks.shards import ShardSamples, shard_folders

_REQUEST_BYTES = 2**20


@dataclass(frozen=True)
class ReadSpeed:
    """Samples a second.

    Attributes:
        disk: A plain read of the files from one end to the other, dropped from the page cache before.
        cold: All together: read in windows, gathered and decoded, dropped from the page cache before.
        warm: The same again, from the page cache.
        decode: Gathering and decoding alone, from memory.
    """

    disk: float
    cold: float
    warm: float
    decode: float


def measure(config: ShardsConfig, batch_size: int, *, limit_s: float = 5.0) -> ReadSpeed:
    """Read an epoch cold and one warm, each for some seconds at the most.

    Args:
        config: The shards and how they are read.
        batch_size: Of the worker that reads.
        limit_s: Longest measurement of each kind.

    Raises:
        ConfigError: there are no shards.
        ShardError: a shard can't be read.
    """
    folder, _ = shard_folders(config)
    index = read_index(folder)
    paths = [folder / shard.file for shard in index.shards]
    drop_cache(paths)
    disk = plain_rate(index, paths, limit_s)
    drop_cache(paths)
    rates = []
    for _ in range(2):
        samples = ShardSamples(folder, config, 0, is_training=True)
        try:
            rates.append(_rate(samples, batch_size, limit_s))
            if len(rates) == 2:
                rates.append(_decode_rate(samples, batch_size, limit_s))
        finally:
            samples.close()
    return ReadSpeed(disk, *rates)


def plain_rate(index: ShardIndex, paths: list[Path], limit_s: float = math.inf) -> float:
    """Samples a second of reading files from one end to the other."""
    buffer = bytearray(_REQUEST_BYTES)
    began_at = time.perf_counter()
    done_bytes = 0
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                done_bytes += count
        if time.perf_counter() - began_at > limit_s:
            break
    rows = index.num_rows * min(1.0, done_bytes / sum(path.stat().st_size for path in paths))
    return rows / (time.perf_counter() - began_at)


def _batches(samples: ShardSamples, batch_size: int) -> Iterator[tuple[Indices, list[int]]]:
    """Batches of the second epoch, whose windows have their full size, and what to read soon."""
    sampler, state = GlobalSampler(samples.order(0), batch_size), SamplerState(1, 0)
    planned: list[Indices] = []
    while state.epoch == 1 or planned:
        while state.epoch == 1 and len(planned) < 64:
            rows, state = sampler.batch(state)
            planned.append(rows)
        ahead = [extent for rows in planned for extent in samples.extents_of(rows)]
        yield planned.pop(0), list(dict.fromkeys(ahead))[: samples.num_ahead]


def _rate(samples: ShardSamples, batch_size: int, limit_s: float) -> float:
    began_at, count = time.perf_counter(), 0
    for number, (rows, ahead) in enumerate(_batches(samples, batch_size)):
        if number % 8 == 0:
            samples.ahead(ahead)
        count += len(samples.batch_at(0, rows)[1])
        if time.perf_counter() - began_at > limit_s:
            break
    return count / (time.perf_counter() - began_at)


def _decode_rate(samples: ShardSamples, batch_size: int, limit_s: float) -> float:
    """The same batch over and over: after the first time all of it is in memory."""
    rows = GlobalSampler(samples.order(0), batch_size).batch(SamplerState())[0]
    samples.batch_at(0, rows)
    began_at, count = time.perf_counter(), 0
    while time.perf_counter() - began_at < min(1.0, limit_s):
        count += len(samples.batch_at(0, rows)[1])
    return count / (time.perf_counter() - began_at)


def main() -> None:
    """`python -m labkit.tasks.read_speed`: settings come in as a JSON list, a line goes out for each."""
    for settings in json.load(sys.stdin):
        batch_size: int = settings.pop("batch_size")
        config = ShardsConfig(**settings)
        found: dict[str, Any] = asdict(measure(config, batch_size))
        folder, _ = shard_folders(config)
        samples = ShardSamples(folder, config, 0, is_training=True)
        quality = shuffle_quality(samples.order(0), batch_size, targets_of(folder, samples.index))
        mixing = {"class_imbalance": quality.class_imbalance, "neighbours": quality.neighbours}
        print(json.dumps(found | mixing), flush=True)


if __name__ == "__main__":
    main()
