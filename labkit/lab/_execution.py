"""Execute a notebook through papermill with our kernel, our file and our reading of what happened.

papermill's record can't be trusted as it stands: after a dead kernel it calls every cell completed, and
after `sys.exit(0)` it calls the notebook done with cells pending. This engine keeps what was and was not
run, and one plain line of progress a cell instead of a bar.
"""

import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import papermill
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError, strip_color
from papermill.execute import remove_error_markers

from labkit.lab._kernel import Limits, LocalKernel, Watchdog, closed_event_loop, connection_folder
from labkit.lab._notebook_file import as_text
from labkit.lab._outcome import KernelNotStarted, Outcome
from labkit.lab._printer import Printer
from labkit.runfolder import write_atomically

_IOPUB_TIMEOUT_S = 60  # nbclient's 4 s fail a good cell on a busy machine

_quiet = logging.getLogger("labkit.lab.notebook")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False


@dataclass
class Execution:
    """One notebook on its way through a kernel.

    Attributes:
        name: The notebook's file name, for its own record.
        file: Where the executed copy is kept while it grows.
        kernel_log: What the kernel's process itself prints.
        environment: What the kernel sees.
        working_dir: Where it runs.
        limits: How long things may take.
        watchdog: Ends the kernel.
        echo: Takes lines for a person.
        outcome: Filled on the way.
    """

    name: str
    file: Path
    kernel_log: Path
    environment: dict[str, str]
    working_dir: Path
    limits: Limits
    watchdog: Watchdog
    echo: Callable[[str], None]
    outcome: Outcome = field(default_factory=Outcome)
    notebook: NotebookNode | None = None

    def run(self, notebook: NotebookNode) -> None:
        """Execute; the outcome and the file say how it went.

        Raises:
            KernelNotStarted: there was no kernel.
            DeadKernelError: it died.
        """
        papermill_engines.register("labkit", _Engine)
        try:
            # No path and no parameter goes through papermill: it would format braces in the one and
            # change the type of the other.
            papermill.execute_notebook(
                notebook,
                None,
                engine_name="labkit",
                kernel_name="python3",
                progress_bar=False,
                execution=self,
            )
        except PapermillExecutionError:
            # papermill has marked the place in the notebook, also for a cell that is tagged
            # `raises-exception` and did as it says.
            if self.outcome.error is None and self.notebook is not None:
                remove_error_markers(self.notebook)
        finally:
            self.save()

    def save(self) -> None:
        """Write the executed copy as strict JSON, whole or not at all."""
        if self.notebook is not None:
            write_atomically(self.file, as_text(self.notebook), is_durable=False)


class _Engine(Engine):  # type: ignore[misc] # papermill has no types
    """papermill's way to let another execute."""

    @classmethod
    def execute_notebook(
        cls, nb: NotebookNode, kernel_name: str, *, execution: Execution, **_ignored: Any
    ) -> NotebookNode:
        execution.notebook = nb
        nb.metadata.papermill.update(input_path=execution.name, output_path=execution.file.name)
        manager = _Record(nb, execution)
        manager.notebook_start()
        try:
            with connection_folder() as folder, closed_event_loop():
                _Client(manager, execution, folder).execute()
        finally:
            manager.notebook_complete()
        return manager.nb


class _Record(NotebookExecutionManager):  # type: ignore[misc] # papermill has no types
    """papermill's record in the notebook's metadata: saved through us, and true."""

    def __init__(self, nb: NotebookNode, execution: Execution) -> None:
        super().__init__(nb, progress_bar=False)
        self._execution = execution

    def save(self, **_: Any) -> None:
        self._execution.save()
        self.last_save_time = self.now()

    def notebook_complete(self, **_: Any) -> None:
        pending = [cell for cell in self.nb.cells if cell.metadata.papermill["status"] == self.PENDING]
        super().notebook_complete()
        for cell in pending:
            cell.metadata.papermill["status"] = self.PENDING
        self.save()


