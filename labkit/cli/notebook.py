"""`labkit run NOTEBOOK.ipynb`: hand a notebook to the batch runner and say how it went."""

from typing import TYPE_CHECKING, Any

import click

from labkit.cli.experiment import Choice
from labkit.cli.output import print_json
from labkit.cli.report import report, summary_of
from labkit.launch.reap import reap
from labkit.runfolder import RunState

if TYPE_CHECKING:
    from labkit.lab.batch import NotebookResult

_MOST_RUNS = 8  # of a notebook, that are told one by one


def run_notebook(choice: Choice, output: str | None, *, is_forced: bool, is_dry: bool, is_json: bool) -> int:
    """Run a notebook and report it.

    Args:
        choice: What was asked for; its target is the notebook.
        output: Where one more executed copy goes.
        is_forced: Run again although the same has finished.
        is_dry: Check the parameters, print them, start nothing.
        is_json: Print one JSON object; progress goes to stderr either way.

    Returns:
        The exit code.

    Raises:
        ConfigError: the notebook or a parameter is wrong.
    """
    assert choice.target is not None
    emulated = ["is_emulated=true"] if choice.is_emulated else []
    texts = [*(f"{key}={value}" for key, value in choice.options.items()), *emulated, *choice.texts]
    files = [choice.file] if choice.file else []
    if is_dry:
        _show_parameters(choice, texts, files, is_json)
        return 0
    # It brings papermill along, which takes a while.
    from labkit.lab import batch

    result = batch.run_notebook(
        choice.target,
        texts=texts,
        files=files,
        output=output,
        is_repeat=is_forced,
        limits=batch.Limits(timeout_s=choice.timeout_s),
        echo=lambda line: click.echo(line, err=True),
    )
    if is_json:
        print_json(_as_dict(result))
    else:
        _print(result)
    return result.exit_code


def _show_parameters(choice: Choice, texts: list[str], files: list[str], is_json: bool) -> None:
    from labkit.lab import parameters
    from labkit.lab.batch import read_notebook

    assert choice.target is not None
    notebook = read_notebook(choice.target)
    schema = parameters.read_schema(notebook, choice.target.name)
    given = parameters.already_injected(notebook, schema) | parameters.collect(
        schema, texts=texts, files=files
    )
    effective = {name: given.get(name, declared.default) for name, declared in schema.items()}
    if is_json:
        print_json({"notebook": str(choice.target), "parameters": effective})
        return
    for name, value in effective.items():
        click.echo(f"{name} = {value!r}" + ("  (given)" if name in given else ""))
    click.echo(f"# would run {choice.target}")


def _as_dict(result: "NotebookResult") -> dict[str, Any]:
    return {
        "state": str(result.state),
        "exit_code": result.exit_code,
        "folder": str(result.folder.path),
        "notebook": str(result.notebook),
        "is_reused": result.is_reused,
        "error": result.error.message if result.error else None,
        "traceback": result.error.traceback if result.error else "",
        "runs": [summary_of(folder, reap(folder)) for folder in result.runs],
    }


def _print(result: "NotebookResult") -> None:
    """The runs first, since a notebook mostly fails because one of them did; of many, those that failed."""
    runs = [(folder, reap(folder)) for folder in result.runs]
    unfinished = [(folder, status) for folder, status in runs if status.state is not RunState.FINISHED]
    has_failed_run = bool(unfinished)
    for folder, status in runs if len(runs) <= _MOST_RUNS else unfinished:
        report(folder, status, is_json=False)
    if len(runs) > _MOST_RUNS:
        click.echo(f"{len(runs) - len(unfinished)} of {len(runs)} runs finished (labkit status lists them)")
    if result.error is not None:
        traceback = "" if has_failed_run else result.error.traceback
        click.echo(f"cause: {result.error.message}\n{traceback}".rstrip())
    click.echo(f"notebook {result.state}")
    click.echo(f"  copy    {result.notebook}")
