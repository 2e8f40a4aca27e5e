"""Start, watch and stop workers: here, or on several machines. Importing this imports no torch."""

from labkit.launch.forkserver import warm_up
from labkit.launch.handle import Run, attach
from labkit.launch.reap import is_unresponsive, reap
from labkit.launch.start import resume, start

__all__ = ["Run", "attach", "is_unresponsive", "reap", "resume", "start", "warm_up"]
