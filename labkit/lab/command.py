"""An experiment as the one command that runs it."""

import json
import shlex
from typing import Any

from labkit.config import ExperimentConfig, cluster_of_shape, from_overrides, parse_yaml
from labkit.errors import ConfigError


def as_command(config: ExperimentConfig) -> str:
    """The shell command that trains this experiment: `python -m labkit run model=mlp seed=3`."""
    return shlex.join(["python", "-m", "labkit", "run", *overrides_of(config)])


def overrides_of(config: ExperimentConfig) -> list[str]:
    """The dotted overrides that turn the default experiment into this one.

    `from_overrides(overrides_of(config)) == config`; settings at their default are left out.
    """
    values = config.model_dump(mode="json")
    default = ExperimentConfig().model_dump(mode="json")
    names = {
        section: value["name"]
        for section, value in values.items()
        if isinstance(value, dict) and value.get("name") != default[section].get("name")
    }
    base = from_overrides(names).model_dump(mode="json")
    pairs: dict[str, Any] = dict(names)
    for section, value in values.items():
        if section == "cluster":
            shape = cluster_text(config)
            if value != base[section]:
                pairs.update({"cluster": shape} if shape else {"cluster.nodes": value["nodes"]})
        elif isinstance(value, dict):
            pairs.update({f"{section}.{k}": v for k, v in value.items() if v != base[section][k]})
        elif value != base[section]:
            pairs[section] = value
    return [override(key, value) for key, value in pairs.items()]


def override(key: str, value: Any) -> str:
    """`key=value`, with the value as YAML reads it back."""
    return f"{key}={_text(value)}"


def cluster_text(config: ExperimentConfig) -> str:
    """The cluster as NODESxWORKERS; "" when its nodes or workers are not alike."""
    nodes = config.cluster.nodes
    shape = (len(nodes), len(nodes[0].workers))
    return f"{shape[0]}x{shape[1]}" if config.cluster == cluster_of_shape(*shape) else ""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        return value if parse_yaml(value) == value else json.dumps(value)
    except ConfigError:
        return json.dumps(value)
