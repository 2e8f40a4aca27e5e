"""Load a configuration from YAML, dotted overrides or a notebook's parameters; print it back."""

import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from labkit.config._experiment import (
    NODE_SHORTHANDS,
    ClusterConfig,
    ExperimentConfig,
    NodeConfig,
    WorkerConfig,
    cluster_of_shape,
)
from labkit.config._plain import plain
from labkit.config._presets import cluster_presets
from labkit.config._section import Section, members_of, raise_config_error
from labkit.config._yaml import parse_yaml, print_yaml
from labkit.errors import ConfigError, did_you_mean

_SHAPE = re.compile(r"^([1-9][0-9]*)x([1-9][0-9]*)$")


def _member_for(members: list[type[Section]], name: Any) -> type[Section]:
    """The member of a family that goes by `name`; the user's own for `module:function`."""
    for member in members:
        literal = member.model_fields.get("name")
        if literal is not None and name in typing.get_args(literal.annotation):
            return member
    if isinstance(name, str) and ":" in name and "name" in members[-1].model_fields:
        return members[-1]
    return members[0]


def known_keys(values: Mapping[str, Any] | None = None) -> dict[str, list[str]]:
    """Keys of each section by its dotted path, `""` for the top level.

    Args:
        values: The configuration's raw values, which choose the member of each family; without
            them a family's section has the keys of all its members.
    """
    known: dict[str, list[str]] = {"": list(ExperimentConfig.model_fields)}
    for section, field in ExperimentConfig.model_fields.items():
        members = members_of(field)
        given = (values or {}).get(section)
        if len(members) > 1 and isinstance(given, Mapping) and "name" in given:
            members = [_member_for(members, given["name"])]
        if members:
            known[section] = list(dict.fromkeys(key for member in members for key in member.model_fields))
    cluster = (values or {}).get("cluster")
    nodes = cluster.get("nodes") if isinstance(cluster, Mapping) else None
    for index, node in enumerate(nodes if isinstance(nodes, list) else []):
        known[f"cluster.nodes.{index}"] = [*NodeConfig.model_fields, *NODE_SHORTHANDS]
        workers = node.get("workers") if isinstance(node, Mapping) else None
        for worker in range(len(workers) if isinstance(workers, list) else 0):
            known[f"cluster.nodes.{index}.workers.{worker}"] = list(WorkerConfig.model_fields)
    return known


def _read_file(path: Path, what: str) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{what} must be an existing file, got {path}. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} must be readable text, got {path}: {error}. Fix the file.") from None
    return parse_yaml(text, str(path))


def _expand_cluster(value: Any, base: Path) -> Any:
    """Turn `2x2`, the name of a preset or the path of a cluster file into the cluster's mapping.

    `clusters/4x4-1gbit.yaml` is the preset of that name where there is no such file.
    """
    if isinstance(value, Mapping):
        return value
    value = str(value)  # `0x2` is a number in YAML
    shape = _SHAPE.match(value)
    if shape:
        return cluster_of_shape(int(shape[1]), int(shape[2])).model_dump(mode="json")
    path, presets = Path(value), cluster_presets()
    is_replaced = path.parent.name == "clusters" and not (base / path).exists()
    preset = presets.get(path.stem if is_replaced else value)
    if preset is not None:
        return dict(parse_yaml(preset, value))
    if not value.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"cluster must be NODESxWORKERS, a .yaml file or a mapping, got {value!r}. "
            f"For example cluster=2x2, or a preset: {', '.join(presets)}."
        )
    read = _read_file(base / value, "cluster")
    if not isinstance(read, Mapping):
        raise ConfigError(f"{base / value} must hold a mapping with `nodes`, got {read!r}. See README.")
    return dict(read)


