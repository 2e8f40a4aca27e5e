"""Start a run: check everything, make its folder, hand it to a supervisor."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from labkit.cluster.plan import make_plan
from labkit.config import AsyncConfig, ExperimentConfig, from_overrides
from labkit.engine import quota
from labkit.errors import ConfigError, LabkitError
from labkit.launch import emulation
from labkit.launch.code import code_digests, copy_code, user_modules
from labkit.launch.environment import describe_environment
from labkit.launch.forkserver import start_daemon
from labkit.launch.handle import Run
from labkit.launch.reap import reap, status_lock
from labkit.runfolder import (
    ProcessId,
    RunError,
    RunFolder,
    RunState,
    RunStatus,
    run_key,
    runs_root,
    write_atomically,
)

_SECRET_LENGTH = 32
_FIXED_ON_RESUME = ("model", "data", "seed", "name", "optimizer.name")


def start(
    config: ExperimentConfig,
    *,
    is_repeat: bool = False,
    is_detached: bool = False,
    rendezvous: str | None = None,
    node: str | None = None,
    command: str = "",
) -> Run:
    """Start a run and return when its supervisor has taken over.

    A run is known by its content (configuration and code). An equal one that has finished is returned
    as it is; one that was interrupted goes on from its last checkpoint.

    Args:
        config: The experiment.
        is_repeat: Run it again beside an equal one, in a folder of its own.
        is_detached: Go on when this process ends; otherwise the run is stopped then.
        rendezvous: HOST:PORT of the first node, to run on several machines: start the same experiment
            on each of them. None: all nodes are emulated by processes on this machine.
        node: Which node of the cluster this machine is; default: the one named as the host is.
        command: What the user typed, for the record.

    Raises:
        ConfigError: the user's module is missing, the batch can't be split as wanted, the folder can't be
            written, the run is running, or several machines have no secret in common
            (LABKIT_SECRET, for asynchronous strategies).
        LabkitError: the first node does not answer.
    """
    meeting = None
    if rendezvous is not None and config.launch.is_emulated:
        raise ConfigError(
            "launch.is_emulated must be false with a rendezvous, got true: real machines have real links. "
            "Leave one of them out."
        )
    if rendezvous is not None:
        meeting = parse_rendezvous(rendezvous)
        node = own_node(config, node)
        if not _is_grouped(config):
            config = from_overrides({"launch.launcher": "elastic"}, base=config)
    secret = _shared_secret(config) if meeting else ""
    modules = user_modules(config)
    make_plan(config)  # refuses a split that can't be
    _check_network(config)
    code = code_digests(modules)
    key = run_key(config, code)
    parent = runs_root() / config.name
    launcher = None if is_detached else ProcessId.current()
    if meeting is not None and node is not None and node != config.cluster.nodes[0].name:
        _make_writable(parent)
        path = start_daemon(_join_run, str(parent), config, key, launcher, meeting, node, secret)
        return Run(RunFolder(path, node=node))
    with _locked(parent):
        folder, is_new = _choose_folder(parent, key, is_repeat=is_repeat)
        if is_new:
            folder.create(config)
            paths = copy_code(modules, folder)
            environment = describe_environment(command, code, paths)
            write_atomically(folder.env_file, json.dumps(environment, indent=1))
            _claim(folder, folder.read_status())
        else:
            status = reap(folder)
            if status.state is RunState.FINISHED:
                return _known_to_notebook(Run(folder, is_reused=True))
            _refuse_if_busy(folder, status)
            folder.write_config(config)
            _claim(folder, status.model_copy(update={"attempt": status.attempt + 1}))
    return _hand_over(folder, key, launcher, meeting, node, secret)


def _is_grouped(config: ExperimentConfig) -> bool:
    """Groups and servers of an asynchronous strategy come and go one by one."""
    return isinstance(config.sync, AsyncConfig) and config.launch.purpose == "train"


def _shared_secret(config: ExperimentConfig) -> str:
    """What the parameter servers of several machines let each other in by; "" where there are none.

    Raises:
        ConfigError: it is missing, or short enough to be guessed. The message does not repeat it.
    """
    text = os.environ.get("LABKIT_SECRET", "")
    if not _is_grouped(config):
        return ""
    if len(text) < _SECRET_LENGTH:
        raise ConfigError(
            f"LABKIT_SECRET must be at least {_SECRET_LENGTH} random characters, the same on all machines, "
            f"with sync.name {config.sync.name!r}, whose servers let nobody in without it, got {len(text)}. "
            "Make one: export LABKIT_SECRET=$(python -c 'import secrets; print(secrets.token_hex(32))')"
        )
    return text


def parse_rendezvous(text: str) -> tuple[str, int]:
    """Read HOST:PORT.

    Raises:
        ConfigError: it is no such thing.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"rendezvous must be HOST:PORT, got {text!r}. For example 10.0.0.1:29400.")
    return host, int(port)


