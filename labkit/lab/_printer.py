"""Pass on what a notebook prints while it runs."""

import re
from collections.abc import Callable

from nbformat import NotebookNode


class Printer:
    """Passes on what a notebook prints, whole lines only, indented below the runner's own."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._rest = {"stdout": "", "stderr": ""}

    def show(self, output: NotebookNode) -> None:
        """Pass on one output of a cell."""
        if output.output_type == "stream":
            *lines, self._rest[output.name] = (self._rest[output.name] + output.text).split("\n")
            for line in lines:
                self._line(line)
        elif set(output.get("data", ())) & {"text/plain"}:
            self.flush()
            for line in str(output.data["text/plain"]).splitlines():
                self._line(line)

    def flush(self) -> None:
        """Pass on lines without an end."""
        for name, rest in self._rest.items():
            self._rest[name] = ""
            if rest:
                self._line(rest)

    def _line(self, line: str) -> None:
        self._echo("    " + re.split(r"\r(?=.)", line.rstrip("\r"))[-1].rstrip())