def _normalise(values: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Expand the short forms: `sync: allreduce`, `cluster: 2x2`, a cluster's file; set default names."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        field = ExperimentConfig.model_fields.get(key)
        members = members_of(field)
        if key == "data" and isinstance(value, Mapping) and value.get("format") == "shards":
            value = {"name": "shards", **{k: v for k, v in value.items() if k != "format"}}
        if key == "cluster":
            out[key] = _expand_cluster(value, base)
        elif members and isinstance(value, str):
            out[key] = {"name": value}
        elif len(members) > 1 and isinstance(value, Mapping) and "name" not in value:
            out[key] = {"name": getattr(field.default if field else None, "name", None), **value}
        else:
            out[key] = value
    for key, value in out.items():
        field = ExperimentConfig.model_fields.get(key)
        members = members_of(field)
        if len(members) > 1 and isinstance(value, Mapping):
            name = value.get("name")
            names = [n for m in members for n in typing.get_args(m.model_fields["name"].annotation)]
            is_user = isinstance(name, str) and ":" in name and members[-1].__name__.startswith("User")
            if name not in names and not is_user:
                hint = did_you_mean(name, names) if isinstance(name, str) else f"Known: {', '.join(names)}."
                own = " or your own as module:function" if members[-1].__name__.startswith("User") else ""
                raise ConfigError(f"{key}.name must be one of {', '.join(names)}{own}, got {name!r}. {hint}")
    return out


def from_mapping(
    values: Mapping[str, Any], *, base: Path | None = None, source: str = ""
) -> ExperimentConfig:
    """Check raw values and build the configuration.

    Args:
        values: Sections and their keys. Short forms: `sync: allreduce` for `sync: {name: allreduce}`,
            `cluster: 2x2` for two nodes of two workers, `cluster: FILE.yaml`, `cluster: PRESET`.
        base: Folder that a cluster file's path is relative to; default: the working directory.
        source: Put in front of error messages, usually a file's name.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or range, or values contradict.
    """
    raw = _normalise(plain(dict(values), "configuration"), base or Path.cwd())
    try:
        return ExperimentConfig.model_validate(raw)
    except ValidationError as error:
        raise_config_error(error, ExperimentConfig, known_keys(raw), source)


def load(path: str | Path) -> ExperimentConfig:
    """Load an experiment from a YAML (or JSON) file.

    Raises:
        ConfigError: the file is missing, is not YAML, or does not describe an experiment.
    """
    path = Path(path)
    return from_mapping(_as_mapping(_read_file(path, "experiment"), path), base=path.parent, source=str(path))


def _as_mapping(read: Any, path: Path) -> Mapping[str, Any]:
    if read is None:
        return {}
    if not isinstance(read, Mapping):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(read).__name__}. See README.")
    return read


def load_cluster(value: Any, *, base: Path | None = None) -> ClusterConfig:
    """Build a cluster alone: from `2x2`, a preset's name, a file or a mapping.

    Args:
        value: As the `cluster` of an experiment.
        base: Folder that a file's path is relative to; default: the working directory.

    Raises:
        ConfigError: it is none of these, or the description is wrong.
    """
    raw = _expand_cluster(value, base or Path.cwd())
    try:
        return ClusterConfig.model_validate(raw)
    except ValidationError as error:
        known = known_keys({"cluster": raw})
        inside = {key.removeprefix("cluster").lstrip("."): keys for key, keys in known.items()}
        source = "" if isinstance(value, Mapping) else str(value)
        raise_config_error(error, ClusterConfig, inside | {"": known["cluster"]}, source)


def _set_dotted(values: dict[str, Any], key: str, value: Any, folder: Path) -> None:
    """Set `a.b.c`. A change of `model.name` drops the old model's own settings."""
    *path, leaf = ("data.name" if key == "data.format" else key).split(".")
    field = ExperimentConfig.model_fields.get(path[0] if path else leaf)
    members = members_of(field)
    if not path and members and isinstance(value, str) and leaf != "cluster":
        path, leaf = [leaf], "name"
    here = values
    for part in path:
        below = here.get(part)
        if part == "cluster" and isinstance(below, str):
            below = _expand_cluster(below, folder)
        elif isinstance(below, str):
            below = {"name": below}
        elif not isinstance(below, Mapping):
            below = {}
        here[part] = dict(below)
        here = here[part]
    if len(path) == 1 and leaf == "name" and len(members) > 1 and here.get("name") != value:
        keep = _member_for(members, value).model_fields
        for old in [name for name in here if name not in keep]:
            del here[old]
    here[leaf] = value


