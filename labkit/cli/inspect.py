"""Verbs that look and start no run: `config`, `schema`, `doctor`, `trace`, `bench`."""

from pathlib import Path
from typing import Any

import click

from labkit.cli.experiment import build_config, experiment_options, read_choice
from labkit.cli.output import json_option, print_json, print_table
from labkit.config import json_schema, to_yaml
from labkit.errors import ConfigError
from labkit.runfolder import find_run


@click.command()
@experiment_options
@json_option
def config(is_json: bool, **words: Any) -> None:
    """Check a configuration and print it whole.

    The YAML loads back equal. Nothing is started.

    \b
    Examples:
      labkit config experiment.yaml engine.global_batch_size=128
    """
    choice = read_choice(**words)
    if choice.is_notebook:
        raise ConfigError(f"what to print must be an experiment (.yaml), got the notebook {choice.target}.")
    built = build_config(choice)
    if is_json:
        print_json(built.model_dump(mode="json"))
    else:
        click.echo(to_yaml(built), nl=False)


@click.command()
def schema() -> None:
    """Print the JSON schema of an experiment.

    Every setting with its type, range, default and meaning; editors complete and check with it.

    \b
    Examples:
      labkit schema > experiment.schema.json
    """
    import json

    click.echo(json.dumps(json_schema(), indent=2))


@click.command()
@json_option
def doctor(is_json: bool) -> int:
    """Check that everything is here that labkit needs.

    Says what to do about what is not. Exit code 1 when something is missing that labkit can't do without.

    \b
    Examples:
      labkit doctor
    """
    from labkit.lab.doctor import Grade, diagnose

    checks = diagnose()
    if is_json:
        print_json([check.as_dict() for check in checks])
    else:
        rows = [(str(check.grade), check.name, check.found, check.remedy) for check in checks]
        print_table(("", "check", "found", "remedy"), rows)
    return 1 if any(check.grade is Grade.FAIL for check in checks) else 0


@click.command()
@click.argument("run")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Where to.")
def trace(run: str, output: Path | None) -> None:
    """Write a run's steps as a trace: what each worker did, and when.

    It lands in the run folder as trace.json. Open it at ui.perfetto.dev or chrome://tracing; both read the
    file in the browser and send it nowhere.

    \b
    Examples:
      labkit trace latest
    """
    from labkit.lab.trace import write_trace

    written = write_trace(find_run(run), output)
    click.echo(f"{written}\nOpen it at https://ui.perfetto.dev or chrome://tracing: they read it locally.")


@click.command()
@click.argument("name", required=False)
@json_option
def bench(name: str | None, is_json: bool) -> None:
    """Measure one claim of the README and print a table.

    Without a NAME it lists the benchmarks.

    \b
    Examples:
      labkit bench overhead --json
    """
    from labkit.bench import BENCHMARKS, run_benchmark

    if name is None:
        if is_json:
            print_json(BENCHMARKS)
        else:
            print_table(("benchmark", "what it measures"), list(BENCHMARKS.items()))
        return
    found = run_benchmark(name, lambda line: click.echo(line, err=True))
    if is_json:
        click.echo(found.to_json())
        return
    print_table(("figure", "median", "spread", "aim", "met"), found.rows())
    for note in found.notes:
        click.echo(note)
