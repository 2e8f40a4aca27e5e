"""A disk as slow as many are: this machine's own, throttled by a control group."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
# The base rate of a network volume of a large cloud (AWS gp3): what a new machine there has.
BYTES_PER_S = 125 * 2**20
REQUESTS_PER_S = 3000


@contextlib.contextmanager
def throttled_disk(folder: Path) -> Iterator[tuple[Callable[[], None], str]]:
    """Make a control group whose processes read slowly from the disk of a folder.

    Yields:
        What a process calls to join it, and a remark on what was done, or why nothing was.
    """
    device = _device_of(folder)
    group = _make_group() if device else None
    if device is None or group is None:
        what = "the folder is on no disk" if device is None else "needs root and the cgroup io controller"
        yield (lambda: None), f"the disk was not throttled ({what}): cold figures are of this machine's own"
        return
    try:
        if (group / "io.max").exists():
            (group / "io.max").write_text(f"{device} rbps={BYTES_PER_S} riops={REQUESTS_PER_S}")
        else:
            (group / "blkio.throttle.read_bps_device").write_text(f"{device} {BYTES_PER_S}")
            (group / "blkio.throttle.read_iops_device").write_text(f"{device} {REQUESTS_PER_S}")

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        yield (
            join,
            f"the disk was throttled to {BYTES_PER_S // 2**20} MiB/s and {REQUESTS_PER_S} requests a second "
            "for all sides alike (control group): this machine's own is too fast to show the difference",
        )
    finally:
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def _device_of(folder: Path) -> str | None:
    """MAJOR:MINOR of the whole disk under a folder."""
    number = folder.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    node = Path("/sys/dev/block") / name
    if not node.exists():
        return None
    if (node / "partition").exists():
        return (node.resolve().parent / "dev").read_text().strip()
    return name


def _make_group() -> Path | None:
    for root in (_ROOT / "blkio", _ROOT):
        if root.name == "blkio" and not root.is_dir():
            continue
        group = root / f"labkit-disk-{os.getpid()}"
        with contextlib.suppress(OSError):
            if root == _ROOT:
                (root / "cgroup.subtree_control").write_text("+io")
            group.mkdir()
            return group
    return None
