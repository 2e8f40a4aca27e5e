"""Input from shards: against a plain read, the memory itself, random reads and other loaders."""

import importlib.util
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit.bench._disk import throttled_disk
from labkit.bench.harness import Report, interleave, ratios
from labkit.config import ShardsConfig
from labkit.data.sampler import GlobalSampler, SamplerState
from labkit.data.shards import ShardIndex, WriteOptions, read_index
from labkit.data.shards.reader import drop_cache
from labkit.data.shards.sources import MapSource
from labkit.data.shards.write import write_shards
from labkit.engine.feed import Feed, Piece
from labkit.errors import LabkitError
from labkit.runfolder import RunFolder, runs_root
from labkit.tasks.read_speed import plain_rate
from labkit.tasks.shards import ShardSamples

_SHAPE = (3, 32, 32)
_ROW_BYTES = 3 * 32 * 32
_NUM_ROWS = 2**16  # 192 MiB
_BATCH = 256
_SHARD_BYTES = 16 * 2**20
_WINDOW_BYTES = 32 * 2**20
_WINDOW_ROWS = _WINDOW_BYTES // _ROW_BYTES
_NUM_RANDOM = 12_000  # rows read one by one: enough, and slow
_REPEATS = 5
_NUM_WORKERS = 2  # of the other loaders; we have as many reading threads
_FORK = multiprocessing.get_context("fork")
Side = Callable[[Path], float]


def measure(say: Callable[[str], None]) -> Report:
    """Write a data set in every format, then read it cold and warm; about four minutes on two cores.

    Raises:
        LabkitError: a side failed.
    """
    torch.set_num_threads(1)
    report = Report("input")
    with ExitStack() as stack:
        runs_root().mkdir(parents=True, exist_ok=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=runs_root(), prefix=".input-")))
        report.add("write_mb_s", [_write(folder, say)])
        peers = _peers(folder, report)
        join, remark = stack.enter_context(throttled_disk(folder))
        report.notes.append(remark)
        sides = {"sequential": _read_plainly, "ours": _ours, "random": _one_by_one, **peers}

        def cold(name: str) -> float:
            drop_cache(path for path in folder.rglob("*") if path.is_file())
            rate = _in_process(sides[name], folder, join)
            say(f"cold, {name}: {rate:,.0f} samples/s")
            return rate

        rates = interleave({name: partial(cold, name) for name in sides}, _REPEATS, warmup=0)
        report.add("over_sequential_cold", ratios(rates["ours"], rates["sequential"]), ">= 0.9")
        report.add("vs_random_cold", ratios(rates["ours"], rates["random"]), ">= 5")
        for name in peers:
            report.add(f"vs_{name}_cold", ratios(rates["ours"], rates[name]))
        _best(report, "cold", rates, list(peers))
        report.add("wait_share", [_wait_share(folder, join, say) for _ in range(3)], "<= 0.02")

        warm_sides = {"memory": _copy_memory, "ours": _ours_again, **peers}

        def warm(name: str) -> float:
            _read_plainly(folder)
            rate = _in_process(warm_sides[name], folder, lambda: None)
            say(f"warm, {name}: {rate:,.0f} samples/s")
            return rate

        rates = interleave({name: partial(warm, name) for name in warm_sides}, _REPEATS, warmup=0)
        report.add("over_memory_warm", ratios(rates["ours"], rates["memory"]), ">= 0.5")
        for name in peers:
            report.add(f"vs_{name}_warm", ratios(rates["ours"], rates[name]))
        _best(report, "warm", rates, list(peers))
    report.notes.append(
        f"rows of {_ROW_BYTES} bytes (uint8, {'x'.join(map(str, _SHAPE))}) in batches of {_BATCH}, drawn "
        f"from a window of {_WINDOW_ROWS} rows on every side but the random one, which draws from all; peers "
        f"have {_NUM_WORKERS} worker processes, we have {_NUM_WORKERS} reading threads; cold: files dropped "
        "from the page cache before; warm: second epoch, all files in the page cache"
    )
    return report


def _best(report: Report, kind: str, rates: dict[str, list[float]], peers: Sequence[str]) -> None:
    """Against the best of the others, round by round."""
    if peers:
        best = [max(values) for values in zip(*(rates[name] for name in peers), strict=True)]
        report.add(f"vs_best_{kind}", ratios(rates["ours"], best), ">= 2")


