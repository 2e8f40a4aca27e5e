"""Run a notebook as a batch: parameters checked, its state kept, its executed copy in `runs/`."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from labkit.errors import LabkitError
from labkit.lab import parameters
from labkit.lab._execution import Execution
from labkit.lab._kernel import Limits, Watchdog
from labkit.lab._notebook_file import checked_output, read_notebook, use_python3
from labkit.lab._outcome import first_line, judge
from labkit.lab.notebook_folder import NotebookFolder, folder_for, notebook_key
from labkit.runfolder import RunError, RunFolder, RunState, RunStatus, runs_root, write_atomically

__all__ = ["Limits", "NotebookResult", "read_notebook", "run_notebook"]

_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class NotebookResult:
    """How a notebook ended.

    Attributes:
        state: finished, failed, killed or timeout.
        exit_code: What a command that ran it ends with: 0, 1 a cell failed, 124 time-out,
            130 interrupted, 138 the kernel died.
        folder: Its folder under `runs/notebooks/`.
        notebook: The executed copy.
        error: Why it did not finish, and the traceback; None when it did.
        runs: The runs that it started.
        is_reused: It had finished before and was not run again.
    """

    state: RunState
    exit_code: int
    folder: NotebookFolder
    notebook: Path
    error: RunError | None = None
    runs: tuple[RunFolder, ...] = ()
    is_reused: bool = False


def run_notebook(
    path: str | Path,
    values: Mapping[str, Any] | None = None,
    *,
    texts: Sequence[str] = (),
    files: Sequence[str | Path] = (),
    output: str | Path | None = None,
    is_repeat: bool = False,
    limits: Limits = _DEFAULT_LIMITS,
    echo: Callable[[str], None] | None = None,
) -> NotebookResult:
    """Execute a notebook with parameters, in a kernel of this very interpreter.

    The same notebook with the same parameters and the same labkit is executed once: when that has
    finished, its result is returned. The kernel runs in the notebook's own folder, sees LABKIT_BATCH=1
    and, in LABKIT_NOTEBOOK_DIR, the folder in which the executed copy grows. A copy is put beside every
    run that the notebook started.

    A Ctrl-C or SIGTERM stops the notebook, not the caller: the state is `killed`, the exit code 130.

    Args:
        path: The notebook; exactly one of its code cells is tagged `parameters`.
        values: Parameters as Python values.
        texts: Parameters as `name=value`, typed on a command line; they win over values.
        files: YAML or JSON files of parameters; values win over these.
        output: Where to put one more copy of the executed notebook.
        is_repeat: Execute again, in a folder of its own, although it has finished.
        limits: How long things may take.
        echo: Takes progress, a line at a time; default: print.

    Raises:
        ConfigError: the notebook, a parameter or a folder is wrong, or the same is running already.
            Nothing was started.
    """
    path, echo = Path(path), echo or _print_line
    source = read_notebook(path)
    schema = parameters.read_schema(source, path.name)
    given = parameters.already_injected(source, schema)
    given |= parameters.collect(schema, values, texts=texts, files=files)
    effective = {name: given.get(name, declared.default) for name, declared in schema.items()}
    copy_to = checked_output(path, output)
    use_python3(source, echo)
    plain = parameters.inject(source, {})
    folder = folder_for(path.stem, notebook_key(plain, effective), is_repeat=is_repeat)
    status = folder.claim()
    if status is None:
        echo(f"already finished: {folder.path}; --force runs it again")
        _copy(folder, copy_to)
        return NotebookResult(
            RunState.FINISHED,
            0,
            folder,
            folder.notebook_file,
            runs=tuple(folder.started_runs()),
            is_reused=True,
        )
    folder.write_parameters(given, effective)
    echo(f"{path.name} runs in {folder.path}")
    result = _execute(parameters.inject(source, given), path, folder, status, limits, echo)
    _copy(folder, copy_to)
    return result


def _execute(
    notebook: NotebookNode,
    path: Path,
    folder: NotebookFolder,
    status: RunStatus,
    limits: Limits,
    echo: Callable[[str], None],
) -> NotebookResult:
    def beat() -> None:
        folder.write_status(status.model_copy(update={"heartbeat_at": time.time()}))

    watchdog = Watchdog(limits, folder.stop_file, beat)
    execution = Execution(
        name=path.name,
        file=folder.notebook_file,
        kernel_log=folder.kernel_log,
        environment=_environment(folder),
        working_dir=path.absolute().parent,
        limits=limits,
        watchdog=watchdog,
        echo=echo,
    )
    failure: BaseException | None = None
    watchdog.start()
    try:
        with _signals_stop(watchdog):
            execution.run(notebook)
    except BaseException as error:
        failure = error
        if not isinstance(error, Exception):
            raise
    finally:
        watchdog.close()
        state, exit_code, error_record = judge(execution.outcome, watchdog.verdict, failure)
        now = time.time()
        ended = status.model_copy(
            update={"state": state, "error": error_record, "ended_at": now, "heartbeat_at": now}
        )
        _write_end(folder, ended)
    _add_note(execution, error_record)
    _hand_to_runs(folder, echo)
    return NotebookResult(
        state, exit_code, folder, folder.notebook_file, error_record, tuple(folder.started_runs())
    )


def _write_end(folder: NotebookFolder, ended: RunStatus) -> None:
    try:
        folder.write_status(ended)
    except OSError as error:
        why = f": {ended.error.message}" if ended.error else ""
        raise LabkitError(
            f"notebook's folder must be writable to the end, got {folder.path}: {error.strerror}. "
            f"The notebook {ended.state}{why}. Free space or rights there."
        ) from None


def _environment(folder: NotebookFolder) -> dict[str, str]:
    return {
        **os.environ,
        "LABKIT_BATCH": "1",
        "LABKIT_NOTEBOOK_DIR": str(folder.path),
        "LABKIT_RUNS": str(runs_root()),  # it may be relative to where we are, which the kernel is not
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else the debugger complains about frozen modules
    }


def _copy(folder: NotebookFolder, output: Path | None) -> None:
    if output is None or not folder.notebook_file.is_file():
        return
    try:
        write_atomically(output, folder.notebook_file.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabkitError(
            f"output must be writable, got {output}: {error.strerror}. The executed notebook is "
            f"{folder.notebook_file}."
        ) from None


def _add_note(execution: Execution, error: RunError | None) -> None:
    """Say in the executed copy why it ends where it does, if no cell says so."""
    if execution.notebook is None or error is None or execution.outcome.error is not None:
        return
    note = nbformat.v4.new_output("stream", name="stderr", text=f"labkit: {error.message}\n")
    for cell in reversed(execution.notebook.cells):
        if cell.cell_type == "code" and cell.metadata.get("papermill", {}).get("status") == "failed":
            cell.outputs.append(note)
            break
    with contextlib.suppress(OSError):  # a full disk: the state is written, the note is a nicety
        execution.save()


def _hand_to_runs(folder: NotebookFolder, echo: Callable[[str], None]) -> None:
    """Put the executed copy beside each run that the notebook started, and into its MLflow run."""
    for run in folder.started_runs():
        try:
            from labkit.lab.tracking import log_notebook

            write_atomically(run.notebook_file, folder.notebook_file.read_text(encoding="utf-8"))
            log_notebook(run)
        except Exception as error:  # the notebook's own result must not depend on it
            echo(f"the executed notebook did not reach run {run.key}: {first_line(error)}")


@contextlib.contextmanager
def _signals_stop(watchdog: Watchdog) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal interrupt the notebook; a second one kills the kernel."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _frame: object) -> None:
        watchdog.stop(RunState.KILLED, f"interrupted (signal {number})")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_line(line: str) -> None:
    print(line, flush=True)
