"""`labkit lab` and `labkit ui`: the servers a person looks at, on this machine."""

import os
from collections.abc import Sequence

import click

from labkit.cli.output import json_option, print_json
from labkit.lab import links, servers
from labkit.runfolder import runs_root

_PORT = click.IntRange(1, 65535)


@click.command()
@click.option("--port", type=_PORT, help="Port of JupyterLab.  [default: 8888 or the next free one]")
@click.option(
    "--mlflow-port", type=_PORT, help="Port of the MLflow UI.  [default: 5000 or the next free one]"
)
@json_option
def lab(port: int | None, mlflow_port: int | None, is_json: bool) -> None:
    """Start JupyterLab and the MLflow UI on 127.0.0.1.

    Prints both links; Ctrl-C stops both.

    \b
    Examples:
      labkit lab
      labkit lab --port 9000
    """
    jupyter_port = servers.choose_port(port, servers.JUPYTER_PORT)
    jupyter = servers.jupyterlab(jupyter_port)
    if os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http"):  # the user has a server
        _serve([jupyter], {"MLflow UI": links.home_url()}, is_json)
        return
    ui_port = servers.choose_port(
        mlflow_port, servers.MLFLOW_PORT, option="--mlflow-port", taken=[jupyter_port]
    )
    _serve([jupyter, servers.mlflow_ui(ui_port)], {}, is_json)


@click.command()
@click.option("--port", type=_PORT, help="Its port.  [default: 5000 or the next free one]")
@click.option("--host", default=servers.LOOPBACK, show_default=True, help="Address to listen on.")
@json_option
def ui(port: int | None, host: str, is_json: bool) -> None:
    """Start the MLflow UI over the runs.

    It asks for no password: on another --host, everybody who reaches the port can read and change
    your runs.

    \b
    Examples:
      labkit ui
      labkit ui --host 0.0.0.0 --port 5001
    """
    chosen = servers.choose_port(port, servers.MLFLOW_PORT, host=host)
    _serve([servers.mlflow_ui(chosen, host)], {}, is_json)


def _serve(plans: Sequence[servers.ServerPlan], others: dict[str, str], is_json: bool) -> None:
    found = {**{plan.name: plan.link for plan in plans}, **others, "runs": str(runs_root())}

    def announce() -> None:
        if is_json:
            print_json(found)
            return
        for name, link in found.items():
            click.echo(f"  {name:<12}{link}")
        click.echo(f"Ctrl-C stops {'both' if len(plans) > 1 else 'it'}.")

    click.echo(f"Starting {' and '.join(plan.name for plan in plans)}: takes some seconds.", err=True)
    servers.serve(plans, announce)
