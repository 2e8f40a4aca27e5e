"""`labkit probe`: measure a cluster's devices and links and write them into its file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labkit.cli.experiment import build_config, experiment_options, read_choice
from labkit.cli.output import json_option, print_json
from labkit.errors import ConfigError

if TYPE_CHECKING:
    from labkit.launch import Run


@click.command()
@click.argument("place", metavar="CLUSTER")
@experiment_options
@click.option("--output", metavar="FILE.yaml", help="Where to write it; default: the cluster's own file.")
@click.option("--figure", metavar="FILE.html", help="Draw the measurements and the lines through them.")
@click.option(
    "--links", "is_links", is_flag=True, help="Measure the links between devices and their host alone."
)
@click.option("--rendezvous", metavar="HOST:PORT", help="Where the machines meet; same on each.")
@click.option("--node", metavar="NAME", help="Which node of the cluster this machine is.")
@json_option
def probe(
    place: str,
    output: str | None,
    figure: str | None,
    is_links: bool,
    rendezvous: str | None,
    node: str | None,
    is_json: bool,
    **words: Any,
) -> int:
    """Measure the devices and links of a cluster.

    Every worker computes batches of growing size with the experiment's model until its line
    alpha + beta * samples has settled; then the links between the nodes are measured. What was found is
    written into the cluster's file, from which `labkit plan` and `labkit run` split batches.

    With --links: what 1, 2, ... devices behind each link to their host bring through together when they copy
    at once, out, in, and both ways, from which hybrid memory plans.

    \b
    Examples:
      labkit probe cluster.yaml experiment.yaml
      labkit probe cluster.yaml --links
      labkit probe 4x2-1gbit model=mlp --emulate --output probed.yaml
    """
    if words.get("cluster") is not None:
        raise ConfigError("the cluster must be the first word, got --cluster as well. Leave --cluster out.")
    words["cluster"] = place
    target = _target(place, output)
    choice = read_choice(**words)
    if choice.is_notebook:
        raise ConfigError(f"what to probe with must be an experiment (.yaml), got {choice.target}.")
    config = build_config(choice)

    from labkit.cli.follow import follow
    from labkit.lab import heterogeneity

    def wait(run: "Run") -> object:
        return follow(run, is_ours=True)

    if is_links:
        links = heterogeneity.probe_links(config, wait=wait, rendezvous=rendezvous, node=node)
        cluster, drawn = links.cluster, heterogeneity.uplink_curves(links)
        tables = [heterogeneity.uplink_table(links)]
        next_step = f"labkit run EXPERIMENT --cluster {target} memory.device_budget=..."
    else:
        found = heterogeneity.probe(config, wait=wait, rendezvous=rendezvous, node=node)
        cluster, drawn = found.cluster, heterogeneity.profiles(found)
        tables = [heterogeneity.profile_table(found), heterogeneity.link_table(found)]
        next_step = f"labkit plan EXPERIMENT --cluster {target}"
    heterogeneity.save_cluster(cluster, target)
    if figure is not None:
        drawn.write_html(figure, include_plotlyjs=True)
    if is_json:
        print_json({"file": str(target), "cluster": cluster.model_dump(mode="json")})
        return 0
    for table in tables:
        click.echo(table)
    click.echo(f"Written to {target}\n  {next_step}")
    return 0


def _target(cluster: str, output: str | None) -> Path:
    if output is not None:
        path = Path(output)
    elif cluster.endswith((".yaml", ".yml")) and Path(cluster).is_file():
        path = Path(cluster)
    else:
        raise ConfigError(f"--output must be given for a cluster that is no file of yours, got {cluster!r}.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output must be in a folder that exists, got {path}. Make {path.parent}.")
    return path
