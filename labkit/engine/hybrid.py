"""Training in groups: synchronous inside, asynchronous between them through the parameter servers.

After Kim et al. 2020 (abstract): hybrid aggregation, a server on every node, large mini-batches,
communication beside compute. What is pushed, when, and how it is applied is our own choice; see
`labkit.sync.ledger`.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from labkit.cluster.placement import Placement, placements
from labkit.comm import Arena, Communicator, Rendezvous, Secret, StoreClient, padded_bytes
from labkit.config import AsyncConfig, ExperimentConfig
from labkit.data.sampler import Indices, own_part
from labkit.engine.device import to_device
from labkit.engine.events import EventLog
from labkit.engine.server import flat_buffers, set_buffers, wait_for_address
from labkit.engine.server_link import ServerLink, Taken
from labkit.engine.train import Progress, Trainer
from labkit.runfolder import RunFolder
from labkit.sync import StepTotals, Strategy
from labkit.sync.group_sum import GroupSum
from labkit.sync.ledger import Extent
from labkit.sync.server_shard import shard_borders, trained
from labkit.tasks import StreamedSamples

_CARE = 1.5  # a fetch may take so many times as long as lately
_MARGIN_S = 0.005
_WHAT = ("extent", "evaluate", "done", "stop", "gone")


@dataclass(frozen=True)
class GroupPlace:
    """A worker's group and how to reach the servers.

    Attributes:
        group: Which group.
        ranks: Its workers; the first one talks to the servers.
        servers: The store with the servers' addresses.
        num_servers: Servers.
        secret: The run's, as text.
    """

    group: int
    ranks: tuple[int, ...]
    servers: Rendezvous
    num_servers: int
    secret: str


class HybridTrainer(Trainer):
    """One worker of a group."""

    def __init__(
        self,
        config: ExperimentConfig,
        placement: Placement,
        comm: Communicator,
        log: EventLog,
        folder: RunFolder,
        place: GroupPlace,
        *,
        device: torch.device,
        is_stop_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load the data and build the model; the first worker of the group joins the servers.

        Args:
            config: The experiment; its strategy is an asynchronous one.
            placement: Where this worker runs.
            comm: The group.
            log: This worker's events.
            folder: The run folder.
            place: Its group and the servers.
            device: Where to compute.
            is_stop_wanted: This worker wants to stop.

        Raises:
            PeerError: a server did not come.
        """
        assert isinstance(config.sync, AsyncConfig)
        self._sync, self._group = config.sync, place
        super().__init__(config, placement, comm, log, folder, device=device, is_stop_wanted=is_stop_wanted)
        self.local_batch_sizes = [self.plan.local_batch_sizes[rank] for rank in place.ranks]
        self.micro_batch_sizes = [self.plan.micro_batch_sizes[rank] for rank in place.ranks]
        self._is_overlapped = config.sync.is_overlapped and config.sync.staleness_bound != 0
        # Takes are shared in the group beside its gradient sums, by collectives of their own.
        self._side = comm.duplicate() if self._is_overlapped else comm
        self._next: Future[Taken] | None = None
        self._compute_s = self._fetch_s = 0.0  # what both took lately
        self._has_statistics = False
        self._epoch = 0  # of what is computed on
        self._sampler_ahead = self._make_sampler()  # of the thread that fetches
        self._slots = self._shared_slots()
        self._link = self._connect() if comm.rank == 0 else None

    def _build_strategy(self) -> Strategy:
        self._group_sum = GroupSum(
            self.model, self.comm, clip_norm=self.config.engine.clip_norm, clock=self._clock
        )
        return self._group_sum

    def _connect(self) -> ServerLink:
        launch, place = self.config.launch, self._group
        store = StoreClient(place.servers.host, place.servers.port, launch.start_timeout_s)
        addresses = [
            wait_for_address(store, place.servers, index, launch.start_timeout_s)
            for index in range(place.num_servers)
        ]
        sizes = [parameter.numel() for parameter in trained(self.model)]
        borders = shard_borders(sizes, place.num_servers)
        return ServerLink(
            addresses,
            Secret.from_text(place.secret),
            place.group,
            [sum(sizes[:border]) for border in borders],
            timeout_s=launch.comm_timeout_s,
            heartbeat_s=self._sync.heartbeat_timeout_s / 4,
        )

    def resume(self) -> None:
        """The servers know where the run stands: at which step, for what this worker says of itself."""
        step = torch.tensor([self._link.step if self._link else 0], device=self.device)
        self.comm.broadcast_(step)
        self.progress = Progress(step=int(step))

    def train(self) -> bool:
        """Compute what the coordinator gives out, until there is no more.

        Returns:
            Whether the run got to its end.

        Raises:
            PeerError: a worker of the group or a server is gone.
        """
        try:
            self.resume()
            self._say_start()
            sent_before = self._node_sent_bytes()
            what = self._work()
            self._say_slow_readers()
            self._say_memory()
        finally:
            self.close()
            if self._link is not None:
                self._link.close()
        self._take_costs(sent_before)
        if self.pace.remark():
            self.log.write("message", text=self.pace.remark())
        self._say_end()
        return what == "done"

    def _work(self) -> str:
        while True:
            began_at = time.perf_counter()
            taken = self._take()
            waited_s = time.perf_counter() - began_at
            if not self._has_statistics:
                self._take_statistics(taken)
            if taken.is_evaluated:
                self._evaluate_taken(taken)
            if taken.extent is not None:
                totals = self._compute_taken(taken, began_at, waited_s)
                if totals.is_stop_wanted:
                    return self._leave("stop")
            elif taken.what == "gone":
                raise RuntimeError("the coordinator gave this group up: it was silent for too long")
            elif taken.what != "evaluate":
                return self._leave(taken.what)

    def _leave(self, what: str) -> str:
        if self._link is not None:
            self._link.leave()
        if self._next is not None:
            self._next.result()  # nobody goes while another waits for what this one shares
        return what

    # --- take and push -----------------------------------------------------------------------------------

    def _take(self) -> Taken:
        """What to do next, with the parameters in place; what comes after it is fetched meanwhile."""
        if self._link is not None and not self._is_overlapped:
            self._link.settle()
        taken = self._next.result() if self._next is not None else self._fetch_next()
        self._next = None
        if taken.parameters is not None:
            self._group_sum.parameters.copy_(taken.parameters)
        if self._is_overlapped and taken.extent is not None:
            self._next = _in_background(self._fetch_in_time)
        return taken

    def _fetch_in_time(self) -> Taken:
        """Fetch so that it is done when the computing that goes on now is, and not much before.

        What is pulled later knows more of the others' pushes, and of this group's own.
        """
        if self._link is not None:
            time.sleep(max(0.0, self._compute_s - _CARE * self._fetch_s - _MARGIN_S))
        began_at = time.perf_counter()
        taken = self._read_ahead(self._fetch_next())
        self._fetch_s = _smoothed(self._fetch_s, time.perf_counter() - began_at)
        return taken

    def _shared_slots(self) -> Iterator[Tensor] | None:
        """Memory of the group, in turn, into which its first worker pulls; None where it has no common node.

        Two places are enough: whoever pulls again has ended a step that every worker of the group could only
        end after it had taken what was pulled the time before.
        """
        places = placements(self.config.cluster)
        nodes = {places[rank].node for rank in self._group.ranks}
        if self.comm.world_size == 1 or len(nodes) > 1:
            return None
        own = self._group_sum.parameters
        arena = Arena(self.comm, 2 * padded_bytes(len(own), own.dtype))
        return itertools.cycle([arena.tensor(len(own), own.dtype) for _ in range(2)])

    def _fetch_next(self) -> Taken:
        """Ask the servers, and let the whole group know; all its workers do so together."""
        slot = next(self._slots) if self._slots is not None else None
        taken = self._link.take(slot).result() if self._link is not None else Taken("stop")
        if self.comm.world_size == 1:
            return taken
        taken = self._share(taken)
        if taken.what not in ("extent", "evaluate"):
            return taken
        parameters, buffers = taken.parameters, taken.buffers
        if parameters is None or buffers is None:
            parameters = torch.empty_like(self._group_sum.parameters, device="cpu") if slot is None else slot
            buffers = torch.empty_like(flat_buffers(self.model))
        if slot is None:
            self._side.broadcast_(parameters)
        if len(buffers):
            self._side.broadcast_(buffers)
        return replace(taken, parameters=parameters, buffers=buffers)

    def _share(self, taken: Taken) -> Taken:
        """Say in the group what was taken, but for tensors; seconds travel as microseconds."""
        extent = taken.extent or Extent(0, 0, 0, 0, 0)
        numbers = [_WHAT.index(taken.what), taken.number, int(taken.is_evaluated), taken.step, taken.samples]
        numbers += [round(1e6 * taken.pull_s), taken.extent is not None, *astuple(extent)]
        packed = torch.tensor(numbers, dtype=torch.int64)
        self._side.broadcast_(packed)
        what, number, is_evaluated, step, samples, pull_us, has_extent, *rest = packed.tolist()
        own = Extent(*rest) if has_extent else None
        return replace(
            taken,
            what=_WHAT[what],
            number=number,
            extent=own,
            is_evaluated=bool(is_evaluated),
            step=step,
            samples=samples,
            pull_s=pull_us / 1e6,
        )

    def _compute_taken(self, taken: Taken, began_at: float, waited_s: float) -> StepTotals:
        extent = taken.extent
        assert extent is not None
        self._step_began_at = began_at
        self._epoch = extent.epoch
        batch = self.sampler.part(extent.epoch, extent.start, extent.stop)
        data_s, samples = self._compute(batch)
        totals = self.strategy.end_step(0.0)
        self._batch_size = len(batch)
        self.progress = Progress(taken.step + 1, self.progress.samples + len(batch))
        fetched_s = min(waited_s, taken.pull_s)
        _, parts_s = self._say_step(totals, data_s, samples, fetched_s=fetched_s, held_s=waited_s - fetched_s)
        self._compute_s = _smoothed(self._compute_s, time.perf_counter() - began_at - waited_s)
        with self._group_sum.merged_buffers():
            buffers = flat_buffers(self.model)
        if self._link is not None:
            figures = {"loss_sum": totals.loss_sum, "accuracy_sum": totals.accuracy_sum, "parts_s": parts_s}
            self._link.push(extent.number, self._group_sum.gradient(), figures, buffers)
        return totals

    def _comm_places(self) -> list[Placement]:
        places = placements(self.config.cluster)
        return [places[rank] for rank in self._group.ranks]

    def _fetch_training(self, piece: Indices) -> tuple[Tensor, Tensor, float]:
        """Read what is given out: it can't be known long before, but reading has begun when it came."""
        train = self.data.train
        if not isinstance(train, StreamedSamples) or len(piece) == 0:
            return self._fetch(train, piece)
        began_at = time.perf_counter()
        inputs, targets = to_device(train.batch_at(self._epoch, piece), self.device, self.dtype)
        return inputs, targets, time.perf_counter() - began_at

    def _read_ahead(self, taken: Taken) -> Taken:
        """Begin to read what will be computed next."""
        train, extent = self.data.train, taken.extent
        if extent is not None and isinstance(train, StreamedSamples):
            batch = self._sampler_ahead.part(extent.epoch, extent.start, extent.stop)
            train.ahead(train.extents_of(own_part(batch, self.local_batch_sizes, self.comm.rank)))
        return taken

    def _take_statistics(self, taken: Taken) -> None:
        """Begin with the running statistics of all groups: this one may have come late, or again."""
        if taken.buffers is not None:
            set_buffers(self.model, taken.buffers)
            self._has_statistics = True

    def _evaluate_taken(self, taken: Taken) -> None:
        """Evaluate the parameters and running statistics that came along."""
        assert taken.buffers is not None
        own = flat_buffers(self.model)
        set_buffers(self.model, taken.buffers)
        with torch.no_grad():
            values = self._evaluate()
        set_buffers(self.model, own)
        if self._link is not None:
            self._link.evaluated(values, taken)


def _smoothed(old: float, new: float) -> float:
    """A mean that forgets; a longer time counts at once, a shorter one slowly."""
    return new if new > old else 0.8 * old + 0.2 * new


def _in_background(function: Callable[[], Taken]) -> "Future[Taken]":
    """Run a function in a thread that keeps no process alive: it may wait for a worker that is gone."""
    future: Future[Taken] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="labkit-fetch", daemon=True).start()
    return future
