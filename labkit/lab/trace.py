"""A run's steps as a trace for Perfetto or chrome://tracing: one row per worker, one block per part."""

import json
from pathlib import Path
from typing import Any

from labkit.runfolder import RunFolder, write_atomically

# In the order in which they mostly happen; parts that overlap are drawn one after the other.
_ORDER = ("data", "compute", "node", "wait", "communicate")


def trace_events(folder: RunFolder) -> list[dict[str, Any]]:
    """The steps of every worker as complete events of the Trace Event Format; times in microseconds.

    A worker's parts are laid out up to the moment at which it reported the step.
    """
    events: list[dict[str, Any]] = []
    nodes: dict[str, int] = {}
    for rank in folder.ranks():
        start = (folder.history(rank, ("start",)) or [{}])[-1]
        node = nodes.setdefault(str(start.get("node", "node")), len(nodes))
        events.append(_name("thread_name", node, rank, f"worker {rank}"))
        for step in folder.history(rank, ("step",)):
            at_us = 1e6 * (step["t"] - step["step_s"])
            for part in _ORDER:
                took_us = 1e6 * step.get(f"{part}_s", 0.0)
                if took_us > 0:
                    place = {"pid": node, "tid": rank, "ts": round(at_us, 1), "dur": round(took_us, 1)}
                    details = {"step": step["step"], "samples": step["samples"]}
                    events.append({"name": part, "cat": "step", "ph": "X", **place, "args": details})
                at_us += took_us
    return [*(_name("process_name", index, 0, name) for name, index in nodes.items()), *events]


def _name(kind: str, node: int, rank: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": node, "tid": rank, "args": {"name": name}}


def write_trace(folder: RunFolder, path: Path | None = None) -> Path:
    """Write the trace file; open it at ui.perfetto.dev or chrome://tracing, which read it locally.

    Args:
        folder: The run.
        path: Where to; default: `trace.json` in the run folder.
    """
    target = path or folder.path / "trace.json"
    write_atomically(target, json.dumps({"traceEvents": trace_events(folder), "displayTimeUnit": "ms"}))
    return target