def from_overrides(
    overrides: Sequence[str] | Mapping[str, Any],
    *,
    base: Mapping[str, Any] | ExperimentConfig | None = None,
    folder: Path | None = None,
) -> ExperimentConfig:
    """Apply flat dotted overrides, such as `sync.name=allreduce`, to a configuration.

    Args:
        overrides: `key=value` texts (values in YAML 1.2) or a mapping of dotted keys to values.
        base: What they are applied to; default: the default experiment.
        folder: Folder that a cluster file's path is relative to.

    Raises:
        ConfigError: an override is no `key=value`, or the result is not a valid experiment.
    """
    pairs: list[tuple[str, Any, str | None]] = []
    if isinstance(overrides, Mapping):
        pairs = [(key, value, None) for key, value in overrides.items()]
    else:
        for text in overrides:
            key, equals, raw = text.partition("=")
            if not equals or not key:
                raise ConfigError(f"override must be key=value, got {text!r}. For example seed=1.")
            pairs.append((key, parse_yaml(raw, f"value of {key}"), raw))
    start = base.model_dump(mode="json") if isinstance(base, ExperimentConfig) else dict(base or {})
    # A family's name comes first, so that `model.width=64 model.name=gpt` sets the new model's width.
    pairs.sort(key=lambda pair: not (pair[0].endswith(".name") or "." not in pair[0]))
    values = start
    for key, value, _ in pairs:
        _set_dotted(values, key, value, folder or Path.cwd())
    try:
        return from_mapping(values, base=folder)
    except ConfigError as first:
        # `name=007` and `name=true` mean text where the setting is text.
        texts = [
            (key, raw) for key, _, raw in pairs if raw is not None and f"{key} must be text" in str(first)
        ]
        if not texts:
            raise
        for key, raw in texts:
            _set_dotted(values, key, raw, folder or Path.cwd())
        return from_mapping(values, base=folder)


def _leaves() -> dict[str, list[str]]:
    """Dotted paths of each setting by its last name."""
    found: dict[str, list[str]] = {}
    for section, keys in known_keys().items():
        if section.startswith("cluster"):
            continue
        for key in keys:
            if section:
                found.setdefault(key, []).append(f"{section}.{key}")
    return found


def from_parameters(
    namespace: Mapping[str, Any], *, defaults: Mapping[str, Any] | None = None, is_strict: bool = True
) -> ExperimentConfig:
    """Build the configuration from a notebook's parameters cell: `from_parameters(globals())`.

    A variable named as a section (`model = "mlp"`, `cluster = "2x2"`) sets that section, or its name;
    one named as a setting (`learning_rate = 0.1`) sets it where the name is unique;
    `overrides = {"engine.clip_norm": 1.0}` sets anything else by its dotted key. None is "not set".

    Args:
        namespace: The notebook's variables. Names with an underscore in front, modules, functions
            and other objects are passed over.
        defaults: Dotted keys and values that the variables override.
        is_strict: An unknown plain variable is an error; otherwise only one that looks like a typing
            error of a known name.

    Raises:
        ConfigError: an unknown or ambiguous name, or a bad value.
    """
    top = list(ExperimentConfig.model_fields)
    leaves = _leaves()
    values: dict[str, Any] = dict(defaults or {})
    accepted = {*top, *leaves, "overrides", "run_dir"}
    for name, value in namespace.items():
        if name.startswith("_") or name in ("In", "Out", "run_dir") or not _is_plain(value):
            continue
        if name == "overrides":
            if not isinstance(value, Mapping):
                raise ConfigError(f"overrides must be a mapping of dotted keys, got {value!r}. Use {{}}.")
            continue
        if name in top:
            if value is not None:
                values[name] = value
        elif name in leaves:
            if len(leaves[name]) > 1:
                raise ConfigError(
                    f"{name} must name one setting, got {' and '.join(leaves[name])}. Put it in "
                    f'overrides, for example {{"{leaves[name][0]}": {value!r}}}.'
                )
            if value is not None:
                values[leaves[name][0]] = value
        else:
            hint = did_you_mean(name, accepted)
            if is_strict or hint.startswith("Did"):
                raise ConfigError(f"parameter {name!r} must be a known name. {hint}")
    values.update(namespace.get("overrides") or {})
    return from_overrides(values)


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, (bool, int, float, str, list, tuple, dict))
        or (hasattr(value, "dtype") and hasattr(value, "tolist"))
    )


def to_yaml(config: ExperimentConfig) -> str:
    """Print a configuration as YAML that loads back equal."""
    return print_yaml(config.model_dump(mode="json"))


def cluster_to_yaml(cluster: ClusterConfig) -> str:
    """Print a cluster file that loads back equal; what has its default is left out."""
    return print_yaml(cluster.model_dump(mode="json", exclude_defaults=True))


def json_schema() -> dict[str, Any]:
    """The JSON schema of an experiment, for editors and other tools."""
    return ExperimentConfig.model_json_schema()
