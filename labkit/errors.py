"""The errors labkit raises on purpose, each with the exit code its command ends with."""

import difflib
from collections.abc import Iterable


class LabkitError(Exception):
    """A fault that labkit explains in one line: what is wrong and what to do about it."""

    exit_code = 1
    detail = ""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of labkit's own stack: the fault, then its detail."""
        return [f"{type(self).__name__}: {self}", *([self.detail] if self.detail else [])]


class ConfigError(LabkitError):
    """Bad input, found before anything starts. The message names the value and the remedy."""

    exit_code = 2


class RunFailed(LabkitError):
    """A run ended in a state other than `finished`; `detail` holds the root cause's traceback."""

    def __init__(self, message: str, exit_code: int = 1, detail: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.detail = detail


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The hint for a mistyped name: the nearest known one, or the whole list when nothing is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known: {', '.join(names)}." if names else "Nothing is known here."
