"""`labkit lab` and `labkit ui`: the servers a person looks at, on this machine."""

import os
from urllib.parse import urlsplit

import click

from labkit.cli.output import json_option, print_json
from labkit.errors import ConfigError
from labkit.lab import servers
from labkit.runfolder import runs_root

_PORT = click.IntRange(1, 65535)


@click.command()
@click.option("--port", type=_PORT, help="Port of JupyterLab.  [default: 8888 or the next free one]")
@click.option(
    "--mlflow-port", type=_PORT, help="Port of the MLflow UI.  [default: 5000 or the next free one]"
)
@json_option
def lab(port: int | None, mlflow_port: int | None, is_json: bool) -> None:
    """Start JupyterLab and the MLflow UI on 127.0.0.1 and print both links. Ctrl-C stops both.

    \b
    labkit lab
    labkit lab --port 9000
    """
    jupyter_port = servers.choose_port(port, servers.JUPYTER_PORT)
    ui_plan = _ui_plan(mlflow_port, servers.LOOPBACK, "--mlflow-port")
    ui_link = ui_plan.link if ui_plan else _remote_store() or ""
    jupyter = servers.jupyterlab(jupyter_port, ui_link)
    _say_starting("JupyterLab and the MLflow UI" if ui_plan else "JupyterLab")
    links = {"JupyterLab": jupyter.link, "MLflow UI": ui_link, "runs": str(runs_root())}
    servers.serve([jupyter, *([ui_plan] if ui_plan else [])], lambda: _announce(links, is_json))


@click.command()
@click.option("--port", type=_PORT, help="Its port.  [default: 5000 or the next free one]")
@click.option("--host", default=servers.LOOPBACK, show_default=True, help="Address to listen on.")
@json_option
def ui(port: int | None, host: str, is_json: bool) -> None:
    """Start the MLflow UI over the runs. It asks for no password: on another --host, everybody who
    reaches the port reads and changes your runs.

    \b
    labkit ui
    labkit ui --host 0.0.0.0 --port 5001
    """
    plan = _ui_plan(port, host, "--port")
    if plan is None:
        raise ConfigError(
            f"MLFLOW_TRACKING_URI must be a store to serve, got the server {_remote_store()}. "
            "Open that address, or unset it."
        )
    _say_starting("the MLflow UI")
    servers.serve([plan], lambda: _announce({"MLflow UI": plan.link, "runs": str(runs_root())}, is_json))


def _remote_store() -> str | None:
    """The tracking server of the user's own, when there is one: nothing to start then."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    return uri if urlsplit(uri).scheme in ("http", "https", "databricks") else None


def _ui_plan(port: int | None, host: str, option: str) -> servers.ServerPlan | None:
    if _remote_store():
        return None
    chosen = servers.choose_port(port, servers.MLFLOW_PORT, host, option)
    from labkit.lab import tracking

    return servers.mlflow_ui(chosen, tracking.ensure_store(), host)


def _say_starting(what: str) -> None:
    click.echo(f"Starting {what}: takes some seconds.", err=True)


def _announce(links: dict[str, str], is_json: bool) -> None:
    if is_json:
        print_json(links)
        return
    for name, link in links.items():
        click.echo(f"  {name:<12}{link}")
    click.echo("Ctrl-C stops " + ("both." if len(links) > 2 else "it."))
