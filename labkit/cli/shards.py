"""`labkit shards`: write a data set as shards, check them, describe them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from labkit.cli.output import is_terminal, json_option, print_json, print_table, read_size
from labkit.config import format_bytes, parse_yaml
from labkit.errors import ConfigError


@click.group()
def shards() -> None:
    """Data sets as shards: a few large files that are read in long contiguous requests.

    Shards are Apache Arrow files, which pyarrow and Hugging Face datasets open too, with a small index.

    \b
    Examples:
      labkit shards write images/ my_shards
      labkit run data=shards data.path=my_shards data.image_size=[64,64]
    """


@shards.command()
@click.argument("source")
@click.argument("folder", metavar="DIR")
@click.option("--shard-size", default="64MiB", show_default=True, help="Largest shard.")
@click.option("--extent-size", default="1MiB", show_default=True, help="What is read with one request.")
@click.option("--val-share", type=float, default=0.1, show_default=True, help="Part of the rows to hold out.")
@click.option("--shuffle-seed", type=int, default=0, show_default=True, help="Of the order in the shards.")
@click.option("--no-shuffle", is_flag=True, help="Keep the order of the source.")
@click.option("--processes", type=int, help="That read and write at once; default: one for each core.")
@click.option("--input", "inputs", multiple=True, metavar="COLUMN", help="Of a table; default: all others.")
@click.option("--target", metavar="COLUMN", help="Of a table; default: label, or the last one.")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="Of the data set's function.")
@json_option
def write(
    source: str,
    folder: str,
    shard_size: str,
    extent_size: str,
    val_share: float,
    shuffle_seed: int,
    no_shuffle: bool,
    processes: int | None,
    inputs: tuple[str, ...],
    target: str | None,
    options: tuple[str, ...],
    is_json: bool,
) -> None:
    """Write SOURCE as shards into DIR/train and DIR/val.

    SOURCE is a folder with a folder of images for each class, .parquet or .csv files, a folder that Hugging
    Face datasets saved to disk, digits, text, or module:function for a data set of your own: map-style or
    iterable, of (input, target). A writing that was interrupted goes on where it was.

    \b
    Examples:
      labkit shards write images/ my_shards --shard-size 256MiB
      labkit shards write table.parquet my_shards --target price_class
      labkit shards write my_data:build my_shards --option year=2020
    """
    sys.path.insert(0, os.getcwd())
    from labkit.data.shards import WriteOptions
    from labkit.tasks.shard_sources import write_shards

    settings = WriteOptions(
        read_size("--shard-size", shard_size),
        read_size("--extent-size", extent_size),
        val_share,
        None if no_shuffle else shuffle_seed,
        processes or os.cpu_count() or 1,
    )
    own = _options(options)
    with _progress() as show:
        found = write_shards(
            source, folder, settings, settings=own, inputs=inputs, target=target, on_progress=show
        )
    if is_json:
        print_json({name: _summary(index) for name, index in found.items()})
        return
    for name, index in found.items():
        size = format_bytes(index.size_bytes)
        click.echo(f"{name}: {index.num_rows:,} rows in {len(index.shards)} shards, {size}")
    hint = f"  labkit run data.format=shards data.path={folder}"
    if "val" not in found:
        hint += " data.val_path=DIR_OF_OTHERS"
    if any(column.kind == "image" for index in found.values() for column in index.columns):
        hint += " data.image_size=[64,64]"
    click.echo(hint)


def _options(words: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--option must be KEY=VALUE, got {word!r}. For example --option year=2020.")
        found[key] = parse_yaml(value, "--option")
    return found


@contextmanager
def _progress() -> Iterator[Callable[[int, int | None], None]]:
    """A bar on a terminal; elsewhere a line for every tenth."""
    if is_terminal(sys.stderr):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("rows", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    said = -1

    def show(done: int, total: int | None) -> None:
        nonlocal said
        tenth = 10 * done // total if total else done // 10_000
        if tenth > said:
            said = tenth
            click.echo(f"{done:,}{f' of {total:,}' if total else ''} rows", err=True)

    yield show


def _folders(folder: str) -> list[Path]:
    """The folders of shards in a folder, or itself."""
    from labkit.data.shards import INDEX_FILE

    path = Path(folder)
    inside = [path / part for part in ("train", "val") if (path / part / INDEX_FILE).is_file()]
    return inside or [path]


@shards.command()
@click.argument("folder", metavar="DIR")
@json_option
def check(folder: str, is_json: bool) -> int:
    """Read all shards of DIR and compare them with their index. Exit code 1 when something is wrong.

    \b
    Examples:
      labkit shards check my_shards
    """
    from labkit.data.shards.index import INDEX_FILE, parse_index, read_index
    from labkit.data.shards.write import check_shards

    faults: list[dict[str, str]] = []
    num_shards = 0
    for path in _folders(folder):
        file = path / INDEX_FILE
        is_there = file.is_file()  # sizes are compared below, shard by shard
        index = parse_index(file.read_text(encoding="utf-8"), str(file)) if is_there else read_index(path)
        if not index.is_complete:
            faults.append({"folder": str(path), "shard": "", "fault": f"is not complete: {index.note}"})
        for shard, fault in check_shards(path, index):
            num_shards += 1
            if fault:
                faults.append({"folder": str(path), "shard": shard.file, "fault": fault})
    if is_json:
        print_json({"shards": num_shards, "faults": faults})
    else:
        for entry in faults:
            click.echo(f"{Path(entry['folder']) / entry['shard']}: {entry['fault']}")
        click.echo(f"{num_shards} shards, {f'{len(faults)} faults' if faults else 'all good'}")
    return 1 if faults else 0


@shards.command()
@click.argument("folder", metavar="DIR")
@click.option("--window", default="64MiB", show_default=True, help="As data.window.")
@click.option("--batch", type=int, default=64, show_default=True, help="Global batch.")
@json_option
def show(folder: str, window: str, batch: int, is_json: bool) -> None:
    """Describe the shards of DIR, and how well a window mixes them.

    \b
    Examples:
      labkit shards show my_shards
      labkit shards show my_shards --window 16MiB --batch 256
    """
    from labkit.data.shards import WindowShuffle, read_index, shuffle_quality
    from labkit.tasks.shard_sources import targets_of

    found = {}
    for path in _folders(folder):
        index = read_index(path)
        order = WindowShuffle(index.extent_rows, index.extent_bytes, read_size("--window", window), 0)
        quality = shuffle_quality(order, batch, targets_of(path, index))
        found[path.name] = {**_summary(index), "shuffle": vars(quality)}
    if is_json:
        print_json(found)
        return
    for name, about in found.items():
        size = format_bytes(about["bytes"])
        click.echo(f"{name}: {about['rows']:,} rows, {size}, {about['shards']} shards")
        print_table(("column", "kind", "type", "shape"), about["columns"])
        if about["class_counts"]:
            counts = about["class_counts"].values()
            click.echo(f"classes: {len(counts)}, of {min(counts):,} to {max(counts):,} rows")
        if not about["is_complete"]:
            click.echo(f"not complete: {about['note']}")
        quality = about["shuffle"]
        imbalance = quality["class_imbalance"]
        click.echo(
            f"shuffle in a window of {window}, batches of {batch}: rank correlation "
            f"{quality['rank_correlation']:.2f} (0 is best), neighbours {quality['neighbours']:.1f} "
            f"(1 is as a full shuffle)"
            + (f", class imbalance {imbalance:.2f} (1 is as a full shuffle)" if imbalance is not None else "")
        )


def _summary(index: Any) -> dict[str, Any]:
    extents = [extent.size_bytes for _, extent in index.extents]
    return {
        "rows": index.num_rows,
        "bytes": index.size_bytes,
        "shards": len(index.shards),
        "extents": len(extents),
        "largest_extent_bytes": max(extents, default=0),
        "columns": [(c.name, c.kind, c.dtype, "x".join(map(str, c.shape))) for c in index.columns],
        "class_counts": index.class_counts,
        "source": index.source,
        "is_complete": index.is_complete,
        "note": index.note,
    }
