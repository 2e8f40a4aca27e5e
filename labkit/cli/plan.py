"""`labkit plan`: who will get which part of every batch, and what a step will take."""

from typing import Any

import click

from labkit.cli.experiment import build_config, experiment_options, read_choice
from labkit.cli.output import json_option, print_json
from labkit.errors import ConfigError


@click.command()
@experiment_options
@click.option("--save", metavar="FILE.yaml", help="Write the plan, to change by hand and run with --plan.")
@click.option("--diff", metavar="FILE.yaml", help="Show where a saved plan differs from the plan now.")
@json_option
def plan(save: str | None, diff: str | None, is_json: bool, **words: Any) -> None:
    """Show how the global batch is split over unlike workers, and what that promises.

    It is what `labkit run` does with the same words. Nothing is started.

    \b
    Examples:
      labkit plan experiment.yaml --cluster probed.yaml
      labkit plan experiment.yaml --cluster probed.yaml --save plan.yaml
      labkit run experiment.yaml --cluster probed.yaml --plan plan.yaml
    """
    choice = read_choice(**words)
    if choice.is_notebook:
        raise ConfigError(f"what to plan must be an experiment (.yaml), got the notebook {choice.target}.")
    config = build_config(choice)

    from labkit.cluster.plan import make_plan, predict
    from labkit.cluster.plan_file import pin, read_plan, save_plan, shares_of
    from labkit.lab.heterogeneity import diff_table, doubts, plan_lines, plan_table

    made = make_plan(config)
    if save is not None:
        save_plan(config, made, save)
    if is_json:
        found = predict(config, made)
        print_json(
            {
                "local_batch_sizes": shares_of(config, made),
                "origin": made.origin,
                "groups": made.groups,
                "micro_batch_sizes": made.micro_batch_sizes,
                "step_s": found and found.step_s,
                "samples_per_s": found and found.samples_per_s,
                "limit_samples_per_s": found and found.limit_samples_per_s,
                "gain": found and found.equal_split_s / found.step_s,
                "doubts": doubts(config, made),
            }
        )
        return
    if diff is not None:
        old = make_plan(pin(config, read_plan(diff), diff))
        click.echo(diff_table(config, old, made))
        return
    click.echo(plan_table(config, made))
    click.echo("\n".join(plan_lines(config, made)))
