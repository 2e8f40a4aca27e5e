"""The words and options that say what to run, shared by the verbs that take an experiment."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from labkit.cluster.plan_file import pin, read_plan
from labkit.config import ExperimentConfig, cluster_presets, from_overrides, load, parse_yaml
from labkit.errors import ConfigError

_Verb = TypeVar("_Verb", bound=Callable[..., Any])

_EXPERIMENT_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Choice:
    """What was asked for on the command line.

    Attributes:
        target: An experiment's or a notebook's file; none: the default experiment.
        file: A file of values.
        options: Values that have an option of their own, by their setting.
        texts: `key=value` texts, in their order.
        timeout_s: Longest life of the run, seconds.
        is_emulated: Nodes as namespaces, links of the cluster file's rates.
        plan: A file with the workers' shares.
    """

    target: Path | None
    file: str | None
    options: dict[str, str]
    texts: tuple[str, ...]
    timeout_s: float | None
    is_emulated: bool = False
    plan: str | None = None

    @property
    def is_notebook(self) -> bool:
        """The target is a notebook."""
        return self.target is not None and self.target.suffix == ".ipynb"


def experiment_options(verb: _Verb) -> _Verb:
    """Give a verb the words and options that `read_choice` takes."""
    decorators = (
        click.argument("words", nargs=-1, metavar="[EXPERIMENT.yaml | NOTEBOOK.ipynb] [KEY=VALUE]..."),
        click.option("-p", "parameters", multiple=True, metavar="KEY=VALUE", help="The same as KEY=VALUE."),
        click.option("-f", "file", metavar="PARAMS.yaml", help="Set the values of a YAML file."),
        click.option("--cluster", metavar="FILE|PRESET|NxM", help="A cluster, or N nodes of M workers."),
        click.option("--plan", metavar="FILE.yaml", help="Shares, as `labkit plan --save` wrote them."),
        click.option("--emulate", "is_emulated", is_flag=True, help="Shape the links as the cluster says."),
        click.option("--name", help="Name of the experiment: its folder under runs/, and in MLflow."),
        click.option("--timeout", "timeout_s", type=float, metavar="S", help="Longest life of the run."),
    )
    for decorate in reversed(decorators):
        verb = decorate(verb)
    return verb


def read_choice(
    words: Sequence[str],
    parameters: Sequence[str] = (),
    file: str | None = None,
    cluster: str | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    is_emulated: bool = False,
    plan: str | None = None,
) -> Choice:
    """Sort the words of a command line.

    Raises:
        ConfigError: there are two targets, or a target of an unknown kind.
    """
    targets = [word for word in words if "=" not in word or Path(word).is_file()]
    if len(targets) > 1:
        raise ConfigError(f"what to run must be one file, got {' and '.join(targets)}. Run them one by one.")
    options = {"cluster": _absolute(cluster), "name": name}
    return Choice(
        target=_checked(targets[0]) if targets else None,
        file=file,
        options={key: value for key, value in options.items() if value is not None},
        texts=(*parameters, *(word for word in words if word not in targets)),
        timeout_s=timeout_s,
        is_emulated=is_emulated,
        plan=plan,
    )


def _standing(cluster: Any) -> dict[str, Any]:
    """The description of a standing cluster that is named like no preset."""
    if not isinstance(cluster, str) or cluster in cluster_presets():
        return {}
    from labkit.launch.emulation import standing

    found = [record.cluster for record in standing.all_standing() if record.name == cluster]
    return {"cluster": found[0].model_dump(mode="json")} if found else {}


def _absolute(cluster: str | None) -> str | None:
    """A cluster file named on the command line is relative to where we are."""
    is_file = cluster is not None and cluster.endswith((".yaml", ".yml"))
    return str(Path(cluster).absolute()) if cluster is not None and is_file else cluster


def _checked(target: str) -> Path:
    path = Path(target)
    if path.suffix not in (*_EXPERIMENT_SUFFIXES, ".ipynb"):
        raise ConfigError(
            f"what to run must be an experiment (.yaml) or a notebook (.ipynb), got {target!r}. "
            "Settings are given as key=value."
        )
    if not path.is_file():
        raise ConfigError(f"what to run must be an existing file, got {target}. Check the path.")
    return path


def _read_values(file: str | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    try:
        values = parse_yaml(Path(file).read_text(encoding="utf-8"), file)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"-f must be a readable file, got {file}: {reason}. Check the path.") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{file} must hold a mapping of names to values, got {values!r}. See README.")
    return values


def build_config(choice: Choice) -> ExperimentConfig:
    """The experiment that was chosen. Later sources win: its file, -f, options, `key=value`, a plan's shares.

    Raises:
        ConfigError: a file or a setting is wrong.
    """
    base = load(choice.target) if choice.target else ExperimentConfig()
    launch: dict[str, Any] = {} if choice.timeout_s is None else {"launch.timeout_s": choice.timeout_s}
    if choice.is_emulated:
        launch["launch.is_emulated"] = True
    values = {**_read_values(choice.file), **choice.options, **launch}
    values |= _standing(values.get("cluster"))
    # JSON is YAML, so nothing changes its type on the way.
    overrides = [*(f"{key}={json.dumps(value)}" for key, value in values.items()), *choice.texts]
    config = from_overrides(overrides, base=base) if overrides else base
    return pin(config, read_plan(choice.plan), choice.plan) if choice.plan else config
