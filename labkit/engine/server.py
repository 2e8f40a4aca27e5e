"""A process of the asynchronous parameter server: one on each node, each with its part of the parameters.

The first one is also the coordinator: it keeps the `Ledger`, decides what is applied in which order, logs and
saves. To the others it sends its decisions over one connection, which keeps their order; they carry them out
one by one. A pull is such a decision too: "give this group your part as it is now". So all parts of a pull
are of one version, though no server ever waits for another.

Messages from groups (all numbers are counted by the ledger; `life` is the coordinator's answer to join, so
that nothing that a lost group had sent counts for the one that came in its place):

    join     group                                  to the coordinator; a group is here, maybe again
    take     group, life                            what to do next: an extent, wait, done, stop or gone
    pull     group, number                          to every server: its part, as of the answer to `take`
    stage    group, number; mean gradient           to every server: its part
    commit   group, life, number, figures; buffers  answered when it is applied, or not needed any more
    beat     group, life                            still there
    eval     group, life, values, step, samples     what an evaluation found
    leave    group, life                            it goes; what it had under way is given to others

and from the coordinator to the other servers: apply, deliver, drop, state, quit.
"""

import contextlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labkit.cluster.plan import make_plan
from labkit.comm import (
    Message,
    MessageClient,
    MessageServer,
    PeerError,
    Rendezvous,
    Secret,
    StoreClient,
    address_towards,
)
from labkit.config import AsyncConfig, ExperimentConfig
from labkit.engine import checkpoint
from labkit.engine.events import EventLog
from labkit.engine.random_state import seed_everything
from labkit.errors import ConfigError, LabkitError
from labkit.optim.build import build_optimizer
from labkit.optim.schedule import learning_rate_at
from labkit.runfolder import RunFolder
from labkit.sync.ledger import Extent, Ledger, Push, Update
from labkit.sync.server_shard import Key, ServerShard, flat_parameters, shard_borders, trained
from labkit.tasks import build_model, load_data

_POLL_S = 0.2
_GOODBYE_S = 5.0
EXIT_STOPPED = 143
EXIT_PEER_LOST = 69  # EX_UNAVAILABLE of sysexits.h


@dataclass(frozen=True)
class ServerTask:
    """All that a server needs to know beside its run folder.

    Attributes:
        folder: The run folder.
        index: Which server; 0 is the coordinator.
        num_servers: All of them.
        rendezvous: The store in which their addresses stand.
        secret: The run's, as text.
        attempt: 1, and one more after every resume or restart.
        import_paths: Folders of the user's own modules.
    """

    folder: str
    index: int
    num_servers: int
    rendezvous: Rendezvous
    secret: str
    attempt: int
    import_paths: tuple[str, ...] = ()


def address_key(rendezvous: Rendezvous, index: int) -> str:
    """Where a server's address stands in the store."""
    return f"{rendezvous.generation}/server{index}"


def given_up_key(rendezvous: Rendezvous, group: int) -> str:
    """Set in the store for a group that will never come (again)."""
    return f"{rendezvous.generation}/given_up{group}"


