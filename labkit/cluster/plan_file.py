"""A plan as a file: shares by node, to read, change by hand, compare and run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.cluster.plan import Plan
from labkit.config import ExperimentConfig, from_mapping, parse_yaml, print_yaml
from labkit.errors import ConfigError
from labkit.runfolder import write_atomically

Shares = dict[str, list[int]]
"""Samples of each worker by its node's name."""


def shares_of(config: ExperimentConfig, plan: Plan) -> Shares:
    """The plan's shares by node."""
    sizes = iter(plan.local_batch_sizes)
    return {node.name: [next(sizes) for _ in node.workers] for node in config.cluster.nodes}


def save_plan(config: ExperimentConfig, plan: Plan, path: str | Path) -> None:
    """Write a plan as YAML.

    Raises:
        ConfigError: the file can't be written.
    """
    text = f"# Samples of each worker per step, by node; they sum to {config.engine.global_batch_size}.\n"
    try:
        body = print_yaml({"local_batch_sizes": shares_of(config, plan)})
        write_atomically(Path(path), text + body)
    except OSError as error:
        raise ConfigError(
            f"--save must be a file that can be written, got {path}: {error.strerror}. Choose another."
        ) from None


def read_plan(path: str | Path) -> Shares:
    """Read a plan's file.

    Raises:
        ConfigError: it is missing, or is no plan.
    """
    try:
        read = parse_yaml(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--plan must be a readable file, got {path}: {reason}. Check the path.") from None
    shares = read.get("local_batch_sizes") if isinstance(read, Mapping) else None
    if not isinstance(shares, Mapping) or not all(_is_sizes(value) for value in shares.values()):
        raise ConfigError(
            f"{path} must hold local_batch_sizes with a list of whole numbers for each node, got {shares!r}. "
            "`labkit plan EXPERIMENT --save FILE` makes one."
        )
    return {str(name): list(sizes) for name, sizes in shares.items()}


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def pin(config: ExperimentConfig, shares: Shares, source: str = "plan") -> ExperimentConfig:
    """The experiment with a plan's shares.

    Args:
        config: The experiment.
        shares: Samples of each worker by its node's name.
        source: What an error calls the plan, usually its file.

    Raises:
        ConfigError: the plan is for another cluster, or its shares do not sum to the global batch.
    """
    has = {node.name: len(node.workers) for node in config.cluster.nodes}
    wants = {name: len(sizes) for name, sizes in shares.items()}
    if has != wants:
        raise ConfigError(
            f"{source} must be for this cluster ({_counts(has)}), got one for {_counts(wants)}. "
            "Make a new one: labkit plan EXPERIMENT --save FILE."
        )
    values = config.model_dump(mode="json")
    for node in values["cluster"]["nodes"]:
        for worker, size in zip(node["workers"], shares[node["name"]], strict=True):
            worker["local_batch_size"] = size
    return from_mapping(values, source=source)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "no node"
