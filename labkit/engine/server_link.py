"""A group's connection to the parameter servers: takes and pushes in the background of its computing."""

import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.comm import MessageClient, PeerError, Reply, Secret
from labkit.errors import LabkitError
from labkit.sync.ledger import Extent

_ASK_AGAIN_S = 0.05
_LOOK_S = 0.2  # how soon a wait for an answer ends after `close`
_GOODBYE_S = 5.0
_NUM_PUSHERS = 3  # one that waits to be applied, one on its way, one that is being computed


@dataclass(frozen=True)
class Taken:
    """What the coordinator wants a group to do.

    Attributes:
        what: extent, evaluate, done, stop or gone.
        number: Of the extent.
        extent: The samples; None when there are none to compute.
        is_evaluated: Evaluate the parameters that came along first.
        step: Global batches that are done.
        samples: Samples that are applied.
        pull_s: Seconds from asking, when there was something to give, until the parameters were here.
        parameters: Of one version; shape (n,); None where they are not needed.
        buffers: Running statistics of all groups; shape (m,), float64.
    """

    what: str
    number: int = 0
    extent: Extent | None = None
    is_evaluated: bool = False
    step: int = 0
    samples: int = 0
    pull_s: float = 0.0
    parameters: Tensor | None = None
    buffers: Tensor | None = None


