"""Make every frame between nodes late by half a round trip, in a small process: few kernels have `tc netem`.

Without latency the switch is a bridge. With it, each port is bridged with a TAP device, and what joins these
devices is a process that keeps each frame for its time and then gives it to the device of its receiver.
Rates stay with the kernel: its token buckets stand before this queue (what a node sends) and behind it (what
a port sends). Frames are the up to 64 KiB that TCP hands down at a time; the kernel cuts them up, if at all,
only behind the last device.

The process ends when nobody holds the write end of a pipe any more, its `lifeline`, which is held like the
namespaces: by the supervisor and the workers of a run, by the holder of a standing cluster.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Sequence

from labkit.errors import ConfigError
from labkit.launch.emulation import kernel

DEVICE = "/dev/net/tun"
_READY = "+"
# From <linux/if_tun.h>.
_SET_DEVICE, _SET_OFFLOADS = 0x400454CA, 0x400454D0
_IS_TAP, _NO_PROTOCOL, _WITH_OFFLOADS = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _LARGE_FRAMES = 0x01, 0x02
_HEADER_BYTES = 10  # struct virtio_net_hdr: what is left to do for a frame; passed on as it came
_LARGEST_FRAME = 2**16 + 64

_MOST_WAITING_BYTES = 2**26  # of one port; what does not fit is dropped, as by any full queue
_BATCH = 16  # frames of a port, then it is the next one's turn
_PRIORITY = -10  # nice: a switch that waits for workers to pause would add to the latency
_MONOTONIC, _ABSOLUTE = 1, 1


def start_switch(names: Sequence[str], rtt_ms: float, namespaces: Sequence[int]) -> tuple[int, int]:
    """Start the process; its devices are there, and down, when this returns.

    Args:
        names: Of the devices, one per port.
        rtt_ms: Round trip, milliseconds; a frame waits for half of it.
        namespaces: Of the switch, as `kernel.enter` takes them.

    Returns:
        The process, a child of this one, and the write end of its lifeline.

    Raises:
        ConfigError: TAP devices can't be made here.
    """
    lifeline, ours = os.pipe()
    answer, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(names, rtt_ms, namespaces, lifeline, theirs)
    os.close(lifeline)
    os.close(theirs)
    with os.fdopen(answer) as pipe:
        said = pipe.read()
    if said == _READY:
        return pid, ours
    os.close(ours)
    os.waitpid(pid, 0)
    raise ConfigError(
        f"cluster.rtt_ms must find {DEVICE} readable and writable, got: {said or 'its process died'}. Run as "
        "root, on a system that has it (modprobe tun), or leave rtt_ms out."
    )


def _live(names: Sequence[str], rtt_ms: float, namespaces: Sequence[int], lifeline: int, answer: int) -> None:
    """What the process does. It never returns into the code of its parent."""
    try:
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # the end of the lifeline says when to end
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            kernel.enter(namespaces)
            taps = [_open_tap(name) for name in names]
            switch = Switch(taps, rtt_ms / 2e3, lifeline)
        except OSError as error:
            os.write(answer, str(error.strerror).encode())
            return
        os.write(answer, _READY.encode())
        os.chdir("/")  # no file system is kept busy
        with contextlib.suppress(OSError):
            os.nice(_PRIORITY)
        gc.disable()  # no garbage is made in circles, and a collection would make frames late
        _close_all_but(switch.fds)
        switch.run()
    finally:
        os._exit(0)


def _open_tap(name: str) -> int:
    fd = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        fd, _SET_DEVICE, struct.pack("16sH22x", name.encode(), _IS_TAP | _NO_PROTOCOL | _WITH_OFFLOADS)
    )
    with contextlib.suppress(OSError):  # the kernel then cuts frames up before it hands them over
        fcntl.ioctl(fd, _SET_OFFLOADS, _CHECKSUMS | _LARGE_FRAMES)
    return fd


def _close_all_but(kept: Sequence[int]) -> None:
    """Let go of all that was inherited: files, namespaces, lifelines, the pipe of the answer too."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # that of the folder just listed
                os.close(fd)


class Switch:
    """Frames that wait, oldest first: all wait equally long, so that is the order in which they go on."""

    def __init__(self, taps: Sequence[int], delay_s: float, lifeline: int) -> None:
        """Make it.

        Args:
            taps: TAP devices, non-blocking; one per port.
            delay_s: What each frame waits.
            lifeline: Read end of a pipe; the switch ends with the last holder of the other end.
        """
        self._taps = taps
        self._delay_ns = round(delay_s * 1e9)
        self._lifeline = lifeline
        self._waiting: deque[tuple[int, int, bytes]] = deque()  # due, port that it came from, frame
        self._waiting_bytes = dict.fromkeys(taps, 0)
        self._port_of: dict[bytes, int] = {}  # by address of a network card, learnt from what it sends
        self._timer = _Timer()
        self.fds = [*taps, lifeline, self._timer.fd]

    def run(self) -> None:
        """Until nobody holds the lifeline."""
        with select.epoll() as poll, self._timer:
            for fd in self.fds:
                poll.register(fd, select.EPOLLIN)
            while True:
                ready = [fd for fd, _ in poll.poll()]
                if self._lifeline in ready:
                    return
                for fd in ready:
                    if fd == self._timer.fd:
                        self._timer.clear()
                    else:
                        self._take(fd)
                self._pass_on()
                self._timer.set(self._waiting[0][0] if self._waiting else 0)

    def _take(self, tap: int) -> None:
        for _ in range(_BATCH):
            try:
                frame = os.read(tap, _LARGEST_FRAME)
            except OSError:
                return  # no more for now
            size = len(frame)
            self._port_of[frame[_HEADER_BYTES + 6 : _HEADER_BYTES + 12]] = tap
            if self._waiting_bytes[tap] + size <= _MOST_WAITING_BYTES:
                self._waiting_bytes[tap] += size
                self._waiting.append((time.monotonic_ns() + self._delay_ns, tap, frame))

    def _pass_on(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic_ns():
            _, source, frame = self._waiting.popleft()
            self._waiting_bytes[source] -= len(frame)
            target = self._port_of.get(frame[_HEADER_BYTES : _HEADER_BYTES + 6])
            for tap in self._taps if target is None else (target,):
                if tap != source:
                    with contextlib.suppress(OSError):  # lost, as on any wire
                        os.write(tap, frame)


class _Timer:
    """A descriptor that becomes readable at a time; Python has it only from 3.13 on."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._library.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._at_ns = 0

    def __enter__(self) -> "_Timer":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def set(self, at_ns: int) -> None:
        """Ring once at a time of the monotonic clock; 0: never."""
        if at_ns != self._at_ns:
            self._at_ns = at_ns
            once = (ctypes.c_long * 4)(0, 0, *divmod(at_ns, 10**9))
            self._library.timerfd_settime(self.fd, _ABSOLUTE, once, None)

    def clear(self) -> None:
        """Silence it."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 8)
