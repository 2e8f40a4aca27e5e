"""Requests and answers with tensors between processes that come, go and die, each at its own pace.

Collectives need all workers at once, and gloo's send and receive never tell of a dead peer. Here one server
takes requests of any number of clients (ZeroMQ, ROUTER and DEALER) and answers each when it likes.

Everything is encrypted and authenticated both ways (CURVE: Curve25519, XSalsa20, Poly1305): who has not the
run's secret reads nothing, changes nothing and is never heard. Nothing is unpickled.

A request whose connection breaks fails at once with `PeerError`, also when the server only hangs: the
transport looks for life every few seconds. The server may or may not have seen it, and it is never sent
twice: whoever repeats it must number it, so that the server does not count it twice.

References:
    https://rfc.zeromq.org/spec/26 (CurveZMQ), https://rfc.zeromq.org/spec/27 (ZAP).
"""

import contextlib
import errno
import hmac
import ipaddress
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from torch import Tensor
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from labkit.comm.communicator import PeerError
from labkit.comm.message_format import (
    CHUNK_BYTES,
    Bytes,
    Incoming,
    Malformed,
    is_beginning,
    pack,
    read_request,
)
from labkit.errors import ConfigError, LabkitError

MAX_REQUESTS = 16  # of one client, unanswered

_LOOK_FOR_LIFE_S = 2.0
_NO_LIFE_S = 10.0
_HANDSHAKE_S = 15.0
_LINGER_S = 5.0
_QUIET_S = 0.02
_END_S = 2.0
_FORGET_S = 60.0  # a message of which no more came
_RETRY_S = 0.002
_LAST_WORDS_MS = 50
_BURST = 256  # chunks taken before `poll` hands over what is complete
_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"labkit"
_FAILED: dict[int, str] = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "stranger",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "handshake",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "handshake",
}


