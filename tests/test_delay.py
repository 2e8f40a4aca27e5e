"""Added latency: every frame is late by half a round trip, at every rate, and the process that does it ends."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch  # noqa: F401  a supervisor imports it: before the rights are gone
from support import holders_of, namespaces_of, need, until

import labkit
from labkit.cli import main
from labkit.config import ClusterConfig, from_overrides, load_cluster
from labkit.errors import ConfigError
from labkit.launch import Run
from labkit.launch.emulation import (
    Emulation,
    build,
    calibrate,
    cut_link,
    delay,
    heal_link,
    kernel,
    link_bytes,
    link_state,
    open_run,
    set_link,
    standing,
)
from labkit.launch.emulation.delay import Switch
from labkit.runfolder import RunState

pytestmark = [pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]
emulated = pytest.mark.netns

WAIT_S = 60.0
RUN = ["name=t", "model=mlp", "launch.is_tracked=false", "launch.is_emulated=true"]


def _cluster(num_nodes: int, rtt_ms: float | None, mbit: float | None = 200.0) -> ClusterConfig:
    changes = {"link_mbit": mbit, "rtt_ms": rtt_ms}
    return load_cluster(f"{num_nodes}x1").model_copy(update=changes)


class _Wires:
    """Three ports: what a test sends at its ends, the switch takes, and the other way round."""

    def __init__(self, delay_s: float) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(3)]
        self.ends = [mine for mine, _ in pairs]
        self._taps = [theirs for _, theirs in pairs]
        for end, tap in pairs:
            end.settimeout(5.0)
            tap.setblocking(False)
        self._read_end, self.lifeline = os.pipe()
        taps = [tap.fileno() for tap in self._taps]
        self._thread = threading.Thread(target=Switch(taps, delay_s, self._read_end).run)
        self._thread.start()

    def close(self) -> None:
        os.close(self.lifeline)
        self._thread.join(5.0)
        assert not self._thread.is_alive(), "the switch must end with the last holder of its lifeline"
        for end in (*self.ends, *self._taps):
            end.close()
        os.close(self._read_end)


@pytest.fixture
def wires(request: pytest.FixtureRequest) -> Iterator[_Wires]:
    made = _Wires(delay_s=getattr(request, "param", 0.03))
    yield made
    made.close()


def _frame(to: int, sender: int, text: str) -> bytes:
    header, addresses = bytes(10), bytes([2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, sender])
    return header + addresses + text.encode()


def _is_silent(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        end.recv(100)
    except BlockingIOError:
        return True
    finally:
        end.settimeout(5.0)
    return False


def test_a_frame_comes_as_it_was_and_no_earlier_than_its_delay(wires: _Wires) -> None:
    for _ in range(5):
        sent_at = time.monotonic()
        wires.ends[0].send(_frame(1, 0, "hello"))
        assert wires.ends[1].recv(100) == _frame(1, 0, "hello")
        assert time.monotonic() - sent_at >= 0.03


def test_frames_wait_together_and_keep_their_order(wires: _Wires) -> None:
    sent_at = time.monotonic()
    for index in range(5):
        wires.ends[0].send(_frame(1, 0, str(index)))
        time.sleep(0.005)
    assert [wires.ends[1].recv(100)[-1:] for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    assert time.monotonic() - sent_at < 5 * 0.03


def test_an_unknown_receiver_is_looked_for_everywhere_and_a_known_one_alone_gets_it(wires: _Wires) -> None:
    wires.ends[1].send(_frame(255, 1, "here I am"))
    assert [wires.ends[index].recv(100)[-9:] for index in (0, 2)] == [b"here I am"] * 2
    wires.ends[0].send(_frame(1, 0, "for you"))
    assert wires.ends[1].recv(100).endswith(b"for you")
    time.sleep(0.02)
    assert _is_silent(wires.ends[2]) and _is_silent(wires.ends[0])


@pytest.mark.parametrize("wires", [0.3], indirect=True)  # all are sent before the first has waited
def test_what_does_not_fit_the_queue_is_dropped_and_later_frames_go_on(
    wires: _Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delay, "_MOST_WAITING_BYTES", 2 * len(_frame(1, 0, "0")))
    for index in range(3):
        wires.ends[0].send(_frame(1, 0, str(index)))
    wires.ends[2].send(_frame(1, 2, "x"))  # the queue of another port has room
    assert sorted(wires.ends[1].recv(100)[-1:] for _ in range(3)) == [b"0", b"1", b"x"]
    wires.ends[0].send(_frame(1, 0, "3"))
    assert wires.ends[1].recv(100).endswith(b"3")


# --- the network ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tun() -> None:
    try:
        build(_cluster(1, 1.0)).close()
    except ConfigError as error:
        need(False, str(error))


@pytest.fixture
def late(tun: None) -> Iterator[Emulation]:
    """Three nodes, 200 Mbit/s, a round trip of 10 ms."""
    with build(_cluster(3, 10.0)) as emulation:
        yield emulation


def _pings_s(emulation: Emulation, source: str, target: str | None, count: int = 20) -> list[float]:
    """Round trips of a byte from one node to another, or to the switch (None), over a warm TCP connection."""
    network = emulation.nodes[source].network
    addresses: dict[str | None, str] = {link.node: link.address for link in emulation.links}
    address = addresses.get(target, emulation.store_host)

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(1):
            connection.send(data)

    def ping() -> list[float]:
        with socket.create_server((address, 0)) as server:
            child = os.fork()
            if child == 0:
                try:
                    answer(server)
                finally:
                    os._exit(0)
            kernel.enter([network])
            found = []
            with socket.create_connection(server.getsockname(), timeout=10) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(count):
                    began_at = time.perf_counter()
                    connection.send(b"x")
                    connection.recv(1)
                    found.append(time.perf_counter() - began_at)
            os.waitpid(child, 0)
            return found

    return emulation.call(target, ping)


@emulated
@pytest.mark.parametrize("rtt_ms", [1.0, 20.0])
def test_a_round_trip_takes_what_was_asked_and_little_more(tun: None, rtt_ms: float) -> None:
    with build(_cluster(2, rtt_ms)) as emulation:
        for target in ("node1", None):
            found_ms = [1e3 * found for found in _pings_s(emulation, "node0", target)]
            assert min(found_ms) >= rtt_ms
            assert min(found_ms) < rtt_ms + 3.0, found_ms  # others may be later still: the machine is shared


@emulated
def test_without_it_a_round_trip_takes_no_time(tun: None) -> None:
    with build(_cluster(2, None)) as emulation:
        assert min(_pings_s(emulation, "node0", "node1")) < 1e-3
        assert emulation.rtt_ms is None and "round trip" not in str(emulation)


@emulated
@pytest.mark.parametrize(("rtt_ms", "mbit"), [(10.0, 200.0), (5.0, 1000.0)])
def test_a_late_link_still_carries_its_rate(tun: None, rtt_ms: float, mbit: float) -> None:
    with build(_cluster(2, rtt_ms, mbit)) as emulation:
        assert any(abs(calibrate(emulation).ratio - 1) < 0.05 for _ in range(4))


@emulated
def test_a_late_link_is_changed_cut_and_healed(late: Emulation) -> None:
    set_link(late, "node1", up_mbit=None, down_mbit=50)
    state = link_state(late, "node1")
    assert (state.up_mbit, state.down_mbit, state.is_cut, state.rtt_ms) == (None, 50.0, False, 10.0)
    assert any(abs(calibrate(late, "node0", "node1").mbit / (0.956 * 50) - 1) < 0.05 for _ in range(4))
    cut_link(late, "node1")
    assert late.cut_nodes() == ["node1"] and link_state(late, "node1").is_cut
    assert min(_pings_s(late, "node0", "node2")) >= 0.01
    heal_link(late, "node1")
    assert late.cut_nodes() == [] and min(_pings_s(late, "node0", "node1")) >= 0.01


@emulated
def test_bytes_are_counted_as_without_it(late: Emulation) -> None:
    calibrate(late, "node0", "node1")
    sender, receiver = link_bytes(late, "node0"), link_bytes(late, "node1")
    assert sender.sent == pytest.approx(26e6, rel=0.1) and receiver.received == sender.sent
    assert link_bytes(late, "node2").sent < 1000


@emulated
def test_its_process_ends_with_it_and_nothing_stays_open(tun: None) -> None:
    before, devices = len(os.listdir("/proc/self/fd")), set(os.listdir("/sys/class/net"))
    with build(_cluster(2, 5.0)) as emulation:
        namespaces = namespaces_of(emulation)
        assert emulation.delay is not None
        switch = emulation.delay.pid
        assert switch is not None and holders_of(namespaces) == {os.getpid(), switch}
        # Nothing but three standard streams, three devices, lifeline, timer and poll.
        until(lambda: psutil.Process(switch).num_fds() == 9, "end of what it inherited", 5)
    assert not psutil.pid_exists(switch) and holders_of(namespaces) == set()
    assert len(os.listdir("/proc/self/fd")) == before
    assert set(os.listdir("/sys/class/net")) == devices


@emulated
def test_all_links_are_cut_when_its_process_is_killed(late: Emulation) -> None:
    assert late.delay is not None and late.delay.pid is not None
    os.kill(late.delay.pid, signal.SIGKILL)
    until(lambda: late.cut_nodes() == ["node0", "node1", "node2"], "news of it", 5)


@emulated
def test_an_idle_one_costs_nothing(late: Emulation) -> None:
    assert late.delay is not None
    process = psutil.Process(late.delay.pid)
    _pings_s(late, "node0", "node1")
    before = sum(process.cpu_times()[:2])
    time.sleep(1.0)
    assert sum(process.cpu_times()[:2]) - before < 0.05


# --- what is missing is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0", "-1", "20000", "fast"])
def test_a_round_trip_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="cluster.rtt_ms must be"):
        from_overrides(["cluster=2x1", f"cluster.rtt_ms={value}"])


@emulated
@pytest.mark.parametrize("what", ["no device", "no right"])
def test_without_tap_devices_it_says_what_is_missing(
    tun: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reason = "No such file or directory"
    if what == "no device":
        monkeypatch.setattr(delay, "DEVICE", "/dev/nothing")
        text = _refusal()
    else:
        need(os.geteuid() == 0, "only root can become another user")
        need(not os.stat("/dev/net/tun").st_mode & 0o006, "TAP devices must be root's alone")
        reason, text = "Permission denied", kernel.in_child(_refusal_of_nobody)
        need("network namespaces" not in text, "user namespaces must be allowed")
    assert f"{delay.DEVICE} readable and writable, got: {reason}. Run as root" in text
    assert text.startswith("cluster.rtt_ms must find ") and "leave rtt_ms out" in text and "\n" not in text
    assert len(os.listdir("/proc/self/fd")) == before


def _refusal() -> str:
    with pytest.raises(ConfigError) as caught:
        build(_cluster(2, 5.0))
    return str(caught.value)


def _refusal_of_nobody() -> str:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    kernel._call("prctl", 4, 1, 0, 0, 0)  # a process that was root is hidden from itself in /proc
    return _refusal()


# --- runs on it ------------------------------------------------------------------------------------------------


def _start(*overrides: str) -> Run:
    return labkit.start(from_overrides([*RUN, "cluster=2x1", "cluster.rtt_ms=5", *overrides]))


@emulated
@pytest.mark.parametrize("launcher", ["local", pytest.param("elastic", marks=pytest.mark.slow)])
def test_a_run_is_late_and_says_so(tun: None, runs: Path, launcher: str) -> None:
    run = _start("cluster.link_mbit=100", "engine.max_steps=10", f"launch.launcher={launcher}")
    assert run.wait(WAIT_S).state is RunState.FINISHED, run.status().error
    (remark,) = run.folder.history(0, ("message",))
    assert "every link 100 Mbit/s, round trip 5 ms; TCP" in remark["text"]
    assert all(event["values"]["perf/step_ms"] > 5 for event in run.folder.history())


@emulated
def test_on_loopback_a_run_says_that_it_is_not_late(runs: Path) -> None:
    run = _start("engine.max_steps=1", "launch.is_emulated=false")
    assert run.wait(WAIT_S).state is RunState.FINISHED, run.status().error
    assert "links are not shaped" in run.folder.supervisor_log.read_text()


@emulated
def test_nothing_is_left_of_a_run_whose_supervisor_is_killed(tun: None, runs: Path) -> None:
    run = _start("engine.num_epochs=500")
    until(lambda: len(run.folder.history()) > 3, "steps")
    with open_run(run.folder) as emulation:
        assert min(_pings_s(emulation, "node0", "node1")) >= 0.005
        namespaces = namespaces_of(emulation)
    status = run.status()
    assert status.owner is not None
    pids = holders_of(namespaces)
    assert len(pids - {status.owner.pid, *(worker.pid for worker in status.workers)}) == 1  # the switch
    os.kill(status.owner.pid, signal.SIGKILL)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "end of all processes", 10)
    assert holders_of(namespaces) == set()
    assert run.status().state is RunState.LOST


@emulated
def test_a_standing_cluster_shows_it_and_its_last_user_ends_it(
    tun: None, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "{link_mbit: 100, rtt_ms: 5, nodes: [{name: a, workers: 1}, {name: b, workers: 1}]}"
    )
    assert main(["cluster", "up", str(tmp_path / "mine.yaml")]) == 0
    try:
        assert "every link 100 Mbit/s, round trip 5 ms" in capsys.readouterr().out
        assert main(["cluster", "status"]) == 0
        assert "5 ms" in capsys.readouterr().out
        assert main(["cluster", "link", "b", "--mbit", "50", "--json"]) == 0
        changed = json.loads(capsys.readouterr().out)
        assert (changed["up_mbit"], changed["rtt_ms"]) == (50.0, 5.0)
        with standing.open_standing("mine") as emulation:
            namespaces = namespaces_of(emulation)
            standing.down("mine")
            assert min(_pings_s(emulation, "a", "b")) >= 0.005
            assert len(holders_of(namespaces)) == 2  # this process and the switch
        until(lambda: holders_of(namespaces) == set(), "end of the switch", 5)
    finally:
        for record in standing.all_standing():
            standing.down(record.name)
