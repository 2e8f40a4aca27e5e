"""The standard library's fork server, with torch imported once, so that a run starts in tenths of a second.

The server is a child of whoever launches (a notebook kernel, the command line); supervisors are forked
from it and outlive it. It never initialises CUDA, so what is forked from it may.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing import forkserver as _forkserver
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

from labkit.errors import LabkitError

_PRELOAD = ["labkit.launch.preload"]
_lock = threading.Lock()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def warm_up() -> None:
    """Start the fork server, which imports torch meanwhile. Returns at once; call it early in a notebook."""
    with _lock:
        _context()
        _forkserver.ensure_running()


def start_daemon(function: Callable[..., None], *arguments: Any) -> Any:
    """Run `function(reply, *arguments)` in a process of its own session that does not belong to this one.

    It is no child of ours: it does not end with us, leaves no zombie and does not hold up our exit.

    Args:
        function: An importable function; it calls `reply(value)` once.
        arguments: Picklable.

    Returns:
        What it replied.

    Raises:
        LabkitError: what it raised before it replied.
    """
    mine, theirs = multiprocessing.Pipe(duplex=False)
    with _lock, _main_module_kept_out():
        environment = dict(os.environ)
        process = _context().Process(target=_fork_away, args=(theirs, function, arguments, environment))
        process.start()
    theirs.close()
    process.join()
    process.close()
    try:
        is_good, value = mine.recv()
    except EOFError:
        raise LabkitError("the supervisor died before it could start the run; see its log") from None
    finally:
        mine.close()
    if not is_good:
        raise value
    return value


@contextlib.contextmanager
def _main_module_kept_out() -> Iterator[None]:
    """Keep the standard library from importing the launching script again in the new process.

    Nothing that we send lives there, and a script that starts a run without asking
    `__name__ == "__main__"` would start it again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _fork_away(
    pipe: Connection,
    function: Callable[..., None],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    if os.fork():
        return  # the process in between ends here; the daemon belongs to init
    code = 1
    try:
        os.setsid()
        _let_go_of_server()
        # The server's environment is that of its first launch; ours is that of this launch.
        os.environ.clear()
        os.environ.update(environment)

        def reply(value: Any) -> None:
            pipe.send((True, value))
            pipe.close()

        function(reply, *arguments)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        if not pipe.closed:
            fault = (
                error if isinstance(error, LabkitError) else LabkitError(f"the supervisor failed: {error!r}")
            )
            pipe.send((False, fault))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _let_go_of_server() -> None:
    """Close the pipes by which the server, and the standard library's helper, know that they are needed.

    Otherwise both would live as long as this process, with the launcher's output held open: a shell
    that reads the output of a detached launch would wait for the end of the run.
    """
    server, tracker = _forkserver._forkserver, resource_tracker._resource_tracker
    for owner, name in ((server, "_forkserver_alive_fd"), (tracker, "_fd")):
        fd = getattr(owner, name)
        if fd is not None:
            os.close(fd)
            setattr(owner, name, None)