def own_node(config: ExperimentConfig, node: str | None) -> str:
    """The node of the cluster that this machine is.

    Raises:
        ConfigError: there is no node of that name.
    """
    names = [each.name for each in config.cluster.nodes]
    name = node or socket.gethostname()
    if name not in names:
        origin = "" if node else " (this machine's host name)"
        raise ConfigError(f"node must be one of {', '.join(names)}, got {name!r}{origin}. Give --node NAME.")
    return name


@contextlib.contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """One launcher at a time decides about the runs of an experiment."""
    _make_writable(parent)
    try:
        with FileLock(parent / ".lock", timeout=30):
            yield
    except Timeout:
        raise ConfigError(f"{parent} must be free, got a lock held by another process. Try again.") from None
    except OSError as error:
        raise _not_writable(parent, error) from None


def _make_writable(parent: Path) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(parent, error) from None


def _not_writable(parent: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run folder must be writable, got {parent}: {error.strerror or error}. "
        "Free space or rights there, or set LABKIT_RUNS to another folder."
    )


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
    _check_network(changed)
    with _locked(folder.path.parent):
        status = reap(folder)
        _refuse_if_busy(folder, status)
        if status.state is RunState.FINISHED and (changed == config or _is_behind(folder, changed)):
            raise ConfigError(
                f"run must have something left to do, got {folder.key}, which has finished. Give more, "
                f"for example engine.num_epochs={config.engine.num_epochs * 2}."
            )
        folder.write_config(changed)
        _claim(folder, status.model_copy(update={"attempt": status.attempt + 1}))
    return _hand_over(folder, folder.key, None if is_detached else ProcessId.current(), None, None)


def _is_behind(folder: RunFolder, config: ExperimentConfig) -> bool:
    """A finished run has done as much as a configuration asks for, or more."""
    done = folder.history(0)
    if not done:
        return False
    limit = config.engine.max_steps
    is_long_enough = done[-1]["epoch"] >= config.engine.num_epochs
    return is_long_enough or (limit is not None and done[-1]["step"] >= limit)


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
    ours = {
        "state": RunState.PLANNED,
        "owner": ProcessId.current(),
        "created_at": status.created_at or time.time(),
        "started_at": None,
        "ended_at": None,
        "error": None,
        "workers": (),
        "num_restarts": 0,
    }
    with status_lock(folder):  # not while somebody reaps it
        folder.write_status(status.model_copy(update=ours))


def _hand_over(
    folder: RunFolder,
    key: str,
    launcher: ProcessId | None,
    rendezvous: tuple[str, int] | None,
    node: str | None,
    secret: str = "",
) -> Run:
    paths = tuple(folder.read_json(folder.env_file).get("import_paths", ()))
    try:
        start_daemon(_supervise, folder, key, launcher, paths, rendezvous, node, secret)
    except LabkitError as error:
        failed = {"state": RunState.FAILED, "owner": None, "error": RunError(message=str(error))}
        folder.write_status(folder.read_status().model_copy(update=failed))
        raise
    return _known_to_notebook(Run(folder))


def _check_network(config: ExperimentConfig) -> None:
    """Find out before anything starts whether the cluster can be emulated here."""
    if config.launch.is_emulated:
        fault = start_daemon(_try_network, config)
        if fault is not None:
            raise fault


def _try_network(reply: Callable[[ConfigError | None], None], config: ExperimentConfig) -> None:
    """Called in a process of its own: one that has no threads, as a notebook has, may fork freely."""
    try:
        quota.check(config)
        emulation.check(config.cluster)
    except ConfigError as error:
        reply(error)
    else:
        reply(None)


# What runs in the fork server imports torch there; this module stays free of it.


def _supervise(
    reply: Callable[[str], None],
    folder: RunFolder,
    key: str,
    launcher: ProcessId | None,
    import_paths: tuple[str, ...],
    rendezvous: tuple[str, int] | None,
    node: str | None,
    secret: str,
) -> None:
    from labkit.launch.supervisor import SupervisorTask, supervise

    supervise(reply, SupervisorTask(folder, key, launcher, import_paths, rendezvous, node, secret))


def _join_run(
    reply: Callable[[str], None],
    parent: str,
    config: ExperimentConfig,
    key: str,
    launcher: ProcessId | None,
    rendezvous: tuple[str, int],
    node: str,
    secret: str,
) -> None:
    from labkit.launch.member import MemberTask, join_run

    join_run(reply, MemberTask(parent, config, key, launcher, rendezvous, node, secret))


def _known_to_notebook(run: Run) -> Run:
    """Tell the notebook runner which runs its notebook started, so that the copy lands beside them."""
    notebook_dir = os.environ.get("LABKIT_NOTEBOOK_DIR")
    if notebook_dir:
        with open(Path(notebook_dir) / "runs.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"run": str(run.folder.path)}) + "\n")
    return run
