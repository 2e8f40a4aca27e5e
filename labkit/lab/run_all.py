"""Train one configuration to its end, or many, a few at a time."""

import time
from collections.abc import Callable, Sequence

from labkit.config import ExperimentConfig
from labkit.errors import ConfigError
from labkit.lab.failure import raise_if_failed
from labkit.launch import Run, start
from labkit.runfolder import RunStatus

_POLL_S = 0.05


def run_one(
    config: ExperimentConfig,
    *,
    is_repeat: bool = False,
    on_poll: Callable[[RunStatus], None] | None = None,
) -> Run:
    """Train one configuration to its end, unless an equal run has finished before.

    When the waiting is interrupted, the run is stopped; calling again goes on from there.

    Args:
        config: What to train.
        is_repeat: Train it in any case.
        on_poll: Called about ten times a second with the run's state.

    Raises:
        RunFailed: it ended in another state than finished.
        ConfigError: it can't be started here.
    """
    run = start(config, is_repeat=is_repeat)
    try:
        run.wait(on_poll=on_poll)
    finally:
        run.stop()  # of use only when the waiting was interrupted
    raise_if_failed(run)
    return run


def run_all(
    configs: Sequence[ExperimentConfig],
    *,
    num_at_once: int = 1,
    on_done: Callable[[int, Run], None] = lambda index, run: None,
) -> list[Run]:
    """Train every configuration. Equal ones are trained once, and one that has finished before is not again.

    When one fails, or the waiting is interrupted, those that run are stopped; calling again goes on from
    there.

    Args:
        configs: What to train, started in this order.
        num_at_once: Runs side by side, at least 1.
        on_done: Told the position of a run that is over, and the run.

    Returns:
        The runs, in the order of `configs`.

    Raises:
        RunFailed: a run ended in another state than finished.
        ConfigError: `num_at_once` is below 1.
    """
    if num_at_once < 1:
        raise ConfigError(f"num_at_once must be at least 1, got {num_at_once}. Use 1.")
    places: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        places.setdefault(config.model_dump_json(), []).append(index)
    waiting = list(places.values())[::-1]
    active: list[tuple[list[int], Run]] = []
    done: dict[int, Run] = {}
    try:
        while waiting or active:
            while waiting and len(active) < num_at_once:
                indices = waiting.pop()
                active.append((indices, start(configs[indices[0]])))
            for indices, run in [pair for pair in active if pair[1].status().state.is_final]:
                active.remove((indices, run))
                raise_if_failed(run)
                for index in indices:
                    done[index] = run
                    on_done(index, run)
            time.sleep(_POLL_S if active else 0)
    finally:
        for _, run in active:
            run.stop()
    return [done[index] for index in range(len(configs))]