def sendable(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures for a header, which is JSON: of a model that diverges, `nan` and `inf` travel as text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


class _Line:
    """Connections to all servers, for one thread; a wait ends soon after `closed` is set."""

    def __init__(
        self, addresses: Sequence[str], secret: Secret, timeout_s: float, closed: threading.Event
    ) -> None:
        self.clients = [MessageClient(address, secret, timeout_s=timeout_s) for address in addresses]
        self._timeout_s, self._closed = timeout_s, closed

    @property
    def coordinator(self) -> MessageClient:
        return self.clients[0]

    def request(self, kind: str, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> Reply:
        """Ask the coordinator."""
        return self.receive(self.coordinator, self.coordinator.send(kind, dict(header), tensors))

    def receive(self, client: MessageClient, request: int) -> Reply:
        """Wait for an answer.

        Raises:
            PeerError: the server is gone, or the answer did not come before the end of the wait.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return client.receive(request, _LOOK_S)
            except PeerError:
                is_open = not client.is_answered(request)
                if not is_open or self._closed.is_set() or time.monotonic() > deadline:
                    raise

    def close(self) -> None:
        for client in self.clients:
            client.close()


class ServerLink:
    """What the first worker of a group says to the servers. Takes and pushes go on in the background.

    Attributes:
        step: Global batches that were done when the group joined.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        secret: Secret,
        group: int,
        borders: Sequence[int],
        *,
        timeout_s: float,
        heartbeat_s: float,
    ) -> None:
        """Connect and join.

        Args:
            addresses: Of the servers; the first is the coordinator.
            secret: The run's.
            group: Which group this is.
            borders: Where the servers' parts begin and end in the flat parameters; shape (S + 1,).
            timeout_s: Longest wait for an answer.
            heartbeat_s: Between two signs of life.

        Raises:
            PeerError: a server is gone.
        """
        self._borders = list(borders)
        self._closed = threading.Event()
        self._pushes: list[Future[dict[str, Any]]] = []  # the newest ones
        self._num_pushed = 0
        self._taking = _Line(addresses, secret, timeout_s, self._closed)
        self._pushing = [_Line(addresses, secret, timeout_s, self._closed) for _ in range(_NUM_PUSHERS)]
        self._beating = _Line(addresses[:1], secret, timeout_s, self._closed)
        self._telling = _Line(addresses[:1], secret, timeout_s, threading.Event())  # of the calling thread
        self._threads = [ThreadPoolExecutor(1, f"labkit-server-{i}") for i in range(_NUM_PUSHERS + 1)]
        joined = self._telling.request("join", {"group": group}).header
        self.step = int(joined["step"])
        self._who = {"group": group, "life": joined["life"]}
        self._heart = threading.Thread(
            target=self._beat, args=(heartbeat_s,), name="labkit-heart", daemon=True
        )
        self._heart.start()

    def _beat(self, every_s: float) -> None:
        while not self._closed.wait(every_s):
            try:
                self._beating.request("beat", self._who)
            except LabkitError:
                return  # whoever takes or pushes next finds out

    # --- take --------------------------------------------------------------------------------------------

    def take(self, into: Tensor | None = None) -> "Future[Taken]":
        """Ask what to do next and pull the parameters for it, when the last push but one has been applied.

        So a pull shares the link with a push the other way. A group has three extents under way at the
        most, and each gets to the coordinator by a connection of its own, whatever it decides about the
        others.

        Args:
            into: Where the parameters are to come; shape (n,); new memory when not given.
        """
        before = self._pushes[-2] if len(self._pushes) > 1 else None
        return self._threads[0].submit(self._take, before, into)

    def _take(self, before: "Future[dict[str, Any]] | None", into: Tensor | None) -> Taken:
        if before is not None:
            before.result()
        while True:
            asked_at = time.perf_counter()
            reply = self._taking.request("take", self._who)
            header = reply.header
            if header["what"] != "wait":
                break
            if self._closed.wait(_ASK_AGAIN_S):
                return Taken("stop")
        if header["what"] not in ("extent", "evaluate"):
            return Taken(header["what"])
        key = {**self._who, "number": header["number"]}
        requests = [(client, client.send("pull", key)) for client in self._taking.clients]
        parts = [self._taking.receive(client, request).tensors[0] for client, request in requests]
        return Taken(
            what=header["what"],
            number=header["number"],
            extent=Extent(**header["extent"]) if "extent" in header else None,
            is_evaluated=header["is_evaluated"],
            step=header["step"],
            samples=header["samples"],
            pull_s=time.perf_counter() - asked_at,
            parameters=torch.cat(parts, out=into),
            buffers=reply.tensors[0],
        )

    # --- push --------------------------------------------------------------------------------------------

    def push(self, number: int, gradient: Tensor, figures: Mapping[str, Any], buffers: Tensor) -> None:
        """Send a mean gradient to all servers and have it applied.

        Args:
            number: Of the extent that it was computed on.
            gradient: Not changed afterwards; shape (n,).
            figures: What the coordinator logs of it.
            buffers: Running statistics; shape (m,), float64.
        """
        index = self._num_pushed % _NUM_PUSHERS
        self._num_pushed += 1
        own = gradient.detach().cpu()
        pushed = self._threads[1 + index].submit(
            self._push, self._pushing[index], number, own, sendable(figures), buffers
        )
        self._pushes = [*self._pushes[1 - _NUM_PUSHERS :], pushed]

    def _push(
        self, line: _Line, number: int, gradient: Tensor, figures: dict[str, Any], buffers: Tensor
    ) -> dict[str, Any]:
        key = {**self._who, "number": number}
        parts = [gradient[a:b] for a, b in zip(self._borders[:-1], self._borders[1:], strict=True)]
        requests = [
            (client, client.send("stage", key, [part]))
            for client, part in zip(line.clients, parts, strict=True)
        ]
        for client, request in requests:
            line.receive(client, request)
        return line.request("commit", {**key, **figures}, [buffers]).header

    def settle(self) -> None:
        """Wait until all pushes are applied.

        Raises:
            PeerError: a server is gone.
        """
        for push in self._pushes:
            push.result()

    # --- the rest ------------------------------------------------------------------------------------------

    def evaluated(self, values: Mapping[str, float], taken: Taken) -> None:
        """Tell what an evaluation found."""
        content = {**self._who, "values": sendable(values), "step": taken.step, "samples": taken.samples}
        self._telling.request("eval", content)

    def leave(self) -> None:
        """Say that this group goes. What it has under way, pushed or not, is given to others."""
        with contextlib.suppress(LabkitError):
            self._telling.coordinator.receive(
                self._telling.coordinator.send("leave", self._who), timeout_s=_GOODBYE_S
            )

    def close(self) -> None:
        """Let go of everything, also while something is under way."""
        self._closed.set()
        self._heart.join()
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)
        for line in (self._taking, *self._pushing, self._beating, self._telling):
            line.close()