class RemoteError(LabkitError):
    """The server refused a request; `reason` is a word, the message says more."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True)
class Secret:
    """What one run's server and clients share: a key pair each, in the text form of ZeroMQ (z85).

    Whoever has it can read and change the run's messages: keep it off command lines and out of logs.
    """

    server_public: bytes
    server_private: bytes = field(repr=False)
    client_public: bytes
    client_private: bytes = field(repr=False)

    @classmethod
    def new(cls) -> "Secret":
        """Fresh keys."""
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    @classmethod
    def derived(cls, text: str) -> "Secret":
        """The keys that a text of high entropy stands for: the same on every machine that knows it.

        One HMAC-SHA256 for each private key (the extract step of HKDF, RFC 5869), which is all that a random
        text needs; a password that a person could remember would need a slow function.
        """
        pairs = []
        for side in (b"labkit server", b"labkit client"):
            private = z85.encode(hmac.digest(side, text.encode(), "sha256"))
            pairs.append((zmq.curve_public(private), private))
        return cls(*pairs[0], *pairs[1])

    def to_text(self) -> str:
        """One line, for a file that only its owner may read."""
        keys = (self.server_public, self.server_private, self.client_public, self.client_private)
        return " ".join(key.decode() for key in keys)

    @classmethod
    def from_text(cls, text: str) -> "Secret":
        """Read `to_text`.

        Raises:
            ConfigError: it is no secret. The message does not repeat it.
        """
        with contextlib.suppress(ValueError, KeyError, zmq.ZMQError):
            server_public, server_private, client_public, client_private = text.encode("ascii").split()
            secret = cls(server_public, server_private, client_public, client_private)
            pairs = ((server_public, server_private), (client_public, client_private))
            if all(len(own) == 40 and zmq.curve_public(own) == public for public, own in pairs):
                return secret
        raise ConfigError("secret must be the text of two key pairs, got something else. Make a new one.")


@dataclass(frozen=True)
class Message:
    """A request that came whole.

    Attributes:
        client: Who sent it; another value after the client connected anew.
        request: Its number, counted by the client.
        kind: What is wanted.
        header: Its JSON.
        tensors: In memory of their own, which the receiver may keep and change.
    """

    client: bytes
    request: int
    kind: str
    header: dict[str, Any]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Reply:
    """The answer to a request: its JSON and its tensors, in memory of their own."""

    header: dict[str, Any]
    tensors: tuple[Tensor, ...]


@dataclass
class _Client:
    """What the server knows of a client that has something under way."""

    incoming: Incoming | None = None
    heard_at: float = 0.0
    ignored: int = -1  # request whose further chunks are dropped
    unanswered: set[int] = field(default_factory=set)
    outbox: deque[list[Bytes]] = field(default_factory=deque)

    @property
    def is_idle(self) -> bool:
        return self.incoming is None and self.ignored < 0 and not self.unanswered and not self.outbox


class MessageServer:
    """Takes requests and answers each, at once or much later, in any order. For one thread.

    Attributes:
        address: `tcp://host:port`, for the clients.
        num_refused: What was refused, by reason.
    """

    def __init__(self, host: str, secret: Secret, *, port: int = 0, max_bytes: int) -> None:
        """Listen.

        Args:
            host: An IPv4 address of this machine; never all of them.
            secret: The run's.
            port: 0 takes a free one.
            max_bytes: Largest sum of the tensors of one message. A client may hold this server's memory
                to some times as much (twice in requests that come in, and the answers that it does not
                take), and a client that leaves gives it back.

        Raises:
            ConfigError: `host` is no address of this machine, or the port is in use.
        """
        _check_host(host)
        self.num_refused: Counter[str] = Counter()
        self._max_bytes = max_bytes
        self._secret = secret
        self._clients: dict[bytes, _Client] = {}
        self._forgot_at = time.monotonic()
        self._context = zmq.Context(io_threads=1)
        try:
            self._gate = self._context.socket(zmq.REP)
            self._gate.linger = 0
            self._gate.bind(_ZAP)
            self._socket = self._context.socket(zmq.ROUTER)
            _set_limits(self._socket, max_bytes)
            self._socket.router_mandatory = True
            self._protect(self._socket)
            self._monitor = self._socket.get_monitor_socket(sum(_FAILED))
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"message server must have a free port of this machine, got {host}:{port}: {error}. "
                "Choose another port, or stop what listens there."
            ) from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        for socket in (self._gate, self._socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def _protect(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_server = True
        socket.curve_secretkey = self._secret.server_private
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without our gate nobody comes in

    def poll(self, timeout_s: float) -> list[Message]:
        """Wait for requests; [] when none came in time.

        Call it often: it also lets clients in and sends on what a slow client could not yet take.
        """
        deadline = time.monotonic() + timeout_s
        found: list[Message] = []
        while True:
            self._send_waiting()
            is_sending = any(client.outbox for client in self._clients.values())
            left_s = max(0.0, deadline - time.monotonic())
            wait_s = min(left_s, _RETRY_S) if is_sending else left_s
            ready = dict(self._poller.poll(0 if found else max(0, int(wait_s * 1000 + 0.999))))
            if self._gate in ready:
                self._open_gate()
            if self._monitor in ready:
                self._count_failed()
            if self._socket in ready:
                found += self._take_burst()
            if found or time.monotonic() >= deadline:
                self._forget_unfinished()
                return found

    def reply(
        self, message: Message, header: dict[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> None:
        """Answer a request; nothing happens when its client is gone.

        Args:
            message: From `poll`, not answered yet.
            header: JSON, small.
            tensors: Copied before this returns: they may change afterwards.

        Raises:
            ValueError: it was answered before, or the header or a tensor can't be sent.
        """
        self._answer(message, "ok", header, tensors)

    def refuse(self, message: Message, reason: str, text: str) -> None:
        """Answer a request with a `RemoteError`.

        Args:
            message: From `poll`, not answered yet.
            reason: A word for programs.
            text: A sentence for people.
        """
        self._answer(message, "refused", {"reason": reason, "text": text[:2000]}, ())

    def close(self) -> None:
        """Stop. Answers that are under way get a few seconds to leave; it never takes longer."""
        if self._context.closed:
            return
        deadline = time.monotonic() + _LINGER_S
        while any(client.outbox for client in self._clients.values()) and time.monotonic() < deadline:
            self._send_waiting()
            time.sleep(_RETRY_S)
        self._take_until_quiet()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._gate.close(0)
        self._socket.close(max(0, int((deadline - time.monotonic()) * 1000)))
        _end(self._context, max(0.0, deadline - time.monotonic()))

    def _take_until_quiet(self) -> None:
        """Drop what still comes in.

        libzmq 4.3.5 may never end a socket that is closed while it takes bytes of a peer that leaves.
        """
        deadline = time.monotonic() + _QUIET_S * 20
        while self._socket.poll(int(_QUIET_S * 1000)) and time.monotonic() < deadline:
            _receive(self._socket)

    # --- letting clients in -----------------------------------------------------------------

    def _open_gate(self) -> None:
        """Say who may come in: exactly who has the run's client key."""
        key = z85.decode(self._secret.client_public)
        while (frames := _receive(self._gate)) is not None:
            version, request, domain, _address, _identity, mechanism, *credentials = map(bytes, frames)
            is_ours = domain == _DOMAIN and mechanism == b"CURVE" and credentials == [key]
            status = (b"200", b"OK") if is_ours else (b"400", b"unknown key")
            self._gate.send_multipart([version, request, *status, b"", b""])

    def _count_failed(self) -> None:
        for event in _events(self._monitor):
            self.num_refused[_FAILED[event]] += 1

    # --- what comes in -----------------------------------------------------------------

    def _take_burst(self) -> list[Message]:
        found: list[Message] = []
        for _ in range(_BURST):
            frames = _receive(self._socket)
            if frames is None:
                break
            message = self._take(bytes(frames[0]), frames[1:])
            if message is not None:
                found.append(message)
        return found

    def _take(self, name: bytes, frames: list[Bytes]) -> Message | None:
        client = self._clients.setdefault(name, _Client())
        client.heard_at = time.monotonic()
        try:
            message = self._take_chunk(name, client, frames)
        except Malformed as error:
            self._refuse_malformed(name, client, error)
            message = None
        if client.is_idle:
            self._clients.pop(name, None)
        return message

    def _take_chunk(self, name: bytes, client: _Client, frames: list[Bytes]) -> Message | None:
        if is_beginning(frames):
            self._drop_unfinished(client)
            incoming = Incoming(frames, self._max_bytes)
            if incoming.request in client.unanswered:
                raise Malformed("repeated", "request numbers must be unique", incoming.request)
            if len(client.unanswered) >= MAX_REQUESTS:
                raise Malformed(
                    "too many", f"a client may have {MAX_REQUESTS} unanswered requests", incoming.request
                )
        elif read_request(frames) == client.ignored:
            return None
        elif client.incoming is None:
            raise Malformed("out of order", "a chunk came without its beginning", read_request(frames))
        else:
            incoming = client.incoming
            incoming.add(frames)
        client.ignored = -1
        client.incoming = None if incoming.is_complete else incoming
        if not incoming.is_complete:
            return None
        client.unanswered.add(incoming.request)
        return Message(name, incoming.request, incoming.kind, incoming.header, incoming.tensors)

    def _drop_unfinished(self, client: _Client) -> None:
        if client.incoming is not None:
            self.num_refused["unfinished"] += 1
        client.incoming = None

    def _refuse_malformed(self, name: bytes, client: _Client, error: Malformed) -> None:
        self.num_refused[error.reason] += 1
        client.incoming = None
        if error.reason == "garbage":
            return
        client.ignored = error.request
        if error.request not in client.unanswered:  # else the good request of that number gets its answer
            header = {"reason": error.reason, "text": str(error)}
            self._send(name, client, pack(error.request, "refused", header, ())[1])

    def _forget_unfinished(self) -> None:
        """Drop messages of clients that left in their midst."""
        now = time.monotonic()
        if now - self._forgot_at < _FORGET_S / 4:
            return
        self._forgot_at = now
        for name, client in list(self._clients.items()):
            if now - client.heard_at > _FORGET_S:
                self._drop_unfinished(client)
                client.ignored = -1
                if client.is_idle:
                    del self._clients[name]

    # --- what goes out -----------------------------------------------------------------

    def _answer(
        self, message: Message, kind: str, header: dict[str, Any] | None, tensors: Sequence[Tensor]
    ) -> None:
        size_bytes, chunks = pack(message.request, kind, header, tensors)
        if size_bytes > self._max_bytes:
            raise ValueError(f"reply must have at most {self._max_bytes} bytes, got {size_bytes}")
        client = self._clients.get(message.client)
        if client is None:
            return  # it left, and an earlier answer found out
        if message.request not in client.unanswered:
            raise ValueError(f"request {message.request} must be answered once, got a second answer")
        client.unanswered.discard(message.request)
        self._send(message.client, client, chunks)

    def _send(self, name: bytes, client: _Client, chunks: Iterator[list[Bytes]]) -> None:
        """Send now what the transport takes; keep a copy of the rest."""
        if not client.outbox:
            rest = self._send_chunks(name, chunks)
            if rest is None:
                self._clients.pop(name, None)
                return
            chunks = itertools.chain(rest, chunks)
        client.outbox.extend([bytes(frame) for frame in frames] for frames in chunks)
        if client.is_idle:
            self._clients.pop(name, None)

    def _send_waiting(self) -> None:
        for name, client in list(self._clients.items()):
            if not client.outbox:
                continue
            waiting, client.outbox = iter(client.outbox), deque()
            self._send(name, client, waiting)

    def _send_chunks(self, name: bytes, chunks: Iterator[list[Bytes]]) -> list[list[Bytes]] | None:
        """Send until the transport takes no more: the chunk left over, or None when nobody is there."""
        for frames in chunks:
            try:
                self._socket.send_multipart([name, *frames], zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return [frames]
            except zmq.ZMQError as error:
                if error.errno == errno.EHOSTUNREACH:
                    return None
                raise
        return []


class MessageClient:
    """Sends requests to one server and receives the answers in any order. For one thread at a time."""

    def __init__(self, address: str, secret: Secret, *, timeout_s: float, max_bytes: int = 2**30) -> None:
        """Begin to connect; a server that is not there yet is waited for by what needs it.

        Args:
            address: Of the server.
            secret: The run's.
            timeout_s: Longest wait for an answer, where `receive` is not told another.
            max_bytes: Largest sum of the tensors of one message, both ways. Better the server's own: with
                more, a server that does not poll for long counts as dead once its queue is full.

        Raises:
            ConfigError: `address` is none.
        """
        self._address = address
        self._secret = secret
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._requests = itertools.count(1)
        self._waiting: dict[int, int] = {}  # unanswered requests, and their bytes
        self._answers: dict[int, Incoming] = {}
        self._incoming: Incoming | None = None
        self._lost: dict[int, str] = {}  # requests that nobody will answer any more, and why
        self._fault = ""
        self._is_up = False
        self._is_open = False
        self._context = zmq.Context(io_threads=1)
        try:
            self._open()
        except zmq.ZMQError as error:
            self._is_open = False
            self._context.destroy(linger=0)
            raise ConfigError(f"address must be tcp://HOST:PORT, got {address!r}: {error}") from None

    def _protect(self, socket: "zmq.Socket[bytes]") -> None:
        socket.curve_serverkey = self._secret.server_public
        socket.curve_publickey = self._secret.client_public
        socket.curve_secretkey = self._secret.client_private

    def send(self, kind: str, header: dict[str, Any] | None = None, tensors: Sequence[Tensor] = ()) -> int:
        """Send a request and return its number, for `receive`. It leaves while the caller goes on.

        It waits only while the server leaves too much unanswered: `MAX_REQUESTS`, or twice `max_bytes`.

        Args:
            kind: What is wanted.
            header: JSON, small.
            tensors: Copied before this returns: they may change afterwards.

        Raises:
            PeerError: the server is gone, or took nothing in time.
            ValueError: the header or a tensor can't be sent, or too many answers wait to be received.
        """
        request = next(self._requests)
        size_bytes, chunks = pack(request, kind, header, tensors)
        if size_bytes > self._max_bytes:
            raise ValueError(f"request must have at most {self._max_bytes} bytes, got {size_bytes}")
        if len(self._answers) + len(self._lost) >= 4 * MAX_REQUESTS:
            raise ValueError("answers must be received, got too many that nobody asked for. Call `receive`.")
        deadline = time.monotonic() + self._timeout_s
        self._pump(0.0)
        while self._waiting and (
            len(self._waiting) >= MAX_REQUESTS
            or sum(self._waiting.values()) + size_bytes > 2 * self._max_bytes
        ):
            self._pump_until(deadline, f"answered none of {len(self._waiting)} requests")
        self._waiting[request] = size_bytes
        try:
            for frames in chunks:
                self._send_chunk(request, frames, deadline)
        except BaseException:
            self._waiting.pop(request, None)
            raise
        return request

    def receive(self, request: int, timeout_s: float | None = None) -> Reply:
        """Wait for the answer to a request; each can be received once.

        Args:
            request: From `send`.
            timeout_s: Longest wait; default: the client's. The request stays open after it.

        Raises:
            PeerError: the connection broke, or no answer came in time.
            RemoteError: the server refused it.
            ValueError: there is no such request.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        self._pump(0.0)
        while request in self._waiting:
            self._pump_until(deadline, f"did not answer request {request}")
        if request in self._lost:
            raise PeerError(self._lost.pop(request))
        if request not in self._answers:
            raise ValueError(f"request must be one that was sent and not received, got {request}")
        answer = self._answers.pop(request)
        if answer.kind != "ok":
            reason, text = (str(answer.header.get(key, "")) for key in ("reason", "text"))
            raise RemoteError(reason, f"{self._address} refused request {request}: {text}")
        return Reply(answer.header, answer.tensors)

    def request(
        self, kind: str, header: dict[str, Any] | None = None, tensors: Sequence[Tensor] = ()
    ) -> Reply:
        """`send` and `receive`."""
        return self.receive(self.send(kind, header, tensors))

    def is_answered(self, request: int) -> bool:
        """Whether `receive` would return or raise at once."""
        self._pump(0.0)
        return request not in self._waiting

    def close(self) -> None:
        """Leave at once, whatever is under way."""
        if self._is_open:
            self._shut()
            _end(self._context, 0.0)

    # --- the connection -----------------------------------------------------------------

    def _open(self) -> None:
        self._is_open, self._is_up = True, False
        self._socket = self._context.socket(zmq.DEALER)
        _set_limits(self._socket, self._max_bytes)
        self._socket.linger = 0
        self._protect(self._socket)
        events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_AUTH
        self._monitor = self._socket.get_monitor_socket(events)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(self._address)

    def _shut(self) -> None:
        self._is_open = False
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _look_after_connection(self) -> None:
        for event in _events(self._monitor):
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._is_up = True
            elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                self._lose("refused this run's secret")
                return
            elif self._is_up:
                while self._socket.poll(_LAST_WORDS_MS):  # what came before it broke is told after that
                    self._take_all()
                self._lose("is gone: the connection broke")
                return

    def _lose(self, why: str) -> None:
        """Give up what is under way and connect anew: what was queued must not be sent later."""
        self._fault = f"{self._address} {why}"
        self._lost.update(dict.fromkeys(self._waiting, self._fault))
        self._waiting.clear()
        self._incoming = None
        self._shut()
        self._open()

    # --- chunks -----------------------------------------------------------------

    def _send_chunk(self, request: int, frames: list[Bytes], deadline: float) -> None:
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
                return
            except zmq.Again:
                self._pump_until(deadline, "took no more bytes", wait_s=_RETRY_S)
            if request not in self._waiting:
                raise PeerError(self._lost.pop(request, self._fault))

    def _pump_until(self, deadline: float, what: str, wait_s: float = 60.0) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            state = "" if self._is_up else "; it is not connected"
            raise PeerError(f"{self._address} {what} in time{state}")
        self._pump(min(left_s, wait_s))

    def _pump(self, timeout_s: float) -> None:
        """Take what has come, or wait for something."""
        if not self._is_open:
            raise ValueError("client must be open, got a closed one")
        ready = dict(self._poller.poll(int(timeout_s * 1000 + 0.999)))
        if self._socket in ready:
            self._take_all()
        if self._monitor in ready:
            self._look_after_connection()

    def _take_all(self) -> None:
        while (frames := _receive(self._socket)) is not None:
            self._take(frames)

    def _take(self, frames: list[Bytes]) -> None:
        try:
            if is_beginning(frames):
                self._incoming = Incoming(frames, self._max_bytes)
            elif self._incoming is not None:
                self._incoming.add(frames)
        except Malformed as error:
            self._incoming = None
            if self._waiting.pop(error.request, None) is not None:
                self._lost[error.request] = f"{self._address} sent an answer that can't be read: {error}"
            return
        if self._incoming is not None and self._incoming.is_complete:
            answer, self._incoming = self._incoming, None
            if self._waiting.pop(answer.request, None) is not None:
                self._answers[answer.request] = answer


# --- sockets -----------------------------------------------------------------


def _check_host(host: str) -> None:
    with contextlib.suppress(ValueError):
        address = ipaddress.IPv4Address(host)
        if not address.is_unspecified and not address.is_multicast:
            return
    raise ConfigError(
        f"message server must listen on one IPv4 address of this machine, got {host!r}. Name the address "
        "that the workers reach."
    )


def _set_limits(socket: "zmq.Socket[bytes]", max_bytes: int) -> None:
    socket.maxmsgsize = CHUNK_BYTES + 4096
    # Whatever a client may have unanswered fits: a full queue would stop the signs of life as well.
    socket.hwm = 2 * (max_bytes // CHUNK_BYTES) + 4 * MAX_REQUESTS
    socket.heartbeat_ivl = int(_LOOK_FOR_LIFE_S * 1000)
    socket.heartbeat_timeout = int(_NO_LIFE_S * 1000)
    socket.handshake_ivl = int(_HANDSHAKE_S * 1000)


def _end(context: "zmq.Context[zmq.Socket[bytes]]", linger_s: float) -> None:
    """End a context whose sockets are closed, and wait no longer than their lingering allows.

    A thread does it, because libzmq (4.3.5) now and then waits for a peer's connection for ever; the thread
    is then left behind and ends with the process.
    """
    thread = threading.Thread(target=context.term, name="labkit-messages-end", daemon=True)
    thread.start()
    thread.join(linger_s + _END_S)


def _receive(socket: "zmq.Socket[bytes]") -> list[Bytes] | None:
    """The next message's frames, not copied; None when there is none."""
    try:
        return [frame.buffer for frame in socket.recv_multipart(zmq.NOBLOCK, copy=False)]
    except zmq.Again:
        return None


def _events(monitor: "zmq.Socket[bytes]") -> Iterable[int]:
    while True:
        try:
            yield recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return
