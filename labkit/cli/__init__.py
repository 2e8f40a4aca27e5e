"""The command line: `python -m labkit VERB`, or `labkit VERB` where the environment is active.

Exit codes: 0 all good, 1 a run failed, 2 bad input, 124 time-out, 130 interrupted, 138 dead kernel.
Nothing here imports torch or mlflow, so that every verb answers at once.
"""

import os
import sys
from collections.abc import Sequence

import click

from labkit.cli.cluster import cluster
from labkit.cli.control import attach, logs, resume, stop, sync
from labkit.cli.inspect import bench, config, doctor, schema, trace
from labkit.cli.memory import memory
from labkit.cli.plan import plan
from labkit.cli.probe import probe
from labkit.cli.reproduce import reproduce
from labkit.cli.run import run
from labkit.cli.serve import lab, ui
from labkit.cli.shards import shards
from labkit.cli.status import status
from labkit.errors import LabkitError, did_you_mean

_VERBS = (
    run,
    status,
    logs,
    stop,
    attach,
    resume,
    reproduce,
    sync,
    trace,
    lab,
    ui,
    doctor,
    config,
    schema,
    cluster,
    probe,
    plan,
    memory,
    shards,
    bench,
)


class _Verbs(click.Group):
    """The verbs in the order of use, and a hint for a mistyped one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [verb.name or "" for verb in _VERBS]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            hint = did_you_mean(args[0], self.commands)
            raise click.UsageError(f"verb must be a known one, got {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
def app() -> None:
    """labkit: run, watch and compare distributed training experiments.

    \b
    Examples:
      labkit run experiment.yaml optimizer.learning_rate=0.05
      labkit run notebooks/00_quickstart.ipynb
      labkit status
    """


for _verb in _VERBS:
    app.add_command(_verb)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: Words after `labkit`; default: those of this process.

    Returns:
        The exit code.
    """
    try:
        code = app.main(args=argv and list(argv), prog_name="labkit", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except LabkitError as error:
        return _complain("\n".join(filter(None, (str(error), error.detail))), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        return _complain(f"{error.format_message()} See `labkit {_verb_of(error)}--help`.", 2)
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", 130)
    except BrokenPipeError:
        # Somebody read enough (`labkit status | head`). Python must not complain about it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _verb_of(error: click.ClickException) -> str:
    context: click.Context | None = getattr(error, "ctx", None)
    return f"{context.info_name} " if context is not None and context.parent is not None else ""


def _complain(message: str, code: int) -> int:
    click.echo(f"labkit: {message}", err=True)
    return code
