"""`labkit reproduce`: the same experiment once more, and how its figures compare."""

import shlex
import sys
from typing import Any

import click

from labkit.cli.follow import follow
from labkit.cli.output import json_option, starting
from labkit.cli.report import final_figures, report
from labkit.config import ExperimentConfig
from labkit.errors import ConfigError
from labkit.launch.code import code_digests, user_modules
from labkit.launch.reap import reap
from labkit.runfolder import RunFolder, RunState, find_run

_NOT_COMPARED = ("perf/",)  # time is never the same twice


@click.command()
@click.argument("run")
@json_option
def reproduce(run: str, is_json: bool) -> int:
    """Run a finished run once more and compare the figures.

    The same configuration is run beside it, in a folder of its own.

    \b
    Examples:
      labkit reproduce 3f9a
    """
    original = find_run(run)
    config = _config_of_finished(original)
    for name in changed_code(original, config):
        click.echo(
            f"warning: {name} has changed since {original.key}: figures may differ for that.", err=True
        )
    from labkit import launch

    with starting():
        handle = launch.start(config, is_repeat=True, command=shlex.join(["labkit", *sys.argv[1:]]))
    status = follow(handle, is_ours=True)
    found = comparison(original, handle.folder)
    report(handle.folder, status, is_json=is_json, extra={"original": original.key, **found})
    if not is_json and status.state is RunState.FINISHED:
        click.echo(comparison_text(original, found))
    return status.state.exit_code


def _config_of_finished(original: RunFolder) -> ExperimentConfig:
    config, state = original.read_config(), reap(original).state
    if state is not RunState.FINISHED:
        raise ConfigError(
            f"run must have finished to be compared with, got {original.key}, which is {state}. "
            f"Finish it first: labkit resume {original.key}"
        )
    return config


def changed_code(original: RunFolder, config: ExperimentConfig) -> list[str]:
    """Names of the code that differs from what the run was made with.

    The user's modules are looked for where they were then; where they have changed or gone, the copies
    in the run folder are taken.
    """
    environment = original.read_json(original.env_file)
    recorded: dict[str, str] = environment.get("code", {})
    copies, *places = environment.get("import_paths") or [str(original.code_dir)]
    sys.path[:0] = [*places, copies]
    if any(digest != recorded.get(name) for name, digest in _digests(config).items() if name != "labkit"):
        sys.path[:0] = [copies]
    return [name for name, digest in _digests(config).items() if digest != recorded.get(name)]


def _digests(config: ExperimentConfig) -> dict[str, str]:
    return code_digests(user_modules(config))


def comparison(original: RunFolder, repeat: RunFolder) -> dict[str, Any]:
    """How the final figures of two runs compare.

    Returns:
        `equal`, and `differences`: of each figure that is not equal the two values.
    """
    before, after = final_figures(original), final_figures(repeat)
    names = [name for name in before if not name.startswith(_NOT_COMPARED)]
    differences = {name: [before[name], after.get(name)] for name in names if before[name] != after.get(name)}
    return {"equal": not differences, "differences": differences}


def comparison_text(original: RunFolder, found: dict[str, Any]) -> str:
    """The comparison in words: equal, or each figure that differs and by how much."""
    if found["equal"]:
        return f"equal to {original.key} in every figure"
    lines = [_difference_text(name, *pair) for name, pair in found["differences"].items()]
    return "\n".join([f"differs from {original.key}:", *lines])


def _difference_text(name: str, before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return f"  {name}: {before} then, {after} now"
    return f"  {name}: {before:.8g} then, {after:.8g} now ({after - before:+.2g})"
