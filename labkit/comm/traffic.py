"""What a worker's node has sent and what its memory holds, from the kernel's own counters (Linux)."""

import os
from pathlib import Path


def sent_bytes() -> int | None:
    """Bytes that have left over the interface that gloo uses; None when that is loopback or not known.

    It counts the whole machine's (or emulated node's) traffic there, so one worker per node reports it.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if interface.startswith("lo"):
        return None
    try:
        lines = Path("/proc/self/net/dev").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    return None


def resident_bytes() -> int | None:
    """This process's proportional set size: private pages, and shared ones by their share."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("Pss:")), None)
    return 1024 * int(found.split()[1]) if found else None
