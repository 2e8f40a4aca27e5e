"""`labkit memory`: the largest batch, and what became of a run's activations."""

from typing import TYPE_CHECKING, Any

import click

from labkit.cli.experiment import build_config, experiment_options, read_choice
from labkit.cli.output import json_option, print_json, read_size
from labkit.config import format_bytes
from labkit.errors import ConfigError

if TYPE_CHECKING:
    from labkit.launch import Run


@click.group()
def memory() -> None:
    """Activations in device and host memory.

    \b
    Examples:
      labkit memory maxbatch experiment.yaml memory.device_budget=20GB
      labkit run experiment.yaml memory.device_budget=20GB
      labkit memory show latest
    """


@memory.command()
@experiment_options
@click.option("--rendezvous", metavar="HOST:PORT", help="Where the machines meet; same on each.")
@click.option("--node", metavar="NAME", help="Which node of the cluster this machine is.")
@json_option
def maxbatch(rendezvous: str | None, node: str | None, is_json: bool, **words: Any) -> None:
    """Find the largest global batch with and without hybrid memory.

    Whole steps are tried on all workers of the cluster, each with its own part; they vote, and agree on the
    largest batch that fits everywhere.

    \b
    Examples:
      labkit memory maxbatch experiment.yaml memory.device_budget=20GB
      labkit memory maxbatch model=gpt data=text memory.device_budget=256MiB --cluster 1x2
    """
    choice = read_choice(**words)
    if choice.is_notebook:
        raise ConfigError(f"what to search for must be an experiment (.yaml), got {choice.target}.")
    config = build_config(choice)

    from labkit.cli.follow import follow
    from labkit.lab.activations import max_batch

    def wait(run: "Run") -> object:
        return follow(run, is_ours=True)

    found = max_batch(config, wait=wait, rendezvous=rendezvous, node=node)
    if is_json:
        print_json(
            {
                "plain": found.plain,
                "hybrid": found.hybrid,
                "growth": found.growth,
                "plain_parts": found.plain_parts,
                "hybrid_parts": found.hybrid_parts,
            }
        )
        return
    for name, size, parts in (
        ("without", found.plain, found.plain_parts),
        ("with hybrid memory", found.hybrid, found.hybrid_parts),
    ):
        split = f" ({' + '.join(map(str, parts))})" if len(parts) > 1 else ""
        click.echo(f"{name:<20}{size:>10,} samples{split}")
    click.echo(f"{'':<20}{found.growth:>10.2f} times")


@memory.command()
@click.argument("run", default="latest")
@click.option("--rank", type=int, default=0, show_default=True, help="Of the worker.")
@json_option
def show(run: str, rank: int, is_json: bool) -> None:
    """Show what a run's worker kept, moved and computed again, and what that freed and cost.

    \b
    Examples:
      labkit memory show latest
      labkit memory show 3f2a --rank 2
    """
    from labkit.lab.activations import plan_table, read_memory

    found = read_memory(run, rank)
    report = {name: value for name, value in found.report.items() if name not in ("kind", "t", "attempt")}
    if is_json:
        print_json({**report, "plan": found.recorded.to_mapping(), "step_s": found.step_s})
        return
    click.echo(plan_table(found))
    steps = max(1, report["num_steps"])
    for name in ("saved", "moved", "freed", "refused"):
        click.echo(f"{name + ' a step':<24}{format_bytes(report[f'{name}_bytes'] / steps):>14}")
    for name, size in report["held"].items():
        click.echo(f"{'not freed, still held':<24}{format_bytes(size / steps):>14}  {name}")
    if report["unmanaged_bytes"]:
        click.echo(
            f"{'seen by no hook':<24}{format_bytes(report['unmanaged_bytes']):>14}  closures, variables"
        )
    for name, seconds in sorted(report["stalls"].items(), key=lambda one: -one[1])[:5]:
        click.echo(f"{'waited for':<24}{1e3 * seconds / steps:>11.2f} ms  {name}")
    click.echo(
        f"{'step by the plan':<24}{1e3 * report['measured_step_s']:>11.2f} ms  "
        f"{1e3 * report['predicted_step_s']:.2f} ms predicted"
    )
    click.echo(
        f"{'peak of blocks':<24}{format_bytes(report['measured_peak_bytes']):>14}  "
        f"{format_bytes(report['predicted_peak_bytes'])} predicted"
    )
    if report["remark"]:
        click.echo(report["remark"])


@memory.command()
@click.argument("run", default="latest")
@click.option("--rank", type=int, default=0, show_default=True, help="Of the worker whose profile is used.")
@click.option("--budget", metavar="BYTES", help="Of the device, parameters included; default: the run's.")
@click.option("--rate", metavar="BYTES", help="A second, of the link each way; default: the run's.")
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Behind the link.")
@json_option
def simulate(run: str, rank: int, budget: str | None, rate: str | None, devices: int, is_json: bool) -> None:
    """Say what another budget, another link or more devices on it would make of a run's step.

    Nothing is started: the profile that the run recorded is planned and simulated again.

    \b
    Examples:
      labkit memory simulate latest --devices 4
      labkit memory simulate latest --budget 12GB --rate 25GB
    """
    from dataclasses import asdict, replace

    from labkit.lab.activations import read_memory, what_if
    from labkit.memory import Uplink

    found = read_memory(run, rank)
    recorded, share = found.recorded, found.num_sharing
    if budget is not None:
        recorded = replace(recorded, budget_bytes=read_size("--budget", budget) - recorded.reserved_bytes)
    link = recorded.link
    # The run's own rates were its share of the link.
    uplink = Uplink((share * link.out_bytes_per_s,), (share * link.in_bytes_per_s,), latency_s=link.latency_s)
    if rate is not None:
        uplink = Uplink.ideal(float(read_size("--rate", rate)))
    predicted = what_if(recorded, uplink, devices)
    if is_json:
        print_json(asdict(predicted))
        return
    click.echo(predicted)
