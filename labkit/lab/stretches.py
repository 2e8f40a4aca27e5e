"""Sum up long series for the screen: thin a line, or take means over stretches of steps."""

from bisect import bisect_left
from collections.abc import Sequence

from labkit.lab.series import PARTS, Line, Series, WorkerSeries


def decimate(line: Line, max_points: int = 2000) -> tuple[list[int], list[float | None]]:
    """Thin a line for the screen without losing what the eye would miss.

    The line is cut into equal stretches; of each its minimum, its maximum and its first gap stay,
    in their order. First and last point stay.

    Args:
        line: N values.
        max_points: Points to return at the most, at least 8.

    Returns:
        Steps and values, at most `max_points` of each.
    """
    size = len(line.steps)
    if size <= max_points:
        return list(line.steps), list(line.values)
    num_stretches = (max_points - 2) // 3
    bounds = [size * index // num_stretches for index in range(num_stretches + 1)]
    kept = {0, size - 1}
    for low, high in zip(bounds, bounds[1:], strict=False):
        kept.update(_extremes(line.values, low, high))
    order = sorted(kept)
    return [line.steps[i] for i in order], [line.values[i] for i in order]


def _extremes(values: Sequence[float | None], low: int, high: int) -> set[int]:
    """Indices of the minimum, the maximum and the first gap of values[low:high]."""
    finite = [i for i in range(low, high) if values[i] is not None]
    gap = next((i for i in range(low, high) if values[i] is None), None)
    kept = set() if gap is None else {gap}
    if finite:
        kept |= {min(finite, key=lambda i: values[i] or 0.0), max(finite, key=lambda i: values[i] or 0.0)}
    return kept


def stretch_means(line: Line, bounds: Sequence[int]) -> list[float | None]:
    """Mean of the finite values in each stretch of steps [bounds[i], bounds[i+1]); None where none is."""
    means: list[float | None] = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        first, end = bisect_left(line.steps, low), bisect_left(line.steps, high)
        finite = [value for value in line.values[first:end] if value is not None]
        means.append(sum(finite) / len(finite) if finite else None)
    return means


def speeds(series: Series, bounds: Sequence[int]) -> list[float | None]:
    """Samples per second in each stretch: its samples over the time of its steps, without evaluation."""
    steps_ms = stretch_means(series.line("perf/step_ms"), bounds)
    counts = _stretch_samples(series, bounds)
    return [
        None if not ms or count is None else 1e3 * count / (ms * (high - low))
        for low, high, ms, count in zip(bounds, bounds[1:], steps_ms, counts, strict=False)
    ]


def _stretch_samples(series: Series, bounds: Sequence[int]) -> list[float | None]:
    """Samples trained on in each stretch, all workers."""
    steps, totals = series.samples.steps, series.samples.values
    reached = [totals[at - 1] if (at := bisect_left(steps, bound)) else 0.0 for bound in bounds]
    return [
        None if low is None or high is None else high - low
        for low, high in zip(reached, reached[1:], strict=False)
    ]


def step_bounds(series: Series, max_stretches: int) -> list[int]:
    """Cut a run's steps into at most `max_stretches` stretches of like length.

    Step 1, which carries the cost of starting, is left out unless it is the only one.

    Returns:
        First step of each stretch, and the step behind the last one; [] when no step is done.
    """
    end = series.step + 1
    first = min(2, series.step)
    if not series.step:
        return []
    count = min(max_stretches, end - first)
    return [first + (end - first) * index // count for index in range(count + 1)]


def worker_means_ms(worker: WorkerSeries) -> dict[str, float | None]:
    """A worker's mean time of a step by part, in milliseconds, without step 1 unless it is the only one."""
    steps = worker.times["step_s"].steps
    bounds = [min(2, steps[-1]), steps[-1] + 1] if steps else [1, 2]
    means = {part: stretch_means(worker.times[f"{part}_s"], bounds)[0] for part in PARTS}
    return {part: None if mean is None else 1e3 * mean for part, mean in means.items()}


def time_shares(series: Series) -> dict[str, float]:
    """How all workers' step time divides into parts: fractions that sum to 1; {} before the first step."""
    means = [worker_means_ms(worker) for worker in series.workers.values()]
    sums = {part: sum(mean[part] or 0.0 for mean in means) for part in PARTS}
    total = sum(sums.values())
    return {part: value / total for part, value in sums.items()} if total else {}


def busy_ms(worker: WorkerSeries, bounds: Sequence[int]) -> list[float | None]:
    """Mean time a worker computed and loaded data in each stretch of steps, in milliseconds."""
    compute = stretch_means(worker.times["compute_s"], bounds)
    data = stretch_means(worker.times["data_s"], bounds)
    return [None if c is None else 1e3 * (c + (d or 0.0)) for c, d in zip(compute, data, strict=True)]
