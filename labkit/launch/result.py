"""The figures that a run ends with, read from its events."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from labkit.config import ExperimentConfig
from labkit.runfolder import RunFolder, RunState, RunStatus


class RunResult(BaseModel):
    """The content of `result.json`.

    Attributes:
        state: How the run ended.
        step: Steps done.
        samples: Samples trained on.
        seconds: From the supervisor's start to its end.
        final: Last value of each metric.
        best_val_accuracy: Highest accuracy on the held-out samples, and the step of it.
        diverged_at: First step whose loss was not finite.
        worker_means_ms: Mean milliseconds per step by worker and part.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    name: str
    state: RunState
    attempt: int
    step: int
    samples: int
    seconds: float
    final: dict[str, float | None]
    best_val_accuracy: dict[str, float] | None
    diverged_at: int | None
    worker_means_ms: dict[str, dict[str, float]]

    def to_json(self) -> str:
        """As strict JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False)


def summarise(
    folder: RunFolder, config: ExperimentConfig, state: RunState, status: RunStatus, now: float
) -> RunResult:
    """Read a run's events and sum it up."""
    events = folder.history(0, ("metrics", "eval"))
    steps = [event for event in events if event["kind"] == "metrics"]
    evals = [event for event in events if event["kind"] == "eval"]
    final: dict[str, float | None] = {}
    for event in events:
        final.update(event["values"])
    scored = [event for event in evals if event["values"].get("val/accuracy") is not None]
    best = max(scored, key=lambda event: float(event["values"]["val/accuracy"]), default=None)
    diverged = next((event["step"] for event in steps if "train/loss" in event.get("nonfinite", {})), None)
    return RunResult(
        key=folder.key,
        name=config.name,
        state=state,
        attempt=status.attempt,
        step=steps[-1]["step"] if steps else 0,
        samples=steps[-1]["samples"] if steps else 0,
        seconds=round(now - (status.started_at or now), 3),
        final=final,
        best_val_accuracy=best and {"value": best["values"]["val/accuracy"], "step": best["step"]},
        diverged_at=diverged,
        worker_means_ms={f"rank{rank:02d}": _means(folder, rank) for rank in folder.ranks()},
    )


def _means(folder: RunFolder, rank: int) -> dict[str, float]:
    steps: list[dict[str, Any]] = folder.history(rank, ("step",))
    if not steps:
        return {}
    parts = ("step", "compute", "node", "communicate", "wait", "data")
    return {p: round(1e3 * sum(event.get(f"{p}_s", 0.0) for event in steps) / len(steps), 4) for p in parts}
