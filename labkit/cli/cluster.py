"""`labkit cluster`: emulated clusters that stand by themselves, and the links of those that runs made."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labkit.cli.output import json_option, print_json, print_table
from labkit.config import cluster_presets, load_cluster
from labkit.errors import ConfigError
from labkit.runfolder import find_run

if TYPE_CHECKING:
    from labkit.launch.emulation import Emulation


@click.group()
def cluster() -> None:
    """Emulated clusters: nodes as network namespaces of this machine, joined by links of given rates.

    A run makes a cluster of its own with `labkit run --emulate`, and is put on a standing one of the same
    description if there is one.

    \b
    Examples:
      labkit cluster up 4x4-1gbit
      labkit cluster link node3 --mbit 100
    """


@cluster.command()
@click.argument("what", metavar="PRESET|FILE|NxM")
@click.option("--name", help="To call it by; default: the preset's or the file's name.")
@json_option
def up(what: str, name: str | None, is_json: bool) -> None:
    """Build a cluster and leave it standing until `labkit cluster down`.

    \b
    Examples:
      labkit cluster up 4x4-1gbit
      labkit run experiment.yaml --cluster 4x4-1gbit --emulate
    """
    from labkit.launch.emulation import open_record, standing

    record = standing.up(name or Path(what).stem, load_cluster(what))
    with open_record(record.emulation) as emulation:
        text = str(emulation)
    if is_json:
        print_json({"name": record.name, "holder": record.emulation.holder.pid, "network": text})
        return
    click.echo(text)
    click.echo(f"  labkit cluster link NODE --mbit 100\n  labkit cluster down {record.name}")


@cluster.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@json_option
def status(names: tuple[str, ...], is_json: bool) -> None:
    """Show standing clusters and how their links are now.

    \b
    Examples:
      labkit cluster status
    """
    from labkit.launch.emulation import open_record, standing

    records = [standing.find(name) for name in names] if names else standing.all_standing()
    found = []
    for record in records:
        with open_record(record.emulation) as emulation:
            found.append((record.name, record.started_at, _as_dicts(emulation)))
    if is_json:
        print_json([{"name": name, "started_at": at, "links": links} for name, at, links in found])
        return
    if not found:
        click.echo(f"No cluster stands. Presets: {', '.join(cluster_presets())}")
        click.echo("Start one: labkit cluster up 4x4-1gbit")
        return
    _print_links([(name, link) for name, _, links in found for link in links])


def _as_dicts(emulation: "Emulation") -> list[dict[str, Any]]:
    from labkit.launch.emulation import link_states

    return [asdict(state) for state in link_states(emulation)]


def _print_links(rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    from labkit.launch.emulation.links import rate_text, rtt_text

    print_table(
        ("cluster", "node", "address", "up", "down", "round trip", "sent", "received"),
        [
            (
                name,
                link["node"],
                link["address"],
                "cut" if link["is_cut"] else rate_text(link["up_mbit"]),
                "cut" if link["is_cut"] else rate_text(link["down_mbit"]),
                rtt_text(link["rtt_ms"]),
                f"{link['sent_bytes'] / 1e6:.1f} MB",
                f"{link['received_bytes'] / 1e6:.1f} MB",
            )
            for name, link in rows
        ],
    )


@cluster.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "is_all", is_flag=True, help="Every standing cluster.")
def down(names: tuple[str, ...], is_all: bool) -> None:
    """Take standing clusters down. A run that is on one keeps it until its end.

    \b
    Examples:
      labkit cluster down 4x4-1gbit
      labkit cluster down --all
    """
    from labkit.launch.emulation import standing

    if bool(names) == is_all:
        raise ConfigError("what to take down must be names or --all, got both or neither. Give one of them.")
    wanted = [standing.find(name).name for name in names] or [r.name for r in standing.all_standing()]
    for name in wanted:
        standing.down(name)
        click.echo(f"{name} is down")


@cluster.command()
@click.argument("node")
@click.option("--mbit", type=float, metavar="R", help="Rate both ways; 0: as fast as it goes.")
@click.option("--up", "up_mbit", type=float, metavar="R", help="Rate towards the others alone.")
@click.option("--down", "down_mbit", type=float, metavar="R", help="Rate from the others alone.")
@click.option("--cut", "is_cut", is_flag=True, help="Let nothing through any more.")
@click.option("--heal", "is_healed", is_flag=True, help="Undo --cut.")
@click.option("--cluster", "name", metavar="NAME", help="A standing cluster; default: the only one.")
@click.option("--run", metavar="RUN", help="The network of this run.")
@json_option
def link(
    node: str,
    mbit: float | None,
    up_mbit: float | None,
    down_mbit: float | None,
    is_cut: bool,
    is_healed: bool,
    name: str | None,
    run: str | None,
    is_json: bool,
) -> None:
    """Change, cut or heal the link of a node, also while a run goes on; without a change, show it.

    \b
    Examples:
      labkit cluster link node3 --mbit 100
      labkit cluster link node1 --cut --run latest
      labkit cluster link node1 --heal --run latest
    """
    from labkit.launch.emulation import cut_link, heal_link, link_state

    rates = (mbit, up_mbit, down_mbit)
    if sum([any(rate is not None for rate in rates), is_cut, is_healed]) > 1:
        raise ConfigError("change of a link must be one of a rate, --cut and --heal, got several. Do one.")
    with _open(name, run) as emulation:
        if is_cut:
            cut_link(emulation, node)
        elif is_healed:
            heal_link(emulation, node)
        elif any(rate is not None for rate in rates):
            _set_rates(emulation, node, *rates)
        state = link_state(emulation, node)
        where = emulation.name or f"run {run}"
    if is_json:
        print_json(asdict(state))
        return
    _print_links([(where, asdict(state))])


def _open(name: str | None, run: str | None) -> "Emulation":
    from labkit.launch.emulation import open_run, standing

    if name is not None and run is not None:
        raise ConfigError("where the link is must be --cluster or --run, got both. Give one of them.")
    if run is not None:
        return open_run(find_run(run))
    if name is None:
        names = [record.name for record in standing.all_standing()]
        if len(names) != 1:
            raise ConfigError(
                f"--cluster must be given unless exactly one cluster stands, got {len(names)} standing. "
                "Give --cluster NAME, or --run RUN."
            )
        name = names[0]
    return standing.open_standing(name)


def _set_rates(
    emulation: "Emulation", node: str, mbit: float | None, up_mbit: float | None, down_mbit: float | None
) -> None:
    from labkit.launch.emulation import link_state, set_link

    now = link_state(emulation, node)
    up = up_mbit if up_mbit is not None else mbit
    down = down_mbit if down_mbit is not None else mbit
    set_link(
        emulation,
        node,
        up_mbit=now.up_mbit if up is None else up or None,
        down_mbit=now.down_mbit if down is None else down or None,
    )
