"""Why a run did not finish, in text: the root cause first, then its traceback, then its log."""

from typing import Any

from labkit.errors import RunFailed
from labkit.lab.series import folder_of
from labkit.runfolder import RunFolder, RunState, RunStatus

_LOG_LINES = 30
_MAX_BYTES = 20_000


def raise_if_failed(run: Any) -> None:
    """Make a notebook (and its papermill run) fail where its run has failed.

    Args:
        run: A run's handle, its folder, its key, the beginning of its key, or `latest`. One that has
            finished, or still runs, raises nothing.

    Raises:
        RunFailed: the run has ended otherwise; the message names the worker, its traceback follows.
    """
    folder = folder_of(run)
    status = folder.read_status()
    if not status.state.is_final or status.state is RunState.FINISHED:
        return
    cause = f": {status.error.message}" if status.error else ""
    detail = failure_text(folder, status).partition("\n")[2]
    raise RunFailed(f"run {folder.key} {_ENDED[status.state]}{cause}", status.state.exit_code, detail)


_ENDED = {
    RunState.FAILED: "failed",
    RunState.KILLED: "was stopped",
    RunState.TIMEOUT: "timed out",
    RunState.LOST: "was lost",
}


def failure_text(folder: RunFolder, status: RunStatus) -> str:
    """The root cause in one line, its traceback, and the end of that worker's log; "" for no error."""
    error = status.error
    if error is None:
        return ""
    parts = [error.message, error.traceback.rstrip()]
    tail = log_tail(folder, error.rank)
    if tail:
        parts.append(f"What worker {error.rank} printed last:\n{tail}")
    return "\n".join(part for part in parts if part)


def log_tail(folder: RunFolder, rank: int | None) -> str:
    """The last lines that a worker printed: stdout, then stderr."""
    lines: list[str] = []
    for file in folder.log_files(rank) if rank is not None else ():
        try:
            with open(file, "rb") as stream:
                stream.seek(max(0, file.stat().st_size - _MAX_BYTES))
                lines += stream.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        except OSError:
            continue
    return "\n".join(lines)