def _in_process(side: Side, folder: Path, join: Callable[[], None]) -> float:
    """Samples a second of one side, in a process of its own."""
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_run_side, args=(side, folder, join, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = "it died"
    process.join()
    if isinstance(found, str):
        raise LabkitError(f"{side.__name__} failed: {found}")
    return float(found)


def _run_side(side: Side, folder: Path, join: Callable[[], None], reply: Connection) -> None:
    try:
        join()
        reply.send(side(folder))
    except Exception as error:
        reply.send(repr(error))


# --- data ------------------------------------------------------------------------------------------------


class _Pictures:
    """Rows of noise, so that nothing can compress them."""

    def __init__(self) -> None:
        self._rows = np.random.default_rng(0).integers(0, 256, (4096, *_SHAPE), dtype=np.uint8)

    def __len__(self) -> int:
        return _NUM_ROWS

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self._rows[row % len(self._rows)], row % 10


def _write(folder: Path, say: Callable[[str], None]) -> float:
    """Write the shards; megabytes a second."""
    began_at = time.perf_counter()
    options = WriteOptions(_SHARD_BYTES, shuffle_seed=None, num_processes=os.cpu_count() or 1)
    index = write_shards(MapSource("pictures", _Pictures()), folder / "shards", options)
    seconds = time.perf_counter() - began_at
    size_bytes = sum(part.size_bytes for part in index.values())
    say(f"shards written: {size_bytes / seconds / 1e6:,.0f} MB/s")
    return size_bytes / seconds / 1e6


def _train(folder: Path) -> Path:
    return folder / "shards" / "train"


def _files(folder: Path, index: ShardIndex) -> list[Path]:
    return [_train(folder) / shard.file for shard in index.shards]


def _peers(folder: Path, report: Report) -> dict[str, Side]:
    """The other loaders that are installed, with their data written."""
    found: dict[str, Side] = {}
    if importlib.util.find_spec("webdataset"):
        _write_tars(folder)
        found["webdataset"] = _webdataset
    if importlib.util.find_spec("datasets"):
        _in_process(_write_datasets, folder, lambda: None)  # it leaves threads behind
        found["datasets"] = _datasets
    missing = [name for name in ("webdataset", "datasets") if name not in found]
    if missing:
        report.notes.append(f"not measured: {', '.join(missing)}; pip install -e '.[bench]'")
    report.notes.append(
        "mosaicml-streaming and litdata are not measured: neither installs beside the torch used here"
    )
    return found


def _write_tars(folder: Path) -> None:
    index = read_index(_train(folder))
    (folder / "tars").mkdir()
    pictures = _Pictures()
    per_file = -(-index.num_rows // len(index.shards))
    for number, start in enumerate(range(0, index.num_rows, per_file)):
        with tarfile.open(folder / "tars" / f"{number:04d}.tar", "w") as tar:
            for row in range(start, min(start + per_file, index.num_rows)):
                picture, label = pictures[row]
                for suffix, data in (("bin", picture.tobytes()), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{row:08d}.{suffix}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))


def _write_datasets(folder: Path) -> float:
    import datasets

    datasets.disable_progress_bars()
    files = [str(path) for path in _files(folder, read_index(_train(folder)))]
    data = datasets.load_dataset("arrow", data_files=files, cache_dir=str(folder / "cache"), split="train")
    data.save_to_disk(str(folder / "datasets"))
    shutil.rmtree(folder / "cache")
    return float(len(data))


# --- sides: samples a second -----------------------------------------------------------------------------


def _rate(batches: Iterable[int]) -> float:
    """Samples a second, from the sizes of batches as they come."""
    began_at = time.perf_counter()
    return sum(batches) / (time.perf_counter() - began_at)


def _read_plainly(folder: Path) -> float:
    index = read_index(_train(folder))
    return plain_rate(index, _files(folder, index))


def _copy_memory(folder: Path) -> float:
    count = read_index(_train(folder)).num_rows
    source, target = np.ones((2, count, _ROW_BYTES), dtype=np.uint8)
    target[:] = source  # once, so that all pages are there

    def copy() -> Iterator[int]:
        for start in range(0, count, _BATCH):
            target[start : start + _BATCH] = source[start : start + _BATCH]
            yield min(_BATCH, count - start)

    return _rate(copy())


def _pieces(samples: ShardSamples, num_epochs: int) -> Iterator[Piece]:
    sampler, state = GlobalSampler(samples.order(0), _BATCH), SamplerState()
    while state.epoch < num_epochs:
        epoch = state.epoch
        rows, state = sampler.batch(state)
        yield epoch, rows


def _ours(folder: Path) -> float:
    return _rate(_fed(folder, 1))


def _ours_again(folder: Path) -> float:
    """Later epochs: the first one compares checksums too."""
    num_rows = read_index(_train(folder)).num_rows
    batches = _fed(folder, 5)
    seen = 0
    while seen < num_rows:
        seen += next(batches)
    return _rate(batches)


def _fed(folder: Path, num_epochs: int) -> Iterator[int]:
    config = ShardsConfig(path=str(folder), window=_WINDOW_BYTES, num_readers=_NUM_WORKERS)
    samples = ShardSamples(_train(folder), config, 0, is_training=True)
    feed = Feed(samples, _pieces(samples, num_epochs), torch.device("cpu"), None)
    try:
        for _, rows in _pieces(samples, num_epochs):
            taken = feed.take(rows)
            assert taken is not None
            yield len(taken[0][1])
    finally:
        feed.close()
        samples.close()


class _RandomRows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """One request for each row, as a map-style data set over files reads."""

    def __init__(self, folder: Path) -> None:
        index = read_index(_train(folder))
        self._paths = _files(folder, index)
        self._starts, self._extents = index.extent_starts, index.extents
        self._fds: dict[int, int] = {}
        self._num_rows = index.num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        extent = int(np.searchsorted(self._starts, row, "right")) - 1
        number, place = self._extents[extent]
        if number not in self._fds:
            self._fds[number] = os.open(self._paths[number], os.O_RDONLY)
            os.posix_fadvise(self._fds[number], 0, 0, os.POSIX_FADV_RANDOM)
        offset = place.offset + (row - int(self._starts[extent])) * _ROW_BYTES
        data = np.frombuffer(os.pread(self._fds[number], _ROW_BYTES, offset), np.uint8)
        return torch.from_numpy(data.copy()).view(_SHAPE), row % 10


def _one_by_one(folder: Path) -> float:
    data = _RandomRows(folder)
    chosen = np.random.default_rng(0).permutation(len(data))[:_NUM_RANDOM].tolist()
    loader = torch.utils.data.DataLoader(data, _BATCH, sampler=chosen, num_workers=_NUM_WORKERS)
    return _rate(len(targets) for _, targets in loader)


def _webdataset(folder: Path) -> float:
    import webdataset

    urls = sorted(str(path) for path in (folder / "tars").glob("*.tar"))
    data = (
        webdataset.WebDataset(urls, shardshuffle=len(urls), seed=0, workersplitter=webdataset.split_by_worker)
        .shuffle(_WINDOW_ROWS // _NUM_WORKERS)
        .to_tuple("bin", "cls")
        .map_tuple(lambda data: np.frombuffer(data, np.uint8).reshape(_SHAPE), int)
        .batched(_BATCH)
    )
    loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=_NUM_WORKERS)
    return _rate(len(targets) for _, targets in loader)


def _datasets(folder: Path) -> float:
    import datasets

    data = datasets.load_from_disk(str(folder / "datasets")).with_format("torch")
    stream = data.to_iterable_dataset(num_shards=_NUM_WORKERS).shuffle(
        seed=0, buffer_size=_WINDOW_ROWS // _NUM_WORKERS
    )
    loader = torch.utils.data.DataLoader(stream, _BATCH, num_workers=_NUM_WORKERS)
    return _rate(len(batch["target"]) for batch in loader)


# --- a real training -------------------------------------------------------------------------------------


def _wait_share(folder: Path, join: Callable[[], None], say: Callable[[str], None]) -> float:
    """Share of the steps' time that workers wait for data, training the conv net from a cold disk."""
    drop_cache(path for path in folder.rglob("*") if path.is_file())
    settings = [
        "name=bench-input", "model=convnet", "cluster=1x2", "launch.is_tracked=false", "data.format=shards",
        f"data.path={folder / 'shards'}", f"data.window={_WINDOW_BYTES}", "engine.global_batch_size=256",
        "engine.max_steps=60", "engine.eval_every_steps=1000000",
    ]  # fmt: skip
    command = [sys.executable, "-m", "labkit", "run", "--force", *settings]
    done = subprocess.run(command, preexec_fn=join, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabkitError(f"the training failed: {done.stderr[-500:]}")
    path = next(line.split()[1] for line in done.stdout.splitlines() if line.strip().startswith("run "))
    run = RunFolder(path)
    steps = [event for rank in (0, 1) for event in run.history(rank, ("step",))]
    share = sum(event["data_s"] for event in steps) / sum(event["step_s"] for event in steps)
    say(f"training waits for data {100 * share:.1f} % of its time")
    shutil.rmtree(path)
    return float(share)