def wait_for_address(store: StoreClient, rendezvous: Rendezvous, index: int, timeout_s: float) -> str:
    """A server's address, as soon as it is known.

    Raises:
        PeerError: it did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        address = store.get(address_key(rendezvous, index))
        if address is not None:
            return address
        if time.monotonic() > deadline:
            raise PeerError(f"server {index} did not come within {timeout_s:g} s")
        time.sleep(0.02)


def message_limit(model: nn.Module) -> int:
    """Bytes that a message about this model may have."""
    tensors = [*model.parameters(), *model.buffers()]
    return 4 * sum(tensor.numel() * 8 for tensor in tensors) + 2**20


def run_server(task: ServerTask) -> int:
    """Serve until the coordinator ends the run. The supervisor sees a fault as the end of the process.

    Returns:
        Exit code: 0 when the run is done, 143 when the coordinator was told to stop before, 69 when another
        server or the store is gone.
    """
    try:
        return _serve(task)
    except PeerError:
        traceback.print_exc()
        return EXIT_PEER_LOST


def _serve(task: ServerTask) -> int:
    folder = RunFolder(task.folder)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:0] = [path for path in task.import_paths if path not in sys.path]
    config = folder.read_config()
    torch.set_num_threads(1)
    data = load_data(config.data)
    data.close()
    seed_everything(config.seed, "model")
    model = build_model(config.model, data.info).to(getattr(torch, config.engine.dtype))
    secret = Secret.from_text(task.secret)
    host = address_towards(task.rendezvous.host)
    with contextlib.ExitStack() as stack:
        messages = MessageServer(host, secret, max_bytes=message_limit(model))
        stack.callback(messages.close)
        store = StoreClient(task.rendezvous.host, task.rendezvous.port, config.launch.start_timeout_s)
        store.put(address_key(task.rendezvous, task.index), messages.address)
        borders = shard_borders([p.numel() for p in trained(model)], task.num_servers)
        first, last = borders[task.index : task.index + 2]
        if task.index > 0:
            Server(messages, ServerShard(model, config.optimizer, first, last)).serve()
            return 0
        others = []
        for index in range(1, task.num_servers):
            address = wait_for_address(store, task.rendezvous, index, config.launch.start_timeout_s)
            others.append(MessageClient(address, secret, timeout_s=config.launch.comm_timeout_s))
            stack.callback(others[-1].close)
        log = EventLog(folder.events_file(0), task.attempt)
        stack.callback(log.close)
        is_given_up = lambda group: store.get(given_up_key(task.rendezvous, group)) is not None  # noqa: E731
        is_done = Coordinator(
            config, messages, model, (first, last), others, log, folder, len(data.train), stop.is_set,
            is_given_up,
        ).run()  # fmt: skip
        return 0 if is_done else EXIT_STOPPED


class Server:
    """One part of the parameters, and what is staged and asked for."""

    def __init__(self, messages: MessageServer, shard: ServerShard) -> None:
        self._messages = messages
        self.shard = shard
        self._ready: dict[Key, Tensor] = {}  # parts that were decided on but not asked for yet
        self._asked: dict[Key, Message] = {}  # the other way round

    def serve(self) -> None:
        """Until the coordinator says quit."""
        while True:
            for message in self._messages.poll(_POLL_S):
                if message.kind == "quit":
                    self._messages.reply(message)
                    self._messages.poll(0.0)
                    return
                self.handle(message)

    def handle(self, message: Message) -> None:
        """Do what one message asks; refuse what makes no sense."""
        try:
            self._handle(message)
        except (KeyError, ValueError, TypeError, RuntimeError, ConfigError) as error:
            self._messages.refuse(message, "content", f"{message.kind} could not be done: {error!r}")

    def _handle(self, message: Message) -> None:
        header = message.header
        if message.kind == "stage":
            (gradient,) = message.tensors
            if gradient.shape != (len(self.shard),) or gradient.dtype != self.shard.dtype:
                raise ValueError(
                    f"gradient must have {len(self.shard)} elements of {self.shard.dtype}, got "
                    f"{tuple(gradient.shape)} of {gradient.dtype}"
                )
            self.shard.stage(_key(header), gradient)
            self._messages.reply(message)
        elif message.kind == "pull":
            key = _key(header)
            if key in self._ready:
                self._messages.reply(message, {}, [self._ready.pop(key)])
            else:
                self._asked[key] = message
        elif message.kind == "apply":
            pushes = [((group, number), weight) for group, number, weight in header["pushes"]]
            self.shard.apply(pushes, header["learning_rate"])
            self._messages.reply(message)
        elif message.kind == "deliver":
            self.deliver(_key(header))
            self._messages.reply(message)
        elif message.kind == "drop":
            self.drop(int(header["group"]))
            self._messages.reply(message)
        elif message.kind == "state":
            names, tensors = self.shard.state()
            self._messages.reply(message, {"names": names}, [self.shard.read(), *tensors])
        elif message.kind == "load":
            parameters, *tensors = message.tensors
            self.shard.load(parameters, named_state(header["names"], tensors))
            self._messages.reply(message)
        else:
            raise ValueError(f"unknown kind {message.kind!r}")

    def deliver(self, key: Key) -> None:
        """Give a group this part as it is now."""
        part = self.shard.read()
        message = self._asked.pop(key, None)
        if message is None:
            self._ready[key] = part
        else:
            self._messages.reply(message, {}, [part])

    def drop(self, group: int) -> None:
        """Forget a group that is gone."""
        self.shard.drop(group)
        for waiting in (self._ready, self._asked):
            for key in [key for key in waiting if key[0] == group]:
                del waiting[key]


def _key(header: Mapping[str, Any]) -> Key:
    return int(header["group"]), int(header["number"])


def named_state(
    names: Sequence[Mapping[str, Any]], tensors: Sequence[Tensor]
) -> dict[int, dict[str, Tensor]]:
    """Optimizer state by parameter index, from a message."""
    found: dict[int, dict[str, Tensor]] = {}
    for place, tensor in zip(names, tensors, strict=True):
        found.setdefault(int(place["index"]), {})[str(place["name"])] = tensor
    return found


@dataclass
class _Sums:
    """What pushes told since the last `metrics` event."""

    samples: float = 0.0
    loss: float = 0.0
    accuracy: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    num_pushes: int = 0
    staleness: int = 0


class Coordinator:
    """The first server: decides, logs and saves."""

    def __init__(
        self,
        config: ExperimentConfig,
        messages: MessageServer,
        model: nn.Module,
        own: tuple[int, int],
        others: Sequence[MessageClient],
        log: EventLog,
        folder: RunFolder,
        num_samples: int,
        is_stop_wanted: Callable[[], bool],
        is_given_up: Callable[[int], bool] = lambda group: False,
    ) -> None:
        """Prepare, from the newest whole checkpoint if there is one.

        Args:
            config: The experiment; its strategy is an asynchronous one.
            messages: Where requests come in.
            model: With the values to start from.
            own: First parameter of this server's part, and one past the last.
            others: Connections to the other servers, in order.
            log: Rank 0's events: the metrics of the run are written there.
            folder: The run folder.
            num_samples: Of the training data.
            is_stop_wanted: The run is to be stopped.
            is_given_up: A group will not come (again), as far as the supervisor knows.
        """
        assert isinstance(config.sync, AsyncConfig)
        self._config, self._sync, self._messages, self._model = config, config.sync, messages, model
        self._others, self._log, self._folder = others, log, folder
        self._is_stop_wanted, self._is_given_up = is_stop_wanted, is_given_up
        self._num_samples = num_samples
        self._batch = config.engine.global_batch_size
        self._total_steps = config.total_steps(num_samples)
        plan = make_plan(config)
        epochs, rest = divmod(self._total_steps, -(-num_samples // self._batch))
        self._ledger = Ledger(
            plan.shares,
            num_samples=num_samples,
            total_samples=epochs * num_samples + rest * self._batch,
            global_batch_size=self._batch,
            staleness_bound=config.sync.staleness_bound,
            is_weighted=config.sync.is_weighted,
        )
        self._buffers = flat_buffers(model)
        whole = flat_parameters(model)
        self._server = Server(messages, ServerShard(model, config.optimizer, *own))
        self._orders: list[tuple[MessageClient, int]] = []
        self._commits: dict[Key, Message] = {}
        self._sums = _Sums()
        self._step = self._evaluated_at = self._saved_at = 0
        self._logged_at = time.perf_counter()
        self._evaluator: int | None = None  # the group that is asked to evaluate
        self._num_groups = len(plan.groups)
        self._lives: dict[int, int] = {}  # how often each group has come
        self._began_at, self._is_begun = time.monotonic(), False
        self._turn_at, self._now, self._asked_at = time.monotonic(), 0.0, 0.0
        self._resume(whole)

    # --- the loop ----------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Until every sample is applied, or the run is stopped, and the groups have left.

        Returns:
            Whether the run got to its end.
        """
        deadline: float | None = None
        while True:
            for message in self._messages.poll(_POLL_S if not self._ledger.is_done else 0.05):
                self._handle(message)
            self._settle_orders()
            self._let_go()
            self._apply_all()
            if self._is_over() or self._is_stop_wanted():
                grace_s = min(_GOODBYE_S, self._config.launch.stop_grace_s / 2)
                deadline = deadline or time.monotonic() + grace_s
                if not self._ledger.here or time.monotonic() > deadline:
                    break
        self._end()
        return self._is_over()

    def _let_go(self) -> None:
        """Let go of groups that are silent or given up. A long turn of this loop is not their silence."""
        limit_s = self._sync.heartbeat_timeout_s
        turn_s = time.monotonic() - self._turn_at
        self._turn_at += turn_s
        self._now += min(turn_s, max(_POLL_S, limit_s / 4))
        for group in self._ledger.silent(self._now, limit_s):
            self._lose(group, f"showed no life for {limit_s:g} s")
        if self._now - self._asked_at > _POLL_S:
            self._asked_at = self._now
            for group in filter(self._is_given_up, self._ledger.here):
                self._lose(group, "will not come back")

    def _is_over(self) -> bool:
        return self._ledger.is_done and self._evaluated_at == self._step

    def _end(self) -> None:
        if self._saved_at != self._step:
            self._save()
        self._say_staleness()
        for client in self._others:
            with contextlib.suppress(LabkitError):
                client.receive(client.send("quit"), _GOODBYE_S)

    def _handle(self, message: Message) -> None:
        handler = getattr(self, f"_on_{message.kind}", None)
        if handler is None:
            self._server.handle(message)
            return
        try:
            handler(message, int(message.header["group"]))
        except (KeyError, ValueError, TypeError, IndexError) as error:
            self._messages.refuse(message, "content", f"{message.kind} could not be done: {error!r}")

    def _on_join(self, message: Message, group: int) -> None:
        if not 0 <= group < self._num_groups:
            raise ValueError(f"group must be one of {self._num_groups}, got {group}")
        if group in self._ledger.here:
            self._lose(group, "came again before it was missed")
        else:
            self._drop(group)
        self._lives[group] = self._lives.get(group, 0) + 1
        self._ledger.join(group, self._now)
        again = "again " if self._lives[group] > 1 else ""
        self._log.write("message", text=f"group {group} joined {again}at version {self._ledger.version}")
        self._messages.reply(message, {"step": self._step, "life": self._lives[group]})

    def _is_current(self, message: Message, group: int) -> bool:
        """It comes from a group that is here, and not from one that was here before it."""
        return group in self._ledger.here and message.header["life"] == self._lives[group]

    def _on_beat(self, message: Message, group: int) -> None:
        if self._is_current(message, group):
            self._ledger.beat(group, self._now)
        self._messages.reply(message)

    def _on_leave(self, message: Message, group: int) -> None:
        if self._is_current(message, group):
            self._drop(group)
        self._messages.reply(message)

    def _on_take(self, message: Message, group: int) -> None:
        if not self._is_current(message, group):
            self._messages.reply(message, {"what": "gone"})  # it was given up; it must join again
            return
        self._ledger.beat(group, self._now)
        if self._is_stop_wanted():
            self._messages.reply(message, {"what": "stop"})
            return
        if not self._is_assembled():
            self._messages.reply(message, {"what": "wait"})
            return
        is_evaluator = self._wants_evaluation() and self._evaluator in (None, group)
        if self._ledger.is_done and not is_evaluator:
            self._messages.reply(message, {"what": "done" if self._is_over() else "wait"})
            return
        extent = self._ledger.take(group)
        if extent is None and not is_evaluator:
            self._messages.reply(message, {"what": "wait"})
            return
        number = extent.number if extent is not None else -self._step
        if is_evaluator:
            self._evaluator = group
        self._order("deliver", {"group": group, "number": number})
        answer: dict[str, Any] = {"what": "extent" if extent is not None else "evaluate", "number": number}
        answer |= {"extent": asdict(extent)} if extent is not None else {}
        answer |= {"step": self._step, "samples": self._ledger.applied_samples, "is_evaluated": is_evaluator}
        self._messages.reply(message, answer, [self._buffers])

    def _is_assembled(self) -> bool:
        """All groups have come once, or those that have not are given up."""
        if not self._is_begun:
            is_late = time.monotonic() - self._began_at > self._config.launch.start_timeout_s
            missing = set(range(self._num_groups)) - set(self._lives)
            self._is_begun = is_late or all(self._is_given_up(group) for group in missing)
        return self._is_begun

    def _wants_evaluation(self) -> bool:
        if self._evaluated_at == self._step or self._step == 0:
            return False
        return self._ledger.is_done or self._is_due(self._config.engine.eval_every_steps, self._evaluated_at)

    def _is_due(self, every_steps: int | None, last: int) -> bool:
        per_epoch = max(1, -(-self._num_samples // self._batch))
        every = every_steps or per_epoch
        return self._step // every > last // every

    def _on_eval(self, message: Message, group: int) -> None:
        header = message.header
        if not self._is_current(message, group) or self._evaluator != group:
            self._messages.reply(message)
            return
        self._evaluator = None
        self._evaluated_at = int(header["step"])
        samples = int(header["samples"])
        self._log.write(
            "eval", step=self._evaluated_at, epoch=round(samples / self._num_samples, 6), samples=samples,
            values={name: float(value) for name, value in header["values"].items()},
        )  # fmt: skip
        self._say_staleness()
        self._messages.reply(message)

    def _on_commit(self, message: Message, group: int) -> None:
        key = _key(message.header)
        is_current = self._is_current(message, group)
        if is_current:
            self._ledger.beat(group, self._now)
        if is_current and self._ledger.offer(*key):
            self._commits[key] = message
        else:
            self._messages.reply(message, {"is_applied": False})

    # --- decisions -----------------------------------------------------------------------------------------

    def _apply_all(self) -> None:
        while (update := self._ledger.next_update()) is not None:
            self._apply(update)
            if self._is_due(self._config.engine.checkpoint_every_steps, self._saved_at):
                self._save()

    def _apply(self, update: Update) -> None:
        rate = learning_rate_at(
            self._config.schedule, self._config.optimizer.learning_rate, update.step, self._total_steps
        )
        pushes = [[push.group, push.extent.number, push.weight] for push in update.pushes]
        self._order("apply", {"pushes": pushes, "learning_rate": rate})
        for push in update.pushes:
            message = self._commits.pop((push.group, push.extent.number))
            self._count(message, push)
            answer = {"is_applied": True, "version": update.version, "staleness": push.staleness}
            self._messages.reply(message, answer)
        if self._ledger.step > self._step:
            self._step = self._ledger.step
            self._say_metrics(rate)

    def _count(self, message: Message, push: Push) -> None:
        header, sums = message.header, self._sums
        sums.samples += push.extent.num_samples
        sums.loss += float(header["loss_sum"])
        sums.accuracy += float(header["accuracy_sum"])
        for name, seconds in header["parts_s"].items():
            sums.parts_s[name] = sums.parts_s.get(name, 0.0) + float(seconds)
        sums.num_pushes += 1
        sums.staleness += push.staleness
        if message.tensors and len(self._buffers):
            self._buffers.lerp_(message.tensors[0].to(self._buffers.dtype), min(1.0, push.share))

    def _say_staleness(self) -> None:
        counts = {str(value): count for value, count in sorted(self._ledger.staleness.items())}
        self._log.write(
            "staleness", step=self._step, counts=counts, repeated=self._ledger.num_repeated,
            dropped=self._ledger.num_dropped, refused=dict(self._messages.num_refused),
        )  # fmt: skip

    def _say_metrics(self, rate: float) -> None:
        sums, now = self._sums, time.perf_counter()
        seconds = max(1e-9, now - self._logged_at)
        parts = {f"perf/{n}_ms": 1e3 * s / sums.num_pushes for n, s in sums.parts_s.items()}
        self._log.write(
            "metrics",
            step=self._step,
            epoch=round(self._ledger.applied_samples / self._num_samples, 6),
            samples=self._ledger.applied_samples,
            values={
                "train/loss": sums.loss / sums.samples,
                "train/accuracy": sums.accuracy / sums.samples,
                "optim/learning_rate": rate,
                "perf/samples_per_s": sums.samples / seconds,
                "perf/step_ms": 1e3 * seconds * self._batch / sums.samples,
                **parts,
                "async/staleness": sums.staleness / sums.num_pushes,
                "async/pushes": self._ledger.version,
                "async/dropped": self._ledger.num_dropped,
                "async/repeated": self._ledger.num_repeated,
                "async/groups": len(self._ledger.here),
            },
        )
        self._sums, self._logged_at = _Sums(), now

    def _lose(self, group: int, why: str) -> None:
        count = sum(extent.num_samples for extent in self._drop(group))
        given = f"; {count} samples that it had are given out again" if count else ""
        self._log.write("message", text=f"group {group} {why}{given}")

    def _drop(self, group: int) -> list[Extent]:
        """Forget a group everywhere: what it had under way."""
        lost = self._ledger.leave(group)
        for key in [key for key in self._commits if key[0] == group]:
            self._messages.reply(self._commits.pop(key), {"is_applied": False})
        if self._evaluator == group:
            self._evaluator = None
        self._order("drop", {"group": group})
        return lost

    def _order(self, kind: str, header: Mapping[str, Any]) -> None:
        """Have all servers do something, in the same order among all that they are told."""
        for client in self._others:
            self._orders.append((client, client.send(kind, dict(header))))
        if kind == "apply":
            pushes = [((group, number), weight) for group, number, weight in header["pushes"]]
            self._server.shard.apply(pushes, header["learning_rate"])
        elif kind == "deliver":
            self._server.deliver(_key(header))
        elif kind == "drop":
            self._server.drop(header["group"])
        if len(self._orders) >= 8 * max(1, len(self._others)):
            self._settle_orders()

    def _settle_orders(self) -> None:
        """See that they were carried out; a server that does not answer ends the run."""
        for client, request in self._orders:
            client.receive(request)
        self._orders.clear()

    # --- state ---------------------------------------------------------------------------------------------

    def _gather(self) -> tuple[Tensor, dict[int, dict[str, Tensor]]]:
        """Parameters and optimizer state of all servers, of one version."""
        self._settle_orders()
        names, tensors = self._server.shard.state()
        parts, state = [self._server.shard.read()], named_state(names, tensors)
        for client in self._others:
            reply = client.request("state", {})
            part, *rest = reply.tensors
            parts.append(part)
            state |= named_state(reply.header["names"], rest)
        return torch.cat(parts), state

    def _save(self) -> None:
        began_at = time.perf_counter()
        whole, state = self._gather()
        set_parameters(self._model, whole)
        set_buffers(self._model, self._buffers)
        optimizer = build_optimizer(self._config.optimizer, self._model.parameters()).state_dict()
        optimizer["state"] = state
        samples = self._ledger.applied_samples
        epoch, batches = divmod(self._step, -(-self._num_samples // self._batch))
        path = self._folder.checkpoint_file(self._step)
        size_bytes = checkpoint.write_checkpoint(
            path,
            {
                "step": self._step,
                "samples": samples,
                # For a synchronous strategy, which knows whole global batches only.
                "sampler": {"epoch": epoch, "cursor": batches * self._batch},
                "model": self._model.state_dict(),
                "strategy": optimizer,
                "random": [],
                "local": [],
                "ledger": self._ledger.state_dict(),
            },
        )
        checkpoint.prune(self._folder, self._config.engine.keep_checkpoints)
        self._saved_at = self._step
        self._log.write(
            "checkpoint", step=self._step, file=path.name, size_bytes=size_bytes,
            save_s=round(time.perf_counter() - began_at, 6),
        )  # fmt: skip

    def _resume(self, whole: Tensor) -> None:
        """Give every server its part to start from: as built, or of the newest whole checkpoint."""
        data = checkpoint.newest_checkpoint(self._folder, lambda text: self._log.write("message", text=text))
        state: dict[int, dict[str, Tensor]] = {}
        if data is not None:
            content = checkpoint.read_checkpoint(data, "checkpoint")
            self._model.load_state_dict(content["model"])
            whole = flat_parameters(self._model)
            self._buffers = flat_buffers(self._model)
            state = content["strategy"]["state"]
            self._step = self._evaluated_at = self._saved_at = int(content["step"])
            if "ledger" in content:
                self._ledger.load_state_dict(content["ledger"])
            else:
                place = content["sampler"]
                self._ledger.begin_at(self._step, place["epoch"] * self._num_samples + place["cursor"])
        self._server.shard.load(whole, state)
        names = [{"index": index, "name": name} for index, values in state.items() for name in values]
        tensors = [tensor for values in state.values() for tensor in values.values()]
        for client in self._others:
            client.request("load", {"names": names}, [whole, *tensors])


def flat_buffers(model: nn.Module) -> Tensor:
    """All buffers as one; shape (n,), float64."""
    parts = [buffer.detach().double().cpu().flatten() for buffer in model.buffers()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


@torch.no_grad()
def set_buffers(model: nn.Module, values: Tensor) -> None:
    """The reverse; whole numbers are rounded."""
    offset = 0
    for buffer in model.buffers():
        part = values[offset : offset + buffer.numel()].view_as(buffer)
        buffer.copy_(part if buffer.is_floating_point() else part.round())
        offset += buffer.numel()


@torch.no_grad()
def set_parameters(model: nn.Module, values: Tensor) -> None:
    """Set the trained parameters from a flat tensor."""
    offset = 0
    for parameter in trained(model):
        parameter.copy_(values[offset : offset + parameter.numel()].view_as(parameter))
        offset += parameter.numel()
