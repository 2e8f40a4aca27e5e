"""`labkit run`: an experiment or a notebook, from start to end."""

import shlex
import sys
from typing import TYPE_CHECKING, Any

import click

from labkit.cli.experiment import build_config, experiment_options, read_choice
from labkit.cli.follow import follow
from labkit.cli.notebook import run_notebook
from labkit.cli.output import json_option, print_json, starting
from labkit.cli.report import report, summary_of
from labkit.config import ExperimentConfig, to_yaml
from labkit.errors import ConfigError
from labkit.launch.reap import reap
from labkit.runfolder import RunFolder, RunState, run_key, runs_root

if TYPE_CHECKING:
    from labkit.launch import Run


@click.command()
@experiment_options
@click.option("--force", "is_forced", is_flag=True, help="Run again although an equal run has finished.")
@click.option("--detach", "is_detached", is_flag=True, help="Return at once; the run goes on by itself.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Check everything and print it; start nothing.")
@click.option("--output", metavar="OUT.ipynb", help="One more copy of the executed notebook.")
@click.option("--rendezvous", metavar="HOST:PORT", help="Where the machines of one run meet; same on each.")
@click.option("--node", metavar="NAME", help="Which node of the cluster this machine is.")
@json_option
def run(
    is_forced: bool,
    is_detached: bool,
    is_dry: bool,
    output: str | None,
    rendezvous: str | None,
    node: str | None,
    is_json: bool,
    **words: Any,
) -> int:
    """Run an experiment or a notebook.

    An equal run that has finished is not run again, and one that was interrupted goes on from its
    last checkpoint. Ctrl-C asks the run to save and stop; a second one kills it.

    \b
    Examples:
      labkit run experiment.yaml optimizer.learning_rate=0.05 --cluster 2x2
      labkit run experiment.yaml --cluster 4x4-1gbit --emulate
      labkit run notebooks/02_train.ipynb -p seed=3
      labkit run experiment.yaml --rendezvous head:29400 --node node1
    """
    choice = read_choice(**words)
    if choice.is_notebook:
        _refuse(
            "an experiment (.yaml)", {"--detach": is_detached, "--rendezvous": rendezvous, "--node": node}
        )
        return run_notebook(choice, output, is_forced=is_forced, is_dry=is_dry, is_json=is_json)
    _refuse("a notebook (.ipynb)", {"--output": output})
    config = build_config(choice)
    if is_dry:
        _show_plan(config, is_json)
        return 0
    handle = _start(config, is_forced, is_detached, rendezvous, node)
    return see_through(handle, is_detached=is_detached, is_json=is_json)


def _refuse(kind: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value:
            raise ConfigError(f"{name} must be given with {kind}, got it with another. Leave it out.")


def _start(
    config: ExperimentConfig, is_forced: bool, is_detached: bool, rendezvous: str | None, node: str | None
) -> "Run":
    from labkit import launch

    with starting():
        return launch.start(
            config,
            is_repeat=is_forced,
            is_detached=is_detached,
            rendezvous=rendezvous,
            node=node,
            command=shlex.join(["labkit", *sys.argv[1:]]),
        )


def see_through(run: "Run", *, is_detached: bool, is_json: bool) -> int:
    """Follow a run that this command started to its end and report it.

    Returns:
        The exit code.
    """
    if is_detached and not run.is_reused:
        _say_detached(run.folder, is_json)
        return 0
    if run.is_reused:
        click.echo("An equal run has finished before: nothing was started. --force runs it again.", err=True)
    status = follow(run, is_ours=True)
    report(run.folder, status, is_json=is_json)
    return status.state.exit_code


def _say_detached(folder: RunFolder, is_json: bool) -> None:
    if is_json:
        print_json(summary_of(folder, reap(folder)))
        return
    click.echo(f"{folder.key} goes on by itself in {folder.path}")
    click.echo(f"  labkit attach {folder.key}\n  labkit stop {folder.key}")


def _show_plan(config: ExperimentConfig, is_json: bool) -> None:
    """Print what would be run, where, and whether it has been."""
    from labkit.launch.code import code_digests, user_modules

    folder = RunFolder(runs_root() / config.name / run_key(config, code_digests(user_modules(config))))
    state = reap(folder).state if folder.exists() else None
    would = "start"
    if state is not None:
        would = "reuse" if state is RunState.FINISHED else "resume" if state.is_final else "refuse"
    if is_json:
        print_json({"folder": str(folder.path), "would": would, "config": config.model_dump(mode="json")})
        return
    click.echo(to_yaml(config), nl=False)
    click.echo(f"# would {would} {folder.path}" + (f" ({state})" if state else ""))
