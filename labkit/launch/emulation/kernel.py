"""Namespaces of the Linux kernel: made by a short-lived child, held by nothing but file descriptors.

A namespace without a name lives as long as a process is in it or holds a descriptor of it. Here its
holders are the run's supervisor and that one's workers, which die with it, so the kernel takes the
namespace apart however they end: nothing is written anywhere that could be left behind, and there are no
names that two emulations could both want.
"""

import ctypes
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from labkit.errors import LabkitError

# From <sched.h> and <sys/mount.h>; Python names them only from 3.12 on.
NEW_MOUNTS, NEW_HOST_NAME, NEW_USER, NEW_NETWORK = 0x00020000, 0x04000000, 0x10000000, 0x40000000
_OWN_FOLDERS = 0x00000200
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 0x80000
_FILES = {NEW_USER: "user", NEW_NETWORK: "net", NEW_HOST_NAME: "uts", NEW_MOUNTS: "mnt"}

T = TypeVar("T")


def _call(name: str, *arguments: Any) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(kinds: int) -> None:
    """Move this process to new namespaces.

    Raises:
        OSError: it is not allowed.
    """
    _call("unshare", kinds)


def enter(namespaces: Sequence[int]) -> None:
    """Move this thread; into a user namespace only a process without other threads may go.

    Args:
        namespaces: Descriptors, the user namespace first. That of this process is passed over.

    Raises:
        OSError: it is not allowed, or the process has threads.
    """
    folder = os.getcwd()
    for fd in namespaces:
        if not _is_own_user_namespace(fd):
            _call("setns", fd, 0)
    if os.getcwd() != folder:
        os.chdir(folder)  # a mount namespace is entered at its root


def _is_own_user_namespace(fd: int) -> bool:
    """The kernel refuses to enter the user namespace that a process is in already."""
    theirs, ours = os.fstat(fd), os.stat("/proc/self/ns/user")
    return (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino)


def bind_file(source: str, target: str) -> None:
    """Show one file in the place of another, in this mount namespace."""
    _call("mount", source.encode(), target.encode(), None, _BIND, None)


def mount_memory(target: str) -> None:
    """Mount an empty file system in memory, in this mount namespace."""
    _call("mount", b"tmpfs", target.encode(), b"tmpfs", 0, None)


def keep_mounts_to_ourselves() -> None:
    """From now on mounts in this namespace are not seen outside; later ones outside still are here."""
    _call("mount", b"none", b"/", None, _RECURSIVE | _SLAVE, None)


def new_namespaces(user: int | None, kinds: Sequence[int], set_up: Callable[[], T]) -> tuple[list[int], T]:
    """Make namespaces and prepare them from inside.

    Args:
        user: User namespace that owns them; None: this process's own.
        kinds: `NEW_...` of each.
        set_up: Called inside; its result must be picklable.

    Returns:
        A descriptor of each namespace, and what `set_up` returned.

    Raises:
        OSError: it is not allowed.
    """

    def make(channel: socket.socket) -> T:
        enter([user] if user is not None else [])
        unshare(sum(kinds))
        result = set_up()
        fds = [os.open(f"/proc/self/ns/{_FILES[kind]}", os.O_RDONLY) for kind in kinds]
        socket.send_fds(channel, [b"+"], fds)
        return result

    ours, theirs = socket.socketpair()
    with ours, theirs:
        result = in_child(lambda: make(theirs))
        _, fds, _, _ = socket.recv_fds(ours, 1, len(kinds))
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds, result


def new_user_namespace() -> int:
    """Make a user namespace in which this process's user is root.

    Returns:
        Its descriptor.

    Raises:
        OSError: the system does not allow it.
    """
    identity = {"uid_map": f"0 {os.geteuid()} 1", "gid_map": f"0 {os.getegid()} 1"}

    def map_to_root() -> None:
        for name, text in {"setgroups": "deny", **identity}.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)

    fds, _ = new_namespaces(None, [NEW_USER], map_to_root)
    return fds[0]


def in_child(function: Callable[[], T], namespaces: Sequence[int] = ()) -> T:
    """Run a function in a forked child, in other namespaces, and hand back what it returns or raises.

    A child may enter any namespace; this process may not, since it has threads, or could not come back.

    Args:
        function: Its result must be picklable.
        namespaces: What the child enters first; the user namespace comes first.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _answer(function, namespaces, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        raise LabkitError(f"a helper process died (exit code {os.waitstatus_to_exitcode(status)})")
    is_good, value = pickle.loads(data)
    if not is_good:
        raise value
    return value  # type: ignore[no-any-return]


def _answer(function: Callable[[], Any], namespaces: Sequence[int], write_end: int) -> None:
    """What the child does. It never returns into the code of its parent."""
    try:
        try:
            enter(namespaces)
            answer = pickle.dumps((True, function()))
        except BaseException as error:
            answer = _pickled_error(error)
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)


def _pickled_error(error: BaseException) -> bytes:
    try:
        data = pickle.dumps((False, error))
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps((False, LabkitError(f"{type(error).__name__}: {error}")))


def in_thread(function: Callable[[], T], namespaces: Sequence[int]) -> T:
    """Run a function in a thread that is in other namespaces, and hand back what it gives.

    What it opens stays usable everywhere: a socket belongs to the namespace in which it was made. The
    thread ends with the function, so nothing has to find its way back, which without root would be refused.

    Args:
        function: Called once.
        namespaces: Network and mount namespaces, owned by this process's user namespace.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            unshare(_OWN_FOLDERS)  # a thread with a root folder of its own may enter a mount namespace
            enter(namespaces)
            answers.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="labkit-namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]


def is_linux() -> bool:
    """Namespaces are Linux's."""
    return sys.platform == "linux"
