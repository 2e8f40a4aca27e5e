"""What MLflow is told about a run besides its metrics: name, parameters, tags, note. Pure."""

import getpass
import json
from collections.abc import Mapping
from typing import Any

from labkit.config import ExperimentConfig
from labkit.lab.tracking._points import plain_name
from labkit.runfolder import RunFolder, RunState, RunStatus

MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 8000
_CUT = " ... (whole in config.json)"

_MLFLOW_STATUS = {RunState.FINISHED: "FINISHED", RunState.KILLED: "KILLED"}


def mlflow_status(state: RunState) -> str:
    """MLflow's word for a final state: FINISHED, KILLED, or FAILED for all others."""
    return _MLFLOW_STATUS.get(state, "FAILED")


def run_name(config: ExperimentConfig, key: str) -> str:
    """`<model>-<strategy>-w<workers>-s<seed>-<key>`: what a person tells runs apart by."""
    short, _, repeat = key.partition("-")
    suffix = f"{short[:6]}-{repeat}" if repeat else short[:6]
    model = config.model.name.partition(":")[2] or config.model.name
    return f"{model}-{config.sync.name}-w{config.cluster.num_workers}-s{config.seed}-{suffix}"


def flat_params(config: ExperimentConfig) -> dict[str, str]:
    """The configuration as MLflow parameters: `optimizer.learning_rate` -> `0.1`.

    Lists are JSON. MLflow cuts values of more than 6000 characters without a word; here the cut says
    where the whole is.
    """
    flat = _flatten(config.model_dump(mode="json"))
    return {plain_name(key): cut(as_text(value), MAX_PARAM_LENGTH) for key, value in flat}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            pairs += _flatten(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, value))
    return pairs


def as_text(value: Any) -> str:
    """One text for a value: itself, or JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, with a remark where something is missing."""
    return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT


def describe(folder: RunFolder, config: ExperimentConfig, status: RunStatus) -> dict[str, str]:
    """Tags of a run, from its configuration and environment; what is not known is left out."""
    env = folder.read_json(folder.env_file)
    git = env.get("git") or {}
    tags = {
        "labkit.run_key": folder.key,
        "labkit.attempt": str(status.attempt),
        "labkit.state": RunState.RUNNING.value,
        "labkit.world_size": str(config.cluster.num_workers),
        "labkit.topology": "+".join(str(len(node.workers)) for node in config.cluster.nodes),
        "labkit.host": status.owner.host if status.owner else env.get("host"),
        "labkit.git_sha": git.get("sha"),
        "labkit.git_dirty": git.get("is_dirty"),
        "labkit.notebook": env.get("notebook"),
        "mlflow.note.content": note(folder, config, env.get("command") or ""),
        "mlflow.user": _user(),
        "mlflow.source.name": env.get("notebook") or "labkit",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": git.get("sha"),
    }
    return {key: cut(as_text(value), MAX_TAG_LENGTH) for key, value in tags.items() if value is not None}


def note(folder: RunFolder, config: ExperimentConfig, command: str) -> str:
    """The run page's text: one sentence, the command that does it again, where everything lies."""
    nodes = len(config.cluster.nodes)
    return (
        f"{config.model.name} on {config.data.name}, {config.sync.name} over {config.cluster.num_workers} "
        f"workers of {nodes} node{'s' if nodes > 1 else ''}, global batch "
        f"{config.engine.global_batch_size}, seed {config.seed}.\n\n"
        f"Reproduce it: `python -m labkit reproduce {folder.key}`\n\n"
        + (f"Started by: `{command}`\n\n" if command else "")
        + f"Run folder: `{folder.path}`"
    )


def end_tags(status: RunStatus, diverged_at: int | None) -> dict[str, str]:
    """Tags that say how a run ended."""
    error = status.error
    tags = {
        "labkit.state": status.state.value,
        "labkit.error": error.message if error else None,
        "labkit.failed_rank": error.rank if error else None,
        "labkit.diverged_at": diverged_at if diverged_at is not None else status.diverged_at,
    }
    return {key: cut(str(value), MAX_TAG_LENGTH) for key, value in tags.items() if value is not None}


def final_values(folder: RunFolder, status: RunStatus, latest: Mapping[str, float]) -> dict[str, float]:
    """Summary metrics: the last finite value of every metric, the best accuracy, the run's duration."""
    figures = dict(latest)
    if status.ended_at and status.started_at:
        figures["wall_s"] = status.ended_at - status.started_at
    best = folder.read_json(folder.result_file).get("best_val_accuracy")
    if isinstance(best, dict) and "value" in best:
        figures["best_val_accuracy"] = float(best["value"])
    return {f"final/{key.replace('/', '_')}": value for key, value in figures.items()}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
