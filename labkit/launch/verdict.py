"""Why a run ended: the root cause among all that went wrong in its wake."""

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.cluster.placement import Placement
from labkit.engine.server import EXIT_PEER_LOST
from labkit.launch.launcher import Exit
from labkit.runfolder import RunError


def root_cause(
    exits: Sequence[Exit], errors: Mapping[int, Mapping[str, Any]], places: Sequence[Placement]
) -> RunError:
    """Find the worker that failed for a reason of its own.

    When one worker dies, its peers fail a moment later because they can't reach it, and often report
    first. So: a worker killed by a signal comes before one that raised, one that raised for itself
    before one that was told to stop, and a failure for a peer's sake comes last. A server without which all
    workers are lost comes before what they say.

    Args:
        exits: Ended workers with codes other than 0 that nobody asked to stop.
        errors: Content of the error files, by rank.
        places: Of all workers, by rank.
    """
    for end in sorted((e for e in exits if e.code < 0 and e.rank is not None), key=lambda e: e.rank or 0):
        return _error(end.rank, places, signal_text(-end.code), "")
    for end in sorted((e for e in exits if e.name), key=lambda e: (e.code >= 0, e.code == EXIT_PEER_LOST)):
        what = signal_text(-end.code) if end.code < 0 else f"ended with exit code {end.code}"
        told = {143: "was ended by SIGTERM", EXIT_PEER_LOST: "lost another server"}
        return RunError(message=f"{end.name} {told.get(end.code, what)}")
    own = [error for error in errors.values() if not error.get("is_peer_failure")]
    for error in sorted(own, key=lambda e: float(e.get("t", 0))):
        return _error(int(error["rank"]), places, str(error["message"]), str(error["traceback"]))
    for end in exits:
        if end.code == 143:
            return _error(end.rank, places, "was ended by SIGTERM", "")
    for error in sorted(errors.values(), key=lambda e: float(e.get("t", 0))):
        return _error(int(error["rank"]), places, str(error["message"]), str(error["traceback"]))
    for end in exits:
        return _error(end.rank, places, f"ended with exit code {end.code}", "")
    return RunError(message="the run ended without a reason; see the logs")


def is_for_peers_sake(exits: Sequence[Exit], errors: Mapping[int, Mapping[str, Any]]) -> bool:
    """Everything that went wrong here went wrong because a worker or server elsewhere was gone."""
    if any(end.code < 0 and end.rank is not None for end in exits):
        return False
    servers = [end.code for end in exits if end.name]
    if any(code != EXIT_PEER_LOST for code in servers):
        return False
    return bool(errors or servers) and all(error.get("is_peer_failure") for error in errors.values())


def signal_text(number: int) -> str:
    """What to say of a process that a signal killed."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = " (out of memory, or killed by hand)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _error(rank: int | None, places: Sequence[Placement], what: str, traceback: str) -> RunError:
    if rank is None:
        return RunError(message=what, traceback=traceback)
    node = places[rank].node
    text = what if what.startswith(("was ", "ended ", "showed ")) else f"failed: {what}"
    return RunError(message=f"worker {rank} on {node} {text}", rank=rank, node=node, traceback=traceback)
