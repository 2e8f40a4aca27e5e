"""What a worker tells the world: one JSON object a line, appended to its own file.

Every event has `t` (seconds since 1970), `kind` and `attempt`. Kinds:

    start       rank, node, local_rank, pid, host, device, world_size, num_params, total_steps,
                start_step, local_batch_size
    step        step, samples (this worker's), step_s and its parts data_s, compute_s,
                node_s (sums inside the node), communicate_s, wait_s        every worker, every step
    metrics     step, epoch, samples (trained on so far, all workers), values {name: number}
                                                                            rank 0, every step
    eval        step, epoch, samples, values {"val/loss": ..., "val/accuracy": ...}       rank 0
    checkpoint  step, file, size_bytes, save_s                                            rank 0
    shares      step (the last one with the old ones), values {"shares/rank00": local batch size, ...}: the
                rebalancer changed them                                                   rank 0
    staleness   step, counts {staleness: pushes so far}, repeated (pushes that came again), dropped (that a
                lost group had under way), refused {reason: messages}; by the coordinator of the
                parameter servers, after every evaluation and in the end          rank 0
    message     text                                                        anything worth a line
    end         step, resident_bytes, node_sent_bytes (by the first worker of each node, over its link);
                both right after the last step, before the evaluation and the checkpoint that follow it

Names in `values`: train/loss, train/accuracy, val/loss, val/accuracy, optim/learning_rate,
perf/samples_per_s, perf/step_ms, perf/compute_ms, perf/node_ms, perf/communicate_ms, perf/wait_ms,
perf/data_ms (means over workers; under an asynchronous strategy over pushes). There also async/staleness
(mean since the last event), async/pushes, async/dropped, async/repeated and async/groups (that are here),
and a worker's `step` is the global batch that was under way when it got its samples: it may have several of
one number. A number that is not finite is written as null and named in `nonfinite`:
{"train/loss": "nan"}.
"""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from labkit.cluster.placement import Placement


class EventLog:
    """Appends events to one file. A line is one write, so a reader sees whole lines or none."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. Values must be JSON; numbers in `values` may be non-finite."""
        values = fields.get("values")
        if values is not None:
            bad = {name: str(v) for name, v in values.items() if not math.isfinite(v)}
            if bad:
                fields["values"] = {n: (None if n in bad else v) for n, v in values.items()}
                fields["nonfinite"] = bad
        event = {"t": round(time.time(), 4), "kind": kind, "attempt": self._attempt, **fields}
        line = json.dumps(event, separators=(",", ":"), allow_nan=False) + "\n"
        os.write(self._fd, line.encode())

    def start(self, place: Placement, device: str, **fields: Any) -> None:
        """Append the `start` event of a worker: its place, and what else there is to say."""
        self.write(
            "start",
            rank=place.rank,
            node=place.node,
            local_rank=place.local_rank,
            world_size=place.world_size,
            device=device,
            **fields,
        )

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
