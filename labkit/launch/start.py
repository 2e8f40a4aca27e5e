"""Start a run: check everything, make its folder, hand it to a supervisor."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from labkit.config import ExperimentConfig, from_overrides
from labkit.errors import ConfigError, LabkitError
from labkit.launch.code import code_digests, copy_code, user_modules
from labkit.launch.environment import describe_environment
from labkit.launch.forkserver import start_daemon
from labkit.launch.handle import Run
from labkit.launch.reap import reap
from labkit.runfolder import ProcessId, RunFolder, RunState, RunStatus, run_key, runs_root, write_atomically

_TAKE_OVER_S = 120.0
_FIXED_ON_RESUME = ("model", "data", "seed", "name", "optimizer.name")


def start(
    config: ExperimentConfig, *, is_repeat: bool = False, is_detached: bool = False, command: str = ""
) -> Run:
    """Start a run and return at once.

    A run is known by its content (configuration and code). An equal one that has finished is returned
    as it is; one that was interrupted goes on from its last checkpoint.

    Args:
        config: The experiment.
        is_repeat: Run it again beside an equal one, in a folder of its own.
        is_detached: Go on when this process ends; otherwise the run is stopped then.
        command: What the user typed, for the record.

    Raises:
        ConfigError: the user's module is missing, the folder can't be written, or the run is running.
    """
    modules = user_modules(config)
    code = code_digests(modules)
    parent = runs_root() / config.name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / ".lock", timeout=30):
            folder, is_new = _choose_folder(parent, run_key(config, code), is_repeat=is_repeat)
            if not is_new:
                status = reap(folder)
                if status.state is RunState.FINISHED:
                    return _known_to_notebook(Run(folder, is_reused=True))
                _refuse_if_busy(folder, status)
                paths = tuple(folder.read_json(folder.env_file).get("import_paths", ()))
                folder.write_config(config)
                _claim(folder, status.model_copy(update={"attempt": status.attempt + 1}))
            else:
                folder.create(config)
                paths = tuple(copy_code(modules, folder))
                environment = describe_environment(command, code, list(paths))
                write_atomically(folder.env_file, json.dumps(environment, indent=1))
                _claim(folder, folder.read_status())
    except Timeout:
        raise ConfigError(f"{parent} must be free, got a lock held by another process. Try again.") from None
    except OSError as error:
        raise ConfigError(
            f"run folder must be writable, got {parent}: {error.strerror or error}. "
            "Free space or rights there, or set LABKIT_RUNS to another folder."
        ) from None
    return _hand_over(folder, is_detached=is_detached, is_resume=not is_new, import_paths=paths)


def resume(folder: RunFolder, overrides: Sequence[str] = (), *, is_detached: bool = False) -> Run:
    """Go on with a run from its newest checkpoint, bit for bit on the same cluster.

    Args:
        folder: A run that is not running.
        overrides: Changes such as `engine.num_epochs=20` or `cluster=1x2`.
        is_detached: Go on when this process ends.

    Raises:
        ConfigError: it is running, there is nothing left to do, or an override would make it another
            experiment.
    """
    config = folder.read_config()
    for override in overrides:
        key = override.partition("=")[0]
        if key in _FIXED_ON_RESUME or key.split(".")[0] in _FIXED_ON_RESUME:
            raise ConfigError(
                f"override must not change what the checkpoint was trained with, got {override!r}. "
                "Start a new run instead."
            )
    changed = from_overrides(list(overrides), base=config) if overrides else config
    with FileLock(folder.path.parent / ".lock", timeout=30):
        status = reap(folder)
        _refuse_if_busy(folder, status)
        if status.state is RunState.FINISHED and changed == config:
            raise ConfigError(
                f"run must have something left to do, got {folder.key}, which has finished. Give more, "
                f"for example engine.num_epochs={config.engine.num_epochs * 2}."
            )
        folder.write_config(changed)
        _claim(folder, status.model_copy(update={"attempt": status.attempt + 1}))
    paths = tuple(folder.read_json(folder.env_file).get("import_paths", ()))
    return _hand_over(folder, is_detached=is_detached, is_resume=True, import_paths=paths)


def _choose_folder(parent: Path, key: str, *, is_repeat: bool) -> tuple[RunFolder, bool]:
    """The folder of a run, and whether it is new."""
    folder = RunFolder(parent / key)
    if not folder.exists() or not is_repeat:
        return folder, not folder.exists()
    number = 2
    while RunFolder(parent / f"{key}-r{number}").exists():
        number += 1
    return RunFolder(parent / f"{key}-r{number}"), True


def _refuse_if_busy(folder: RunFolder, status: RunStatus) -> None:
    owner = status.owner
    if status.state.is_final or owner is None or not owner.is_alive():
        return
    raise ConfigError(
        f"run must not be running, got {folder.key}, which process {owner.pid} on {owner.host} owns. "
        f"Wait, or stop it with: labkit stop {folder.key}"
    )


def _claim(folder: RunFolder, status: RunStatus) -> None:
    """Mark the run as ours until the supervisor takes over."""
    for path in (folder.stop_file, *folder.alive_dir.glob("rank*")):
        path.unlink(missing_ok=True)
    folder.write_status(
        status.model_copy(
            update={
                "state": RunState.PLANNED,
                "owner": ProcessId.current(),
                "created_at": status.created_at or time.time(),
                "started_at": None,
                "ended_at": None,
                "error": None,
                "workers": (),
                "num_restarts": 0,
            }
        )
    )


def _hand_over(
    folder: RunFolder, *, is_detached: bool, is_resume: bool, import_paths: tuple[str, ...]
) -> Run:
    # Imported where it runs: this module stays free of torch.
    launcher = None if is_detached else ProcessId.current()
    start_daemon(_supervise, str(folder.path), launcher, is_resume, import_paths)
    deadline = time.monotonic() + _TAKE_OVER_S
    while folder.read_status().state is RunState.PLANNED:
        if time.monotonic() > deadline:
            raise LabkitError(
                f"the supervisor did not start within {_TAKE_OVER_S:g} s. See {folder.supervisor_log}"
            )
        time.sleep(0.005)
    return _known_to_notebook(Run(folder))


def _supervise(
    folder: str, launcher: ProcessId | None, is_resume: bool, import_paths: tuple[str, ...]
) -> None:
    from labkit.launch.supervisor import SupervisorTask, supervise

    supervise(SupervisorTask(folder, launcher, is_resume, import_paths))


def _known_to_notebook(run: Run) -> Run:
    """Tell the notebook runner which runs its notebook started, so that the copy lands beside them."""
    notebook_dir = os.environ.get("LABKIT_NOTEBOOK_DIR")
    if notebook_dir:
        with open(Path(notebook_dir) / "runs.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"run": str(run.folder.path)}) + "\n")
    return run