class _Client(PapermillNotebookClient):  # type: ignore[misc] # papermill has no types
    """Runs the cells in our kernel."""

    def __init__(self, manager: _Record, execution: Execution, folder: Path) -> None:
        super().__init__(
            manager,
            log=_quiet,
            log_output=True,
            startup_timeout=execution.limits.start_timeout_s,
            iopub_timeout=_IOPUB_TIMEOUT_S,
            store_widget_state=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(execution.working_dir)}},
        )
        self._execution, self._folder = execution, folder
        self._printer = Printer(execution.echo)

    def execute(self, **_: Any) -> NotebookNode:
        watchdog, outcome = self._execution.watchdog, self._execution.outcome
        self._start()
        try:
            return super().execute()
        finally:
            if watchdog.process is not None:
                outcome.return_code = watchdog.process.poll()
                watchdog.signal_kernel(signal.SIGKILL)  # only if all polite ways have failed
                watchdog.end_leftovers()

    def create_kernel_manager(self) -> LocalKernel:
        execution = self._execution
        self.km = LocalKernel(kernel_name="python3", log=_quiet)
        self.km.prepare(self._folder, execution.environment, execution.kernel_log)
        return self.km

    def _start(self) -> None:
        """Start the kernel; once more if it does not come up."""
        execution = self._execution
        for is_last in (False, True):
            kernel = self.create_kernel_manager()
            try:
                self.start_new_kernel()
                execution.watchdog.process = kernel.process
                self.start_new_kernel_client()
                return
            except Exception as error:
                if is_last or execution.watchdog.verdict is not None:
                    raise KernelNotStarted(f"kernel did not start: {error}") from error
                execution.echo(f"kernel did not start ({error}); trying once more")

    def papermill_execute_cells(self) -> None:
        outcome = self._execution.outcome
        outcome.num_cells = sum(_is_code(cell) for cell in self.nb.cells)
        number = 0
        for index, cell in enumerate(self.nb.cells):
            if self._execution.watchdog.verdict is not None:
                break
            number += _is_code(cell)
            if not self._run_cell(index, f"cell {number}/{outcome.num_cells}"):
                break
        self._execution.watchdog.cells_done()

    def _run_cell(self, index: int, label: str) -> bool:
        """Run one cell; whether to go on with the next."""
        cell, outcome, started_at = self.nb.cells[index], self._execution.outcome, time.monotonic()
        outcome.cell = label if _is_code(cell) else outcome.cell
        self.nb_man.cell_start(cell, index)
        try:
            self.execute_cell(cell, index)
            outcome.num_done += _is_code(cell)
        except CellExecutionError as error:
            self.nb_man.cell_exception(cell, cell_index=index)
            outcome.error = (error.ename, error.evalue, _traceback_of(cell))
        except BaseException:
            self.nb_man.cell_exception(cell, cell_index=index)
            raise
        finally:
            self.nb_man.cell_complete(self.nb.cells[index], cell_index=index)
            self._printer.flush()
            if _is_code(cell):
                self._report(label, cell, time.monotonic() - started_at)
        return outcome.error is None

    def _report(self, label: str, cell: NotebookNode, seconds: float) -> None:
        is_good = cell.metadata.papermill["status"] == self.nb_man.COMPLETED
        first = cell.source.strip().splitlines()[0].lstrip("# ")
        words = first if len(first) <= 60 else first[:57] + "..."
        self._execution.echo(f"{label} {'done in' if is_good else 'failed after'} {seconds:.1f} s: {words}")

    def log_output_message(self, output: NotebookNode) -> None:
        self._printer.show(output)


def _is_code(cell: NotebookNode) -> bool:
    return bool(cell.cell_type == "code" and cell.source.strip())


def _traceback_of(cell: NotebookNode) -> str:
    for output in cell.outputs:
        if output.output_type == "error":
            return str(strip_color("\n".join(output.traceback)))
    return ""
