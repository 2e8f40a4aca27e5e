"""Messages come whole or not at all, only from who has the secret, and a dead peer is noticed."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from labkit.comm import (
    Message,
    MessageClient,
    MessageServer,
    PeerError,
    RemoteError,
    Secret,
    message_format,
    messages,
)
from labkit.comm.message_format import CHUNK_BYTES, Incoming, Malformed, pack
from labkit.errors import ConfigError

torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
HOST = "127.0.0.1"
SECRET = Secret.new()
MAX_BYTES = 8 * 2**20
_CONTEXT = multiprocessing.get_context("fork")
DTYPES = sorted(message_format._DTYPES)


@contextmanager
def served(**options: Any) -> Iterator[MessageServer]:
    server = MessageServer(HOST, SECRET, **{"max_bytes": MAX_BYTES, **options})
    try:
        yield server
    finally:
        server.close()


@contextmanager
def connected(address: str, secret: Secret = SECRET, *, timeout_s: float = 30) -> Iterator[MessageClient]:
    client = MessageClient(address, secret, timeout_s=timeout_s)
    try:
        yield client
    finally:
        client.close()


def echo(server: MessageServer, timeout_s: float = 0.05) -> int:
    found = server.poll(timeout_s)
    for message in found:
        server.reply(message, message.header, message.tensors)
    return len(found)


def until(condition: Callable[[], object], act: Callable[[], object], limit_s: float = 30) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        act()


def ask(server: MessageServer, client: MessageClient, *tensors: torch.Tensor, **header: Any) -> Any:
    """One request and its echo, both ends in this thread."""
    request = client.send("echo", header, tensors)
    until(lambda: client.is_answered(request), lambda: echo(server))
    return client.receive(request)


@contextmanager
def other_process(function: Callable[..., object], *arguments: Any) -> Iterator[tuple[Any, int]]:
    """Run `function(*arguments, pipe)` in a process of its own; this end of the pipe, and its number."""
    mine, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=function, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield mine, process.pid or 0
    finally:
        process.kill()
        process.join()
        process.close()
        mine.close()


def _serve(behave: Callable[[MessageServer], object], port: int, parent_pid: int, told: Any) -> None:
    server = MessageServer(HOST, SECRET, port=port, max_bytes=MAX_BYTES)
    told.send(server.address)
    while os.getppid() == parent_pid:
        behave(server)


@contextmanager
def other_server(behave: Callable[[MessageServer], object], port: int = 0) -> Iterator[tuple[str, int]]:
    """A server in a process of its own; its address and process number."""
    with other_process(_serve, behave, port, os.getpid()) as (pipe, pid):
        assert pipe.poll(30)
        yield pipe.recv(), pid


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- what is sent comes -----------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(name: str) -> None:
    dtype = getattr(torch, name)
    torch.manual_seed(0)
    noise = torch.randint(0, 2 if dtype == torch.bool else 256, (4, 3 * dtype.itemsize), dtype=torch.uint8)
    tensor = noise.view(dtype)
    sent = (tensor, tensor.t(), tensor[1, 1], tensor[:0], tensor[:, :0].reshape(0, 4, 0), tensor[1:, ::2])
    with served() as server, connected(server.address) as client:
        reply = ask(server, client, *sent, a=1, b=[None, "ü"])
    assert reply.header == {"a": 1, "b": [None, "ü"]}
    for ours, theirs in zip(sent, reply.tensors, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert bits(ours) == bits(theirs)


@pytest.mark.parametrize("num", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 100])
def test_chunks_join_to_what_was_cut(num: int) -> None:
    tensor = torch.arange(num).to(torch.uint8)
    with served() as server, connected(server.address) as client:
        first, second, third = ask(server, client, tensor, torch.ones(3), tensor).tensors
    assert torch.equal(first, tensor) and torch.equal(third, tensor) and torch.equal(second, torch.ones(3))


def test_many_small_tensors_are_one_message() -> None:
    sent = [torch.full((k % 7,), float(k)) for k in range(1500)]
    with served() as server, connected(server.address) as client:
        found = ask(server, client, *sent).tensors
    assert all(torch.equal(a, b) for a, b in zip(sent, found, strict=True))


def test_the_sender_may_change_a_tensor_once_it_is_sent_and_the_receiver_may_keep_it() -> None:
    with served() as server, connected(server.address) as client:
        tensor = torch.ones(2**20)
        request = client.send("echo", tensors=[tensor])
        tensor.fill_(2)
        found: list[Message] = []
        until(lambda: found, lambda: found.extend(server.poll(0.1)))
        server.reply(found[0], tensors=found[0].tensors)
        found[0].tensors[0].fill_(3)
        assert torch.equal(client.receive(request).tensors[0], torch.ones(2**20))


def test_answers_come_in_any_order_and_much_later() -> None:
    with served() as server, connected(server.address) as client:
        requests = [client.send("pull", {"k": k}, [torch.full((k + 1,), float(k))]) for k in range(8)]
        waiting: list[Message] = []
        until(lambda: len(waiting) == 8, lambda: waiting.extend(server.poll(0.1)))
        assert [message.kind for message in waiting] == ["pull"] * 8
        for message in waiting[::-2] + waiting[::2]:
            server.reply(message, message.header, message.tensors)
        for k in (3, 0, 7, 1, 2, 6, 5, 4):
            reply = client.receive(requests[k])
            assert reply.header == {"k": k} and torch.equal(reply.tensors[0], torch.full((k + 1,), float(k)))


def test_a_refusal_names_reason_and_text_and_each_request_is_answered_once() -> None:
    with served() as server, connected(server.address) as client:
        request = client.send("fly")
        (message,) = _next(server)
        server.refuse(message, "unknown", "nobody here can fly")
        with pytest.raises(RemoteError, match="nobody here can fly") as caught:
            client.receive(request)
        assert caught.value.reason == "unknown"
        with pytest.raises(ValueError, match="request must be one that was sent and not received"):
            client.receive(request)
        client.send("keep")  # so that the server still knows the client
        (_,) = _next(server)
        with pytest.raises(ValueError, match="answered once"):
            server.reply(message)


def _next(server: MessageServer) -> list[Message]:
    found: list[Message] = []
    until(lambda: found, lambda: found.extend(server.poll(0.1)))
    return found


def _ask_much(address: str, number: int, result: Any) -> None:
    with connected(address) as client:
        is_good = True
        for k in range(10):
            sent = torch.full((100_000,), float(100 * number + k))
            reply = client.request("echo", {"k": k}, [sent])
            is_good &= reply.header == {"k": k} and bits(reply.tensors[0]) == bits(sent)
    result.send(is_good)


def test_many_clients_at_once_get_each_its_own() -> None:
    with other_server(echo) as (address, _), contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(other_process(_ask_much, address, number))[0] for number in range(8)]
        assert all(pipe.poll(60) and pipe.recv() for pipe in pipes)


# --- strangers -----------------------------------------------------------------


def _other(server_public: bytes) -> Secret:
    new = Secret.new()
    return Secret(server_public, new.server_private, new.client_public, new.client_private)


def test_a_stranger_who_knows_the_servers_public_key_is_told_no_at_once() -> None:
    with served() as server, connected(server.address, _other(SECRET.server_public)) as stranger:
        request = stranger.send("push", tensors=[torch.ones(10)])
        got: list[Message] = []
        until(lambda: stranger.is_answered(request), lambda: got.extend(server.poll(0.05)))
        with pytest.raises(PeerError, match="refused this run's secret"):
            stranger.receive(request)
        until(lambda: server.num_refused["stranger"], lambda: got.extend(server.poll(0.05)))
        with connected(server.address) as client:
            assert ask(server, client, k=1).header == {"k": 1}
        assert not got


def _raw(server: MessageServer, secret: Secret | None) -> tuple[Any, Any]:
    context: Any = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    if secret is not None:
        dealer.curve_serverkey = secret.server_public
        dealer.curve_publickey, dealer.curve_secretkey = secret.client_public, secret.client_private
    dealer.connect(server.address)
    return context, dealer


@pytest.mark.parametrize("secret", [None, Secret.new()], ids=["no key", "another server's key"])
def test_a_stranger_without_the_servers_key_is_not_heard(secret: Secret | None) -> None:
    with served() as server:
        context, dealer = _raw(server, secret)
        for frames in pack(1, "push", {}, [torch.ones(10)])[1]:
            dealer.send_multipart(frames)
        got: list[Message] = []
        until(lambda: server.num_refused["handshake"], lambda: got.extend(server.poll(0.05)))
        with connected(server.address) as client:
            assert ask(server, client, k=1).header == {"k": 1}
        assert not got and not dealer.poll(100)
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.0\r\n\r\n" * 1000,
        b"\xff" * 5000,
        bytes(10_000),
        b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(99),
    ],
    ids=["http", "ff", "zeros", "greeting"],
)
def test_garbage_on_the_wire_harms_nobody(junk: bytes) -> None:
    with served() as server, connected(server.address) as client:
        host, port = server.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as wire, socket.create_connection((host, int(port))):
            wire.sendall(junk)
            wire.settimeout(0.05)
            for k in range(3):
                assert ask(server, client, k=k).header == {"k": k}


def test_a_secret_is_text_that_says_nothing_in_a_repr() -> None:
    assert Secret.from_text(SECRET.to_text()) == SECRET
    assert "\n" not in SECRET.to_text()
    assert SECRET.client_private.decode() not in repr(SECRET)
    assert SECRET.server_private.decode() not in repr(SECRET)


@pytest.mark.parametrize(
    "text", ["", "a b c d", SECRET.to_text()[:-1], "ü" * 40, SECRET.to_text().replace(" ", "", 1)]
)
def test_refuses_what_is_no_secret_without_repeating_it(text: str) -> None:
    with pytest.raises(ConfigError, match="secret must be the text of two key pairs") as caught:
        Secret.from_text(text)
    assert not text or text not in str(caught.value)


# --- what is malformed -----------------------------------------------------------------


def head(tensors: Any, **more: Any) -> bytes:
    return json.dumps({"kind": "push", "header": {}, "tensors": tensors, **more}).encode()


def begin(content: bytes, request: int = 5) -> list[bytes]:
    return [struct.pack("<cQ", b"B", request), content]


def data(offset: int, *content: bytes, request: int = 5) -> list[bytes]:
    return [struct.pack("<cQQ", b"D", request, offset), *content]


FOUR = begin(head([["float32", [4]]]))
BAD = {
    "no frame": ("garbage", [[b""]]),
    "unknown letter": ("garbage", [[b"X" + bytes(8), b"{}"]]),
    "short first frame": ("garbage", [[b"B123", b"{}"]]),
    "too few frames": ("frames", [begin(b"{}")[:1]]),
    "too many frames": ("frames", [[*FOUR, b"more"]]),
    "not JSON": ("bad JSON", [begin(b"{kind: push}")]),
    "not UTF-8": ("bad JSON", [begin(b'{"kind": "\xff"}')]),
    "deep JSON": ("bad JSON", [begin(b"[" * 60_000)]),
    "no object": ("bad JSON", [begin(b"[]")]),
    "not finite": ("bad JSON", [begin(head([["float32", [float("nan")]]]))]),
    "header no object": ("bad JSON", [begin(head([], header=[]))]),
    "one too many": ("bad JSON", [begin(head([], more=1))]),
    "tensors no list": ("bad JSON", [begin(head({}))]),
    "tensor no pair": ("bad JSON", [begin(head([["float32"]]))]),
    "long header": ("too large", [begin(head([], header={"a": "x" * 70_000}))]),
    "unknown dtype": ("wrong type", [begin(head([["float33", [4]]]))]),
    "dtype of code": ("wrong type", [begin(head([["os.system", [4]]]))]),
    "negative": ("wrong shape", [begin(head([["float32", [-4, -1]]]))]),
    "not whole": ("wrong shape", [begin(head([["float32", [4.0]]]))]),
    "infinite": ("wrong shape", [begin(head([["float32", [0]]]).replace(b"[0]", b"[1e999]"))]),
    "truth": ("wrong shape", [begin(head([["float32", [True]]]))]),
    "no number": ("wrong shape", [begin(head([["float32", ["4"]]]))]),
    "too many dimensions": ("wrong shape", [begin(head([["float32", [1] * 17]]))]),
    "immense": ("wrong shape", [begin(head([["float32", [2**40, 2**40, 0]]]))]),
    "huge number": ("wrong shape", [begin(head([["float32", [10**300]]]))]),
    "too large": ("too large", [begin(head([["uint8", [MAX_BYTES + 1]]])), data(0, bytes(1000)), data(1000, bytes(1000))]),
    "too many bytes": ("wrong size", [FOUR, data(0, bytes(65))]),
    "too many in frames": ("wrong size", [FOUR, data(0, bytes(60), bytes(5))]),
    "no bytes": ("wrong size", [FOUR, data(0, b"")]),
    "no frames of bytes": ("frames", [FOUR, data(0)]),
    "wrong offset": ("out of order", [FOUR, data(1, bytes(16))]),
    "a gap": ("out of order", [FOUR, data(0, bytes(16)), data(32, bytes(16))]),
    "another request": ("out of order", [FOUR, data(0, bytes(16), request=6)]),
    "no beginning": ("out of order", [data(0, bytes(16)), data(16, bytes(16))]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_malformed_is_counted_once_answered_and_harms_nobody(name: str) -> None:
    reason, sent = BAD[name]
    with served() as server, connected(server.address) as client:
        context, dealer = _raw(server, SECRET)
        got: list[Message] = []
        for frames in sent:
            dealer.send_multipart(frames)
        until(lambda: server.num_refused[reason], lambda: got.extend(server.poll(0.05)))
        if reason != "garbage":
            assert dealer.poll(10_000)
            answer = Incoming(dealer.recv_multipart(), MAX_BYTES)
            assert answer.kind == "refused" and answer.header["reason"] == reason
        # The same connection is good again with the next beginning, and other clients never noticed.
        for frames in pack(9, "echo", {"k": 9}, [torch.ones(4)])[1]:
            dealer.send_multipart(frames)
        until(lambda: got, lambda: got.extend(server.poll(0.05)))
        assert [(message.request, message.header) for message in got] == [(9, {"k": 9})]
        assert ask(server, client, torch.ones(4)).tensors[0].tolist() == [1, 1, 1, 1]
        assert server.num_refused == {reason: 1}
        context.destroy(linger=0)


def test_a_message_cut_off_by_the_next_is_dropped() -> None:
    with served() as server:
        context, dealer = _raw(server, SECRET)
        for frames in (FOUR, data(0, bytes(16)), *pack(6, "good", {}, [torch.ones(4)])[1]):
            dealer.send_multipart(frames)
        assert [message.request for message in _next(server)] == [6]
        assert server.num_refused == {"unfinished": 1}
        context.destroy(linger=0)


def test_a_message_of_a_client_that_left_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_FORGET_S", 0.2)
    with served() as server:
        context, dealer = _raw(server, SECRET)
        dealer.send_multipart(FOUR)
        until(lambda: server._clients, lambda: server.poll(0.05))
        context.destroy(linger=0)
        until(lambda: not server._clients, lambda: server.poll(0.05))
        assert server.num_refused == {"unfinished": 1}


def test_a_number_used_twice_and_too_many_requests_are_refused() -> None:
    with served() as server:
        context, dealer = _raw(server, SECRET)
        got: list[Message] = []
        for request in (*range(messages.MAX_REQUESTS), 0, 99):
            dealer.send_multipart(begin(head([]), request))
        until(lambda: server.num_refused.total() == 2, lambda: got.extend(server.poll(0.05)))
        assert server.num_refused == {"repeated": 1, "too many": 1}
        assert [message.request for message in got] == list(range(messages.MAX_REQUESTS))
        answer = Incoming(dealer.recv_multipart(), MAX_BYTES)
        assert (answer.request, answer.header["reason"]) == (99, "too many")
        context.destroy(linger=0)


def test_a_frame_beyond_the_limit_ends_the_connection() -> None:
    with served() as server:
        context, dealer = _raw(server, SECRET)
        lost = dealer.get_monitor_socket(zmq.Event.DISCONNECTED)
        dealer.send_multipart([*FOUR[:1], bytes(2 * CHUNK_BYTES)])
        until(lambda: lost.poll(0), lambda: echo(server))
        with connected(server.address) as client:
            assert ask(server, client, k=1).header == {"k": 1}
        dealer.disable_monitor()
        context.destroy(linger=0)


@given(st.lists(st.lists(st.binary(max_size=40), max_size=4), max_size=4))
def test_whatever_comes_is_read_or_malformed(chunks: list[list[bytes]]) -> None:
    try:
        incoming = Incoming(chunks[0] if chunks else [], 1000)
        for frames in chunks[1:]:
            incoming.add(frames)
    except Malformed:
        pass


def test_a_sender_is_told_at_once_what_cannot_be_sent() -> None:
    with served() as server, connected(server.address) as client:
        with pytest.raises(ValueError, match="request must have at most"):
            client._max_bytes = 100
            client.send("x", tensors=[torch.ones(100)])
        with pytest.raises(ValueError, match="dtype must be one of"):
            client.send("x", tensors=[torch.ones(1).to(torch.float8_e4m3fnuz)])
        with pytest.raises(ValueError, match="header and shapes must fit in"):
            client.send("x", {"a": "x" * 70_000})
        with pytest.raises(ValueError, match="JSON compliant"):
            client.send("x", {"loss": float("nan")})
        request = client.send("x")
        (message,) = _next(server)
        with pytest.raises(ValueError, match="reply must have at most"):
            server.reply(message, tensors=[torch.ones(MAX_BYTES // 4 + 1)])
        server.reply(message)
        client.receive(request)


# --- peers that die, stall and come back -----------------------------------------------------------------


def hold(server: MessageServer) -> None:
    server.poll(0.1)


def test_a_killed_server_is_noticed_at_once_and_a_new_one_is_found() -> None:
    with other_server(echo) as (address, pid), connected(address, timeout_s=60) as client:
        client.request("echo")
        os.kill(pid, signal.SIGSTOP)  # so that the request is surely under way when it dies
        request = client.send("echo", tensors=[torch.ones(2**20)])
        os.kill(pid, signal.SIGKILL)
        began_at = time.monotonic()
        with pytest.raises(PeerError, match="is gone: the connection broke"):
            client.receive(request)
        assert time.monotonic() - began_at < 30  # long before its timeout
        with other_server(echo, int(address.rpartition(":")[2])):
            assert client.request("echo", {"k": 1}).header == {"k": 1}


def test_a_stopped_server_is_noticed_by_the_timeout_and_goes_on_later() -> None:
    with other_server(echo) as (address, pid), connected(address) as client:
        client.request("echo")
        os.kill(pid, signal.SIGSTOP)
        request = client.send("echo", {"k": 1})
        with pytest.raises(PeerError, match="did not answer request 2 in time"):
            client.receive(request, timeout_s=0.2)
        os.kill(pid, signal.SIGCONT)
        assert client.receive(request).header == {"k": 1}


def test_a_server_without_a_sign_of_life_is_noticed_long_before_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "_LOOK_FOR_LIFE_S", 0.2)
    monkeypatch.setattr(messages, "_NO_LIFE_S", 1.0)
    with other_server(hold) as (address, pid), connected(address, timeout_s=150) as client:
        request = client.send("echo")
        with pytest.raises(PeerError, match="in time"):  # it lives, so only the timeout tells
            client.receive(request, timeout_s=2)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PeerError, match="is gone"):
            client.receive(request)


def test_a_server_that_never_was_is_a_peer_error() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    with (
        connected(f"tcp://{HOST}:{port}", timeout_s=0.2) as client,
        pytest.raises(PeerError, match="in time; it is not connected"),
    ):
        client.request("echo")


def test_a_server_that_does_not_read_holds_back_its_clients() -> None:
    with served() as server, connected(server.address, timeout_s=0.3) as client:
        ask(server, client)
        client._max_bytes = MAX_BYTES
        before = psutil.Process().memory_info().rss
        tensor = torch.ones(MAX_BYTES // 4 // 4)  # a quarter of what one message may have
        num_sent = 0
        with pytest.raises(PeerError, match="answered none of 8 requests in time"):
            for _ in range(100):
                client.send("echo", tensors=[tensor])
                num_sent += 1
        assert num_sent == 8
        assert psutil.Process().memory_info().rss - before < 6 * MAX_BYTES
        answered = 0

        def work() -> None:
            nonlocal answered
            answered += echo(server)

        until(lambda: answered == 8, work)


def test_a_server_is_not_held_up_by_a_client_that_takes_no_answers() -> None:
    with served() as server, connected(server.address) as slow, connected(server.address) as quick:
        large = torch.ones(MAX_BYTES // 4)
        requests = [slow.send("pull") for _ in range(messages.MAX_REQUESTS)]
        num_sent = 0
        while num_sent < len(requests):
            for message in server.poll(0.1):
                server.reply(message, {"k": message.request}, [large])
                num_sent += 1
        assert ask(server, quick, k=1).header == {"k": 1}
        for request in requests:
            until(lambda request=request: slow.is_answered(request), lambda: server.poll(0.01))  # type: ignore[misc]
            reply = slow.receive(request)
            assert reply.header == {"k": request} and torch.equal(reply.tensors[0], large)


def test_an_answer_to_a_client_that_left_is_dropped() -> None:
    with served() as server:
        with connected(server.address) as client:
            client.send("echo")
            (message,) = _next(server)
        time.sleep(0.2)
        server.reply(message, tensors=[torch.ones(10)])
        server.reply(message)
        with connected(server.address) as client:
            assert ask(server, client, k=1).header == {"k": 1}


# --- beginning and end -----------------------------------------------------------------


def test_close_is_quick_with_messages_in_flight_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_LINGER_S", 1.0)
    server = MessageServer(HOST, SECRET, max_bytes=MAX_BYTES)
    client = MessageClient(server.address, SECRET, timeout_s=30)
    large = torch.ones(MAX_BYTES // 4)
    for _ in range(4):
        client.send("pull")
    num_sent = 0
    while num_sent < 4:
        for message in server.poll(0.1):
            server.reply(message, tensors=[large])
            num_sent += 1
    client.send("push", tensors=[large])
    began_at = time.monotonic()
    client.close()
    server.close()
    assert time.monotonic() - began_at < 20
    client.close()
    server.close()  # twice does no harm
    with pytest.raises(ValueError, match="client must be open"):
        client.send("push")


def answer_and_leave(server: MessageServer) -> None:
    if echo(server, 0.1):
        server.close()
        time.sleep(60)


def test_the_last_answer_still_comes_when_the_server_closes() -> None:
    with other_server(answer_and_leave) as (address, _), connected(address) as client:
        tensor = torch.arange(MAX_BYTES // 4).float()
        assert bits(client.request("pull", tensors=[tensor]).tensors[0]) == bits(tensor)


def test_refuses_a_port_in_use() -> None:
    with served() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"must have a free port of this machine, got {HOST}:{port}"):
            MessageServer(HOST, SECRET, port=port, max_bytes=1)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "", "::1", "eth0", "224.0.0.1"])
def test_listens_on_one_ipv4_address_only(host: str) -> None:
    with pytest.raises(ConfigError, match="must listen on one IPv4 address of this machine"):
        MessageServer(host, SECRET, max_bytes=1)


def test_refuses_an_address_of_another_machine_and_what_is_no_address() -> None:
    with pytest.raises(ConfigError, match=r"must have a free port of this machine, got 192\.0\.2\.1"):
        MessageServer("192.0.2.1", SECRET, max_bytes=1)
    with pytest.raises(ConfigError, match="address must be tcp://HOST:PORT, got 'nowhere'"):
        MessageClient("nowhere", SECRET, timeout_s=1)


def test_listens_on_the_given_address_alone() -> None:
    with served() as server:
        port = int(server.address.rpartition(":")[2])
        found = [
            c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == port and not c.raddr
        ]
        assert found == [HOST]
