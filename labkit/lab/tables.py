"""Tables of a run: for each figure of `labkit.lab.figures` a function of the same name says it in text."""

import html
from collections.abc import Callable
from dataclasses import dataclass

from labkit.lab.series import PARTS, Series
from labkit.lab.stretches import busy_ms, speeds, step_bounds, stretch_means, worker_means_ms

_NUM_ROWS = 12
_PART_NAMES = {
    "compute": "computing",
    "node": "summing in the node",
    "communicate": "communicating",
    "wait": "waiting",
    "data": "loading data",
}

Cell = str | float | None


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers under named columns; prints as text, shows as HTML in a notebook."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __str__(self) -> str:
        rows = [self.columns, *([_text(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.columns))]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join([self.title, *lines])

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self) -> str:
        """The table as HTML, its first column as row headings."""
        head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in self.columns)
        body = "".join(_row_html(row) for row in self.rows)
        return (
            f"<table><caption>{html.escape(self.title)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )


def _row_html(row: tuple[Cell, ...]) -> str:
    first, *rest = (html.escape(_text(cell)) for cell in row)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"


def shares(series: Series) -> Table:
    """Samples of each worker per step, at the start and after every change."""
    ranks = sorted(series.workers)
    rows: list[tuple[Cell, ...]] = [("1", *(_size(series.workers[rank].local_batch_size) for rank in ranks))]
    for index, step in enumerate(series.rebalanced_at):
        sizes = (series.line(f"shares/rank{rank:02d}").values[index] for rank in ranks)
        rows.append((str(step + 1), *map(_size, sizes)))
    columns = ("from step", *(series.workers[rank].label for rank in ranks))
    return Table("Shares of a batch", columns, tuple(rows))


def staleness(series: Series) -> Table:
    """Pushes to the parameter servers by their staleness, and what part of all they are."""
    total = sum(series.staleness.values())
    rows = [(str(value), count, count / total) for value, count in sorted(series.staleness.items())]
    return Table("Staleness: updates between pull and push", ("staleness", "pushes", "fraction"), tuple(rows))


def _size(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def loss(series: Series) -> Table:
    """Training and validation loss over stretches of steps."""
    return _learning(series, "loss")


def accuracy(series: Series) -> Table:
    """Training and validation accuracy over stretches of steps."""
    return _learning(series, "accuracy")


def throughput(series: Series) -> Table:
    """Samples per second over stretches of steps."""
    bounds = step_bounds(series, _NUM_ROWS)
    rows = zip(_stretch_names(bounds), speeds(series, bounds), strict=True)
    return Table("Throughput: mean over steps", ("steps", "samples/s"), tuple(rows))


def step_time(series: Series) -> Table:
    """Parts of a step's time over stretches of steps, mean over workers."""
    bounds = step_bounds(series, _NUM_ROWS)
    columns = [stretch_means(series.line(f"perf/{part}_ms"), bounds) for part in PARTS]
    columns.append(stretch_means(series.line("perf/step_ms"), bounds))
    names = (*(f"{_PART_NAMES[part]} (ms)" for part in PARTS), "whole step (ms)")
    rows = zip(_stretch_names(bounds), *columns, strict=True)
    return Table("Time of a step: mean over workers, without step 1", ("steps", *names), tuple(rows))


def workers(series: Series) -> Table:
    """Parts of a step's time of each worker, mean over steps."""
    rows: list[tuple[Cell, ...]] = []
    for rank in sorted(series.workers):
        worker = series.workers[rank]
        means = worker_means_ms(worker)
        rows.append((worker.label, worker.local_batch_size, *(means[part] for part in PARTS)))
    names = tuple(f"{_PART_NAMES[part]} (ms)" for part in PARTS)
    return Table(
        "Time of a step, by worker: mean over steps, without step 1",
        ("worker · node", "local batch", *names),
        tuple(rows),
    )


def worker_heatmap(series: Series) -> Table:
    """Busy time of each worker over a few stretches of steps."""
    bounds = step_bounds(series, 6)
    rows = [(worker.label, *busy_ms(worker, bounds)) for _, worker in sorted(series.workers.items())]
    names = tuple(f"steps {name}" for name in _stretch_names(bounds))
    title = "Busy time (ms): computing and loading data, mean over steps"
    return Table(title, ("worker · node", *names), tuple(rows))


def overview(series: Series) -> Table:
    """The newest value of every metric."""
    rows = [(name, line.steps[-1], line.last) for name, line in sorted(series.metrics.items())]
    return Table("Newest values", ("metric", "step", "value"), tuple(rows))


def _learning(series: Series, name: str) -> Table:
    end = series.step + 1
    count = min(_NUM_ROWS, series.step)
    bounds = [1 + (end - 1) * index // count for index in range(count + 1)] if count else []
    columns = [stretch_means(series.line(f"{kind}/{name}"), bounds) for kind in ("train", "val")]
    rows = zip(_stretch_names(bounds), *columns, strict=True)
    columns_named = ("steps", f"train {name}", f"val {name}")
    return Table(f"{name.capitalize()}: mean over steps", columns_named, tuple(rows))


def _stretch_names(bounds: list[int]) -> list[str]:
    pairs = zip(bounds, bounds[1:], strict=False)
    return [f"{low}-{high - 1}" if high - low > 1 else f"{low}" for low, high in pairs]


ALL: dict[str, Callable[[Series], Table]] = {
    "loss": loss,
    "accuracy": accuracy,
    "throughput": throughput,
    "step_time": step_time,
    "workers": workers,
    "worker_heatmap": worker_heatmap,
}
"""Every table but the overview, in the order a report shows them."""
