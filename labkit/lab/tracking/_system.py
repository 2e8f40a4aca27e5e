"""Processor, memory, disk, network and GPU of this machine, measured by MLflow's own monitor."""

import contextlib
import socket
import threading
from typing import Any

_INTERVAL_S = 2.0
_STOP_TIMEOUT_S = 5.0


class SystemMetrics:
    """Keeps MLflow's monitor running for one run. It may fail; nothing else notices."""

    def __init__(self) -> None:
        self._monitor: Any = None
        self._is_usable = True

    def keep_running(self, uri: str, run_id: str, *, is_resumed: bool) -> None:
        """Start the monitor, or start it again: it gives up at the first fault of the store."""
        if not self._is_usable or (self._monitor is not None and self._is_alive()):
            return
        try:
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._monitor = SystemMetricsMonitor(
                run_id,
                sampling_interval=_INTERVAL_S,
                resume_logging=is_resumed or self._monitor is not None,
                node_id=socket.gethostname(),
                tracking_uri=uri,
            )
            self._monitor.start()
        except Exception as fault:
            print(f"no system metrics: {type(fault).__name__}: {fault}", flush=True)
            self._is_usable = False

    def stop(self) -> None:
        """Stop it and send its last sample; it gets a few seconds for that."""
        if self._monitor is None:
            return
        stopper = threading.Thread(target=self._finish, name="labkit-system", daemon=True)
        stopper.start()
        stopper.join(_STOP_TIMEOUT_S)
        self._monitor = None

    def _is_alive(self) -> bool:
        thread = self._monitor._process  # the monitor has no public way to ask
        return thread is not None and thread.is_alive()

    def _finish(self) -> None:
        with contextlib.suppress(Exception):
            self._monitor.finish()
