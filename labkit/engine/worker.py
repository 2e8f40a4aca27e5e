"""What a worker process does: join the others, train, and say truthfully how it ended."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit.cluster.placement import Placement, placements
from labkit.comm import PeerError, Rendezvous, join
from labkit.engine import quota
from labkit.engine.events import EventLog
from labkit.engine.hybrid import GroupPlace, HybridTrainer
from labkit.engine.max_batch import BatchSearch
from labkit.engine.probe import Probe
from labkit.engine.train import Trainer
from labkit.engine.uplink_probe import probe_uplinks
from labkit.errors import ConfigError
from labkit.processes import die_with_parent
from labkit.runfolder import RunFolder, write_atomically

EXIT_STOPPED = 143


@dataclass(frozen=True)
class WorkerTask:
    """All that a worker needs to know beside its run folder.

    Attributes:
        folder: The run folder.
        rank: Global rank.
        rendezvous: Where workers meet.
        attempt: 1, and one more after every resume or restart.
        import_paths: Folders of the user's own modules.
        remark: What readers of the run's figures must know of the network; "" for nothing.
        num_here: Workers of the run on this machine, which share its cores.
        quota: Control group that gives it its share of a processor; "" for none.
        group: Its group and the servers, under an asynchronous strategy.
    """

    folder: str
    rank: int
    rendezvous: Rendezvous
    attempt: int
    import_paths: tuple[str, ...] = ()
    remark: str = ""
    num_here: int = 1
    quota: str = ""
    group: GroupPlace | None = None


def redirect_output(folder: RunFolder, rank: int) -> None:
    """Send stdout and stderr of this process to its log files."""
    for path, stream in zip(folder.log_files(rank), (sys.stdout, sys.stderr), strict=True):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        stream.flush()
        os.dup2(handle, 1 if stream is sys.stdout else 2)
        os.close(handle)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def run_worker(task: WorkerTask) -> int:
    """Run one worker to its end.

    Returns:
        Exit code: 0 trained to the end or stopped because another worker wanted to, 143 stopped by a
        signal of its own, 2 bad input, 1 any other fault. Faults leave `errors/rankNNNN.json`.
    """
    folder = RunFolder(task.folder)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the supervisor, which decides
    folder.error_file(task.rank).unlink(missing_ok=True)
    keep_alive(folder.alive_file(task.rank))
    sys.path[:0] = [path for path in task.import_paths if path not in sys.path]
    try:
        if task.quota:
            quota.enter(task.quota)
        _work(folder, task, stop)
    except BaseException as error:
        _record(folder, task, error)
        return error.exit_code if isinstance(error, ConfigError) else 1
    return EXIT_STOPPED if stop.is_set() else 0


def _work(folder: RunFolder, task: WorkerTask, stop: threading.Event) -> None:
    config = folder.read_config()
    placement = placements(config.cluster)[task.rank]
    device = choose_device(placement)
    torch.set_num_threads(quota.num_threads(config.engine, task.num_here))
    log = EventLog(folder.events_file(task.rank), task.attempt)
    if task.remark and task.rank == 0:
        log.write("message", text=task.remark)
    ranks = task.group.ranks if task.group else range(placement.world_size)
    comm = join(
        task.rendezvous,
        rank=ranks.index(task.rank),
        world_size=len(ranks),
        device_type=device.type,
        start_timeout_s=config.launch.start_timeout_s,
        comm_timeout_s=config.launch.comm_timeout_s,
    )
    try:
        if config.launch.purpose == "probe":
            Probe(config, placement, comm, log, folder, device=device, is_stop_wanted=stop.is_set).run()
        elif config.launch.purpose == "links":
            probe_uplinks(config, placement, comm, log, folder, device)
        elif config.launch.purpose == "max_batch":
            BatchSearch(config, placement, comm, log, folder, device).run()
        elif task.group is not None:
            HybridTrainer(
                config, placement, comm, log, folder, task.group, device=device, is_stop_wanted=stop.is_set
            ).train()
        else:
            trainer = Trainer(config, placement, comm, log, folder, device=device, is_stop_wanted=stop.is_set)
            trainer.resume()  # a fresh folder has no checkpoint: then this does nothing
            trainer.train()
        comm.barrier()  # nobody leaves while another still needs it
    finally:
        comm.close()
        log.close()


def choose_device(placement: Placement) -> torch.device:
    """The device of a worker. `auto` is a GPU of its own when the node has enough, else the CPU.

    Raises:
        ConfigError: the named device is not there.
    """
    name = placement.device
    num_gpus = torch.cuda.device_count()
    if name == "auto":
        name = f"cuda:{placement.local_rank}" if num_gpus >= placement.local_world_size else "cpu"
    elif name == "cuda":
        name = f"cuda:{placement.local_rank}"
    device = torch.device(name)
    if device.type == "cuda":
        if (device.index or 0) >= num_gpus:
            raise ConfigError(
                f"device of worker {placement.rank} must be one of this node's {num_gpus} GPUs, got "
                f"{name!r}. Use device: cpu, or fewer workers on {placement.node}."
            )
        torch.cuda.set_device(device)
    return device


def keep_alive(path: Path, interval_s: float = 1.0) -> None:
    """Touch a file once a second for as long as this process can run at all (a stopped one can't)."""

    def beat() -> None:
        while True:
            try:
                os.utime(path)
            except OSError:
                pass  # a full disk is not death; the supervisor sees the age
            time.sleep(interval_s)

    path.write_text(str(os.getpid()))
    threading.Thread(target=beat, name="labkit-alive", daemon=True).start()


def _record(folder: RunFolder, task: WorkerTask, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    message = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    is_peer_failure = isinstance(error, PeerError)
    write_error(folder, task.rank, task.attempt, message, text, is_peer_failure=is_peer_failure)


def write_error(
    folder: RunFolder, rank: int, attempt: int, message: str, text: str, *, is_peer_failure: bool
) -> None:
    """Write `errors/rankNNNN.json`, from which the supervisor finds the root cause."""
    content = {
        "t": time.time(),
        "rank": rank,
        "attempt": attempt,
        "message": next(iter(message.splitlines()), "failed"),
        "traceback": text,
        "is_peer_failure": is_peer_failure,
    }
    try:
        write_atomically(folder.error_file(rank), json.dumps(content, indent=1))
    except OSError as fault:
        print(f"the error file could not be written: {fault}", file=sys.stderr, flush=True)


def main() -> None:
    """Entry of a worker that the elastic agent started: `python -m labkit.engine.worker`."""
    die_with_parent(os.getppid())
    folder = RunFolder(os.environ["LABKIT_RUN"])
    where = (int(os.environ["LABKIT_NODE_INDEX"]), int(os.environ["LOCAL_RANK"]))
    places = placements(folder.read_config().cluster)
    rank = next(place.rank for place in places if (place.node_index, place.local_rank) == where)
    redirect_output(folder, rank)
    task = WorkerTask(
        folder=str(folder.path),
        rank=rank,
        # Each rendezvous round has a new MASTER_PORT, the same on all nodes, though torch counts restarts
        # per node: it names the generation, whose keys never mix with those of the dead one.
        rendezvous=Rendezvous(
            os.environ["LABKIT_STORE_HOST"],
            int(os.environ["LABKIT_STORE_PORT"]),
            f"generation/{os.environ['LABKIT_ATTEMPT']}/{os.environ['MASTER_PORT']}",
        ),
        attempt=int(os.environ["LABKIT_ATTEMPT"]) + int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        import_paths=tuple(filter(None, os.environ["LABKIT_IMPORT_PATHS"].split(os.pathsep))),
        remark=os.environ["LABKIT_REMARK"],
        num_here=int(os.environ["LABKIT_NUM_HERE"]),
        quota=os.environ["LABKIT_QUOTAS"].split(os.pathsep)[where[1]],
    )
    code = run_worker(task)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
