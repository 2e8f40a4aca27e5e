"""The process that holds a standing cluster: `python -m labkit.launch.emulation.holder NAME < cluster.json`.

It builds the network, says on its standard output how that went, and then does nothing until SIGTERM.
"""

import json
import os
import signal
import sys
import time

from labkit.config import ClusterConfig
from labkit.errors import LabkitError
from labkit.launch.emulation.builder import build
from labkit.launch.emulation.record import record_of
from labkit.launch.emulation.standing import StandingRecord, state_file
from labkit.runfolder import write_atomically


def main() -> None:
    """Leave the process that was started, whose parent waits for it, and go on as a child of init."""
    name, cluster = sys.argv[1], ClusterConfig.model_validate_json(sys.stdin.read())
    if os.fork():
        os._exit(0)
    os.chdir("/")  # no file system is kept busy
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    file = state_file(name)
    try:
        _stand(name, cluster)
        _answer("")
        while True:
            signal.pause()
    except LabkitError as error:
        _answer(str(error))
    finally:
        file.unlink(missing_ok=True)


def _stand(name: str, cluster: ClusterConfig) -> None:
    emulation = build(cluster)
    emulation.name = name
    record = StandingRecord(
        name=name, cluster=cluster, emulation=record_of(emulation), started_at=time.time()
    )
    write_atomically(state_file(name), record.model_dump_json(indent=1))


def _answer(error: str) -> None:
    print(json.dumps({"error": error}), flush=True)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)


if __name__ == "__main__":
    main()
