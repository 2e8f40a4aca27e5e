"""Verbs that look and start nothing: `config`, `schema`, `doctor`; and `bench`."""

import click

from labkit.cli.experiment import experiment_options, read_experiment
from labkit.cli.output import json_option, print_json, print_table


@click.command()
@experiment_options
@json_option
def config(is_json: bool, **choice: object) -> None:
    """Print the resolved configuration as YAML and check it. Nothing is started.

    \b
    labkit config experiment.yaml engine.global_batch_size=128
    """
