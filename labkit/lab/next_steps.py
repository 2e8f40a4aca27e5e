"""Where to look further once a run is there."""

import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.lab import links
from labkit.lab.series import folder_of


@dataclass(frozen=True)
class NextSteps:
    """Links and commands; shows as HTML in a notebook, prints as text.

    Attributes:
        folder: The run folder.
        mlflow_url: The run in the MLflow UI; None while MLflow does not know it.
        commands: What each command is for, by the command.
    """

    folder: Path
    mlflow_url: str | None
    commands: dict[str, str]

    def __str__(self) -> str:
        rows = [f"run folder  {self.folder}"]
        if self.mlflow_url:
            rows.append(f"MLflow      {self.mlflow_url}")
        return "\n".join([*rows, *(f"{command}    {what}" for command, what in self.commands.items())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [f"<li>Run folder: <code>{html.escape(str(self.folder))}</code></li>"]
        if self.mlflow_url:
            url = html.escape(self.mlflow_url)
            rows.append(f'<li><a href="{url}" target="_blank">Its curves in the MLflow UI</a></li>')
        rows += [
            f"<li><code>{html.escape(command)}</code>: {html.escape(what)}</li>"
            for command, what in self.commands.items()
        ]
        return f"<ul>{''.join(rows)}</ul>"


def next_steps(run: Any) -> NextSteps:
    """Where to look further.

    Args:
        run: A run's handle, its folder, its key, the beginning of its key, or `latest`.
    """
    folder = folder_of(run)
    commands = {
        "python -m labkit ui": "serve the MLflow UI, which the link needs",
        "python -m labkit status": "all runs and their states",
        f"python -m labkit reproduce {folder.key}": "train this again from its record",
    }
    if links.is_served():
        del commands["python -m labkit ui"]
    return NextSteps(folder.path, links.run_url(folder), commands)
