"""What happened to a notebook, and what that makes of it: state, exit code, cause."""

import signal
import traceback
from dataclasses import dataclass

from nbclient.exceptions import DeadKernelError

from labkit.errors import LabkitError
from labkit.runfolder import RunError, RunState

_DEAD_KERNEL = 138  # papermill's own choice


class KernelNotStarted(LabkitError):
    """The kernel's process ended, or did not answer, twice."""

    exit_code = 138


@dataclass
class Outcome:
    """What happened, cell by cell.

    Attributes:
        num_cells: Code cells that are not empty; -1 before the first begins.
        num_done: How many of them have ended well.
        cell: The one that runs or ended last, as `cell 3/7`.
        error: Name, text and traceback of the exception that ended the notebook.
        return_code: How the kernel's process ended, negative for a signal; None while it lives.
    """

    num_cells: int = -1
    num_done: int = 0
    cell: str = ""
    error: tuple[str, str, str] | None = None
    return_code: int | None = None

    @property
    def is_complete(self) -> bool:
        """Every cell has run to its end; a `sys.exit(0)` at the end of the last one is one, too."""
        left = self.num_cells - self.num_done
        return left == 0 or (left == 1 and self.is_polite_exit)

    @property
    def is_polite_exit(self) -> bool:
        """A cell called `sys.exit()` without an error code."""
        return self.error is not None and self.error[0] == "SystemExit" and self.error[1] in ("", "0", "None")


def judge(
    outcome: Outcome, verdict: tuple[RunState, str] | None, failure: BaseException | None
) -> tuple[RunState, int, RunError | None]:
    """How a notebook ended, from what its cells, its kernel and the clock say.

    Args:
        outcome: What the cells say.
        verdict: Why the watchdog stopped it, if it did.
        failure: What was raised here instead.

    Returns:
        State, exit code, and the cause, root first; None when it finished.
    """
    if outcome.is_complete:
        return RunState.FINISHED, 0, None
    place = f" in {outcome.cell}" if outcome.cell else ""
    state, exit_code = RunState.FAILED, 1
    details = outcome.error[2] if outcome.error else ""
    if verdict is not None:
        state, reason = verdict
        exit_code = _DEAD_KERNEL if state is RunState.FAILED else state.exit_code
        message = reason + place
    elif isinstance(failure, KernelNotStarted):
        exit_code, message = _DEAD_KERNEL, f"{failure}. See kernel.log beside the notebook."
    elif isinstance(failure, DeadKernelError):
        exit_code, message = _DEAD_KERNEL, _death(outcome.return_code, place)
    elif isinstance(failure, Exception):
        message = f"{type(failure).__name__}: {first_line(failure)}{place}"
        details = "".join(traceback.format_exception(failure))
    elif failure is not None:  # a Ctrl-C that no handler took
        state, exit_code, message = RunState.KILLED, RunState.KILLED.exit_code, f"interrupted{place}"
    elif outcome.is_polite_exit:
        left = outcome.num_cells - outcome.num_done - 1
        message = f"sys.exit() ended the notebook{place}, {left} still to go. Raise an error, or drop it."
    else:
        name, text, _ = outcome.error or ("Error", "the notebook did not run to its end", "")
        message = f"{name}: {first_line(text)}{place}"
    return state, exit_code, RunError(message=message, traceback=details)


def _death(return_code: int | None, place: str) -> str:
    if return_code is None or return_code >= 0:
        return f"kernel exited (code {return_code}){place}"
    hint = "; often for want of memory" if -return_code == signal.SIGKILL else ""
    return f"kernel died (signal {-return_code}){place}{hint}"


def first_line(error: BaseException | str) -> str:
    """The first line of an error, or its kind when it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
