"""The HTML of the widgets: short, with roles that a screen reader announces."""

import html
from collections.abc import Sequence

from labkit.lab.failure import log_tail
from labkit.lab.progress import Progress, clock_text
from labkit.runfolder import RunFolder, RunState, RunStatus

_MARKS = {
    RunState.PLANNED: "◌",
    RunState.RUNNING: "▶",
    RunState.FINISHED: "✔",
    RunState.FAILED: "✖",
    RunState.KILLED: "■",
    RunState.TIMEOUT: "⌛",
    RunState.LOST: "?",
}
_PRE = (
    "white-space:pre-wrap;overflow-wrap:anywhere;max-height:22em;overflow-y:auto;"
    "margin:4px 0;line-height:1.35"
)


def status_line(folder: RunFolder, status: RunStatus, progress: Progress) -> str:
    """State, step, loss, accuracy, speed and time left, in one line that is announced when it changes."""
    parts = [f"<b>{_MARKS[status.state]} {status.state}</b>", *_figures(status, progress)]
    title = html.escape(f"{folder.path.parent.name}/{folder.key}")
    bar = ""
    if progress.total_steps:
        bar = (
            f'<progress aria-label="steps done" style="width:100%;height:8px" '
            f'value="{progress.step}" max="{progress.total_steps}"></progress>'
        )
    return (
        f'<div style="line-height:1.6"><div><code>{title}</code></div>'
        f'<div role="status" style="font-variant-numeric:tabular-nums">{" · ".join(parts)}</div>{bar}</div>'
    )


def _figures(status: RunStatus, progress: Progress) -> list[str]:
    if not progress.step:
        return [] if status.state.is_final else ["starting workers"]
    total = f" of {progress.total_steps}" if progress.total_steps is not None else ""
    parts = [f"step {progress.step}{total}"]
    if progress.train_loss is not None:
        parts.append(f"loss {progress.train_loss:.3g}")
    if progress.val_accuracy is not None:
        parts.append(f"val accuracy {progress.val_accuracy:.3f}")
    if progress.samples_per_s is not None:
        parts.append(f"{progress.samples_per_s:,.0f} samples/s")
    if status.state.is_final and status.started_at and status.ended_at:
        parts.append(f"took {clock_text(status.ended_at - status.started_at)}")
    elif not status.state.is_final and progress.eta_s is not None:
        parts.append(f"ETA {clock_text(progress.eta_s)}")
    if status.diverged_at is not None:
        parts.append(f"diverged at step {status.diverged_at}")
    return parts


def stop_hint(folder: RunFolder) -> str:
    """The other ways to stop the run."""
    return (
        "<span>Kernel busy or gone? In a terminal: "
        f"<code>python -m labkit stop {html.escape(folder.key)}</code></span>"
    )


def note(text: str) -> str:
    """A quiet line; nothing for no text."""
    return f"<p>{html.escape(text)}</p>" if text else ""


def lines(texts: Sequence[str]) -> str:
    """Several lines that are announced when they change."""
    return f'<div role="status" style="line-height:1.5">{"<br>".join(map(html.escape, texts))}</div>'


def command(text: str) -> str:
    """A command to copy: focusing the field selects all of it."""
    return (
        '<label style="display:block;line-height:1.6">The same as a command: '
        f'<input readonly aria-label="The same as a command" value="{html.escape(text)}" '
        'onfocus="this.select()" style="width:100%;box-sizing:border-box;font-family:monospace;padding:4px">'
        "</label>"
    )


def alert(text: str) -> str:
    """A fault, announced at once; nothing for no text."""
    if not text:
        return ""
    return (
        '<div role="alert" style="border-left:4px solid #D55E00;padding:4px 10px;line-height:1.4">'
        f"<b>{html.escape(text)}</b></div>"
    )


def _neutral(text: str) -> str:
    return f'<div role="status" style="border-left:4px solid #888;padding:4px 10px">{html.escape(text)}</div>'


def failure(folder: RunFolder, status: RunStatus) -> str:
    """Why a run ended: the root cause, its traceback, then the end of that worker's log."""
    error = status.error
    if error is None:
        return ""
    parts = [_neutral(error.message) if status.state is RunState.KILLED else alert(error.message)]
    if error.traceback:
        parts.append(f'<pre style="{_PRE}">{html.escape(error.traceback)}</pre>')
    tail = log_tail(folder, error.rank)
    if tail:
        parts.append(
            f"<details open><summary>What worker {error.rank} printed last</summary>"
            f'<pre style="{_PRE}">{html.escape(tail)}</pre></details>'
        )
    return "".join(parts)
