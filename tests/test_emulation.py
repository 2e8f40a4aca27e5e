"""An emulated cluster is what its file says, measures as it says, and leaves nothing behind."""

import contextlib
import json
import multiprocessing.popen_fork  # noqa: F401  late imports of the standard library must not fail without rights
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from support import holders_of, namespaces_of, need, until, until_step

import labkit
from labkit.bench.emulated import (
    ForeignLoad,
    Measured,
    check_links,
    measured,
    run_emulated,
    trusted,
)
from labkit.cli import main
from labkit.cluster.placement import Placement
from labkit.comm import Communicator
from labkit.config import ClusterConfig, load_cluster
from labkit.errors import ConfigError, LabkitError
from labkit.launch import Run
from labkit.launch.emulation import (
    Emulation,
    build,
    calibrate,
    cut_link,
    heal_link,
    kernel,
    link_bytes,
    link_state,
    link_states,
    open_run,
    set_link,
    standing,
)
from labkit.launch.emulation.links import burst_bytes, links_of, shape_command
from labkit.launch.forked import WorkerFailed
from labkit.launch.supervisor import SupervisorTask, supervise
from labkit.runfolder import ProcessId, RunFolder, RunState, run_key
from labkit.tasks import load_data

WAIT_S = 60.0
FAST = ["name=t", "model=mlp", "launch.is_tracked=false", "launch.is_emulated=true"]
LONG = ["engine.num_epochs=500", "engine.step_padding_s=0.02"]


def _cluster(num_nodes: int, workers: int = 1, mbit: float | None = 1000.0) -> ClusterConfig:
    return load_cluster(f"{num_nodes}x{workers}").model_copy(update={"link_mbit": mbit})


# --- the rules, pure -----------------------------------------------------------------------------------------


def test_a_nodes_own_rate_comes_before_the_clusters() -> None:
    links = links_of(load_cluster("4x2-slow-link"))
    assert [(link.up_mbit, link.down_mbit) for link in links] == [(1000.0, 1000.0)] * 3 + [(100.0, 100.0)]
    assert len({link.address for link in links}) == 4


def test_the_token_bucket_follows_the_measured_table() -> None:
    assert [burst_bytes(rate) // 1024 for rate in (1, 100, 550, 1000, 2000, 4000)] == [
        80,
        80,
        168,
        256,
        512,
        1024,
    ]


def test_a_rate_is_told_to_tc_in_whole_bits() -> None:
    assert shape_command("eth0", 0.1) == (
        "qdisc replace dev eth0 root tbf rate 100000bit burst 81920 latency 50ms"
    )


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (_cluster(254), "cluster.nodes must be at most 253 to be emulated, one address each, got 254."),
        (
            _cluster(2, mbit=1e-6),
            "up_mbit of node node0 must be 0.01 to 100000 Mbit/s, which tc can shape, got 1e-06.",
        ),
        (_cluster(2, mbit=1e9), "which tc can shape, got 1e+09."),
        (load_cluster({"nodes": [{"name": "n" * 65, "workers": 1}]}), "must have at most 64 characters"),
    ],
)
def test_what_can_not_be_emulated_is_refused(cluster: ClusterConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        links_of(cluster)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_presets_are_found_by_name_and_as_files_that_are_not_there(tmp_path: Path) -> None:
    preset = labkit.from_overrides({"cluster": "1+3+4-1gbit", "engine.global_batch_size": 64}).cluster
    assert [len(node.workers) for node in preset.nodes] == [1, 3, 4]
    assert load_cluster("clusters/1+3+4-1gbit.yaml", base=tmp_path) == preset
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "1+3+4-1gbit.yaml").write_text("nodes: [{name: mine, workers: 1}]")
    assert load_cluster("clusters/1+3+4-1gbit.yaml", base=tmp_path).nodes[0].name == "mine"
    with pytest.raises(ConfigError, match="or a preset: .*4x4-1gbit"):
        load_cluster("4x4-2gbit")


def test_one_setting_of_a_preset_may_be_changed() -> None:
    changed = labkit.from_overrides(["cluster=2x2-100mbit", "cluster.link_mbit=10"]).cluster
    assert changed == load_cluster("2x2-100mbit").model_copy(update={"link_mbit": 10.0})


def test_a_run_on_shaped_links_is_another_run() -> None:
    plain = labkit.from_overrides(["cluster=2x2-100mbit"])
    emulated = labkit.from_overrides({"launch.is_emulated": True}, base=plain)
    assert run_key(plain, {}) != run_key(emulated, {})


# --- the network ---------------------------------------------------------------------------------------------


def _can_emulate() -> tuple[bool, str]:
    try:
        build(_cluster(1)).close()
    except ConfigError as error:
        return False, str(error)
    return True, ""


@pytest.fixture(scope="session")
def netns() -> None:
    need(*_can_emulate())


@pytest.fixture
def four(netns: None) -> Iterator[Emulation]:
    """Four nodes with links of 1 Gbit/s."""
    with build(_cluster(4)) as emulation:
        yield emulation


pytestmark = [pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]
emulated = pytest.mark.netns


@emulated
def test_four_nodes_stand_within_a_second(netns: None) -> None:
    def seconds() -> float:
        began_at = time.perf_counter()
        build(_cluster(4)).close()
        return time.perf_counter() - began_at

    assert any(seconds() < 1.0 for _ in range(10))  # alone on two cores 0.1 s; the machine may be busy


@emulated
def test_every_node_has_a_name_an_address_and_a_shm_of_its_own(four: Emulation) -> None:
    def look() -> tuple[str, list[str], list[str], str]:
        names = [f"node{index}" for index in range(4)]
        return (
            socket.gethostname(),
            [socket.gethostbyname(name) for name in names],
            [socket.gethostbyaddr(socket.gethostbyname(name))[0] for name in names],
            os.getcwd(),
        )

    for index in range(4):
        name, addresses, names, folder = four.call(f"node{index}", look)
        assert name == f"node{index}"
        assert addresses == [link.address for link in four.links]
        assert names == ["node0", "node1", "node2", "node3"]
        assert folder == os.getcwd()
    four.call("node0", lambda: Path("/dev/shm/mine").touch())
    assert four.call("node0", lambda: os.listdir("/dev/shm")) == ["mine"]
    assert four.call("node1", lambda: os.listdir("/dev/shm")) == []


@emulated
def test_nothing_of_the_host_is_reached_from_a_node(four: Emulation) -> None:
    def connect() -> None:
        socket.create_connection(("127.0.0.1", port), timeout=1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            four.call("node0", connect)


@emulated
@pytest.mark.parametrize("mbit", [1000.0, 100.0])
def test_a_link_carries_its_rate_and_no_more(netns: None, mbit: float) -> None:
    with build(_cluster(2, mbit=mbit)) as emulation:
        assert payload_mbit(emulation) == pytest.approx(0.956 * mbit, rel=0.05)


def payload_mbit(emulation: Emulation, *ends: str) -> float:
    """What a transfer reached; tried again when other work on the machine slowed it down."""
    for _ in range(4):
        found = calibrate(emulation, *ends)
        if abs(found.ratio - 1) < 0.05:
            break
    return found.mbit


@emulated
def test_up_and_down_are_shaped_apart(netns: None) -> None:
    cluster = load_cluster(
        {
            "link_mbit": 1000,
            "nodes": [
                {"name": "a", "workers": 1},
                {"name": "b", "workers": 1, "up_mbit": 200, "down_mbit": 600},
            ],
        }
    )
    with build(cluster) as emulation:
        assert payload_mbit(emulation, "a", "b") == pytest.approx(0.956 * 600, rel=0.05)
        assert payload_mbit(emulation, "b", "a") == pytest.approx(0.956 * 200, rel=0.05)


@emulated
def test_a_link_changes_under_way_and_says_how_it_stands(four: Emulation, tmp_path: Path) -> None:
    four.log = tmp_path / "log"
    set_link(four, "node1", up_mbit=None, down_mbit=500)
    state = link_state(four, "node1")
    assert (state.up_mbit, state.down_mbit, state.is_cut) == (None, 500.0, False)
    assert payload_mbit(four, "node0", "node1") == pytest.approx(0.956 * 500, rel=0.05)
    cut_link(four, "node1")
    assert four.cut_nodes() == ["node1"]
    heal_link(four, "node1")
    assert four.cut_nodes() == []
    assert payload_mbit(four, "node0", "node1") == pytest.approx(0.956 * 500, rel=0.05)
    said = [line[9:] for line in four.log.read_text().splitlines()]
    assert said == [
        "link of node1 set to unshaped up, 500 Mbit/s down",
        "link of node1 cut",
        "link of node1 healed",
    ]


@emulated
def test_counters_say_what_was_sent(four: Emulation) -> None:
    calibrate(four, "node2", "node3")
    sender, receiver = link_bytes(four, "node2"), link_bytes(four, "node3")
    assert sender.sent == pytest.approx(26e6, rel=0.02)
    assert receiver.received == sender.sent and sender.received == receiver.sent
    assert sender.loopback == 0
    assert link_states(four)[2].sent_bytes == sender.sent
    assert link_bytes(four, "node0").sent < 1000


@emulated
@pytest.mark.parametrize("call", [calibrate, cut_link, heal_link, link_bytes, link_state])
def test_an_unknown_node_is_refused(four: Emulation, call: Callable[[Emulation, str], object]) -> None:
    with pytest.raises(ConfigError, match="node must be one of node0, node1, node2, node3, got 'nod1'"):
        call(four, "nod1")


@emulated
def test_two_emulations_with_equal_addresses_do_not_meet(netns: None) -> None:
    with build(_cluster(2)) as one, build(_cluster(2, mbit=500)) as other:
        cut_link(one, "node1")
        assert payload_mbit(other) == pytest.approx(0.956 * 500, rel=0.05)
        assert other.cut_nodes() == [] and link_bytes(one, "node0").sent < 1000


@emulated
def test_what_is_let_go_of_is_gone(netns: None) -> None:
    devices, mounts = set(os.listdir("/sys/class/net")), Path("/proc/self/mounts").read_text()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with build(_cluster(3)) as emulation:
            namespaces = namespaces_of(emulation)
        assert holders_of(namespaces) == set()
    assert Path("/proc/self/mounts").read_text() == mounts
    assert len(os.listdir("/proc/self/fd")) == before
    assert set(os.listdir("/sys/class/net")) == devices
    assert not Path("/run/netns").exists() or not list(Path("/run/netns").iterdir())


@emulated
def test_a_failed_build_leaves_nothing_open(netns: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(
        "labkit.launch.emulation.builder.shape_command", lambda device, rate: "qdisc nonsense"
    )
    with pytest.raises(
        ConfigError, match="links must be ones that `tc` accepts, got: .*launch.is_emulated=false"
    ):
        build(_cluster(3))
    assert len(os.listdir("/proc/self/fd")) == before


# --- what is missing is said ---------------------------------------------------------------------------------


def _refusal(monkeypatch: pytest.MonkeyPatch, what: str) -> str:
    if what == "iproute2":
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setattr("labkit.launch.emulation.tools._SYSTEM_PATHS", ())
    elif what == "Linux":
        monkeypatch.setattr(kernel, "is_linux", lambda: False)
    with pytest.raises(ConfigError) as caught:
        build(_cluster(2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("iproute2", "launch.is_emulated must find the program `ip`, got none. Install iproute2"),
        ("Linux", "launch.is_emulated must be false except on Linux."),
    ],
)
def test_a_missing_part_is_named_and_loopback_offered(
    monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    if what == "iproute2":
        need(kernel.is_linux(), "programs are looked for on Linux alone")
    text = _refusal(monkeypatch, what)
    assert message in text and "launch.is_emulated=false" in text and "\n" not in text


@emulated
def test_without_the_right_it_says_what_to_allow(netns: None) -> None:
    def refused() -> str:
        kernel.unshare(kernel.NEW_USER)  # inside a user namespace without a mapping nothing more is allowed
        try:
            build(_cluster(2))
        except ConfigError as error:
            return str(error)
        return "it was built"

    text = kernel.in_child(refused)
    assert "launch.is_emulated must be allowed to make network namespaces, got:" in text
    assert "user.max_user_namespaces" in text and "launch.is_emulated=false" in text and "\n" not in text


# --- without root --------------------------------------------------------------------------------------------


def _as_nobody(function: Callable[[], object]) -> object:
    """Run a function in a process of a user without any right. Modules must have been imported before."""

    def drop() -> object:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        kernel._call("prctl", 4, 1, 0, 0, 0)  # a process that was root is hidden from itself in /proc
        return function()

    need(os.geteuid() == 0, "only root can become another user")
    return kernel.in_child(drop)


def _user_namespaces_allowed() -> bool:
    try:
        _as_nobody(kernel.new_user_namespace)
    except OSError:
        return False
    return True


def _sum_of_ranks(comm: Communicator, place: Placement) -> tuple[str, float]:
    total = torch.tensor([float(comm.rank)])
    comm.all_reduce_(total).wait()
    return socket.gethostname(), total.item()


@emulated
def test_a_user_without_root_builds_measures_and_changes_it(netns: None) -> None:
    need(_user_namespaces_allowed(), "user namespaces must be allowed")
    "".encode("idna")  # python looks the codec up when a name is resolved

    def work() -> tuple[str, float, object, list[object]]:
        with build(_cluster(2)) as emulation:
            ratio = calibrate(emulation).ratio
            cut_link(emulation, "node1")
            heal_link(emulation, "node1")
            set_link(emulation, "node1", up_mbit=100, down_mbit=100)
            results: list[object] = list(run_emulated(_sum_of_ranks, _cluster(2, 2), emulation=emulation))
            return str(emulation), ratio, link_state(emulation, "node1").up_mbit, results

    text, ratio, up_mbit, results = _as_nobody(work)  # type: ignore[misc]
    assert "in a user namespace" in text
    assert ratio == pytest.approx(1.0, abs=0.1)
    assert up_mbit == 100.0
    assert results == [("node0", 6.0), ("node0", 6.0), ("node1", 6.0), ("node1", 6.0)]


@emulated
def test_a_user_without_root_trains_on_it(netns: None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    import labkit.launch.preload

    signal.signal(signal.SIGINT, handler)  # the fork server ignores Ctrl-C; the tests' process must not
    need(_user_namespaces_allowed(), "user namespaces must be allowed")
    config = labkit.from_overrides([*FAST, "cluster=2x2-100mbit", "engine.max_steps=5"])
    load_data(config.data)  # what is imported late must be here before the rights are gone
    with _open_folder() as place:
        folder = RunFolder(place / "run")

        def work() -> None:
            folder.create(config)
            supervise(lambda _: None, SupervisorTask(folder, "key", None, ()))

        _as_nobody(work)
        status = folder.read_status()
        assert status.state is RunState.FINISHED, status.error
        (remark,) = folder.history(0, ("message",))
        assert "2 emulated nodes" in remark["text"] and "in a user namespace" in remark["text"]
        assert len(folder.history()) == 5
        assert folder.status_file.stat().st_uid == 65534


@contextlib.contextmanager
def _open_folder() -> Iterator[Path]:
    """A folder that another user may write to; pytest's own are closed to others."""
    import tempfile

    path = Path(tempfile.mkdtemp(prefix="labkit-test-"))
    path.chmod(0o777)
    try:
        yield path
    finally:
        shutil.rmtree(path)


# --- workers on it -------------------------------------------------------------------------------------------


def _reduce_and_count(
    comm: Communicator, place: Placement, numel: int, pid: int
) -> tuple[str, str, int, int]:
    torch.set_num_threads(1)
    tensor = torch.ones(numel)
    comm.all_reduce_(tensor).wait()
    with measured(comm, pid) as seen:
        comm.all_reduce_(tensor).wait()
    return socket.gethostname(), place.node, seen.sent_bytes, seen.loopback_bytes


@emulated
def test_all_reduce_sends_what_the_formula_says_and_nothing_over_loopback(netns: None) -> None:
    numel = 500_000
    found = run_emulated(_reduce_and_count, _cluster(4), numel, os.getpid())
    for index, (host, node, sent, loopback) in enumerate(found):
        assert host == node == f"node{index}"
        assert sent == pytest.approx(2 * 3 / 4 * 4 * numel, rel=0.03)
        assert loopback == 0


@emulated
def test_workers_of_one_node_talk_inside_it(netns: None) -> None:
    numel = 500_000
    found = run_emulated(_reduce_and_count, _cluster(2, 2), numel, os.getpid())
    assert [node for _, node, _, _ in found] == ["node0", "node0", "node1", "node1"]
    for _, _, sent, loopback in found:
        # A ring of four through two nodes: each node's link carries what one worker sends.
        assert sent == pytest.approx(2 * 3 / 4 * 4 * numel, rel=0.05)
        assert loopback == pytest.approx(2 * 3 / 4 * 4 * numel, rel=0.05)


def _fail_on_one(comm: Communicator, place: Placement) -> None:
    if comm.rank == 1:
        raise ValueError(f"boom on {place.node}")
    comm.barrier()


@emulated
def test_a_worker_that_fails_is_named(netns: None) -> None:
    with pytest.raises(WorkerFailed, match="(?s)worker 1 failed:.*ValueError: boom on node1"):
        run_emulated(_fail_on_one, _cluster(2), timeout_s=20)


@emulated
def test_one_network_serves_several_calls(four: Emulation) -> None:
    for _ in range(2):
        found = run_emulated(_sum_of_ranks, _cluster(4), emulation=four)
        assert [total for _, total in found] == [6.0] * 4
    assert link_bytes(four, "node0").sent > 0


# --- what a benchmark refuses ----------------------------------------------------------------------------------


def test_a_measurement_has_doubts_when_bytes_or_neighbours_are_wrong() -> None:
    good = Measured(seconds=1.0, sent_bytes=1_020_000, foreign_cores=0.05)
    assert good.doubts(1_000_000) == []
    assert good.doubts(2_000_000) == ["1,020,000 bytes were sent where 2,000,000 were expected"]
    assert Measured(foreign_cores=0.3).doubts() == ["other processes used 0.30 cores"]


def test_doubtful_measurements_are_thrown_away() -> None:
    results = iter([(1, ["noise"]), (2, []), (3, []), (4, ["noise"])])
    said: list[str] = []
    assert trusted(lambda: next(results), 2, said.append) == [2, 3]
    assert said == ["thrown away: noise"]
    with pytest.raises(LabkitError, match="undisturbed 1 times, got 0 in 4 tries"):
        trusted(lambda: (0, ["noise"]), 1, said.append)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc")
def test_own_work_is_not_foreign_and_a_neighbours_is() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            inside, outside = ForeignLoad(), ForeignLoad(neighbour.pid)
            began_at, used_s = time.perf_counter(), time.process_time()
            while time.process_time() - used_s < 0.5:
                pass
            ours = (time.process_time() - used_s) / (time.perf_counter() - began_at)
            # To us the neighbour is a child and so our own; to the neighbour we are foreign.
            assert outside.cores() - inside.cores() == pytest.approx(ours, rel=0.2)
        finally:
            neighbour.kill()


@emulated
def test_links_that_are_not_what_they_are_said_to_be_are_refused(
    four: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(*arguments: object) -> object:
        found = calibrate(*arguments)  # type: ignore[arg-type]
        return replace(found, mbit=found.mbit * 0.9)

    said: list[str] = []
    monkeypatch.setattr("labkit.bench.emulated.calibrate", slower)
    with pytest.raises(LabkitError, match="link node0 -> node1 must carry 956.4 Mbit/s of payload within 5%"):
        check_links(four, said.append)
    assert len(said) == 3


# --- runs on it ------------------------------------------------------------------------------------------------


def _start(*overrides: str) -> Run:
    return labkit.start(labkit.from_overrides([*FAST, *overrides]))


@emulated
@pytest.mark.parametrize("launcher", ["local", pytest.param("elastic", marks=pytest.mark.slow)])
def test_a_run_gives_the_same_losses_as_on_loopback(netns: None, runs: Path, launcher: str) -> None:
    settings = ["cluster=2x2-100mbit", "engine.max_steps=12", f"launch.launcher={launcher}"]
    curves = []
    for where in ("launch.is_emulated=true", "launch.is_emulated=false"):
        run = _start(*settings, where)
        assert run.wait(WAIT_S).state is RunState.FINISHED, run.status().error
        curves.append([event["values"]["train/loss"] for event in run.folder.history()])
        (remark,) = [event["text"] for event in run.folder.history(0, ("message",))]
        assert remark in run.folder.supervisor_log.read_text()
        hosts = {event["node"] for rank in range(4) for event in run.folder.history(rank, ("start",))}
        assert hosts == {"node0", "node1"}
        if where.endswith("true"):
            assert "2 emulated nodes: 10.77.0.1-2, every link 100 Mbit/s; TCP reno" in remark
        else:
            assert "links are not shaped" in remark
    assert curves[0] == curves[1] and len(curves[0]) == 12


@emulated
def test_every_strategy_trains_on_it(netns: None, runs: Path) -> None:
    losses = {}
    for sync in ("allreduce", "hierarchical"):
        run = _start("cluster=2x2-100mbit", "engine.max_steps=6", f"sync={sync}")
        assert run.wait(WAIT_S).state is RunState.FINISHED, run.status().error
        losses[sync] = [event["values"]["train/loss"] for event in run.folder.history()]
    assert losses["allreduce"] == pytest.approx(losses["hierarchical"], rel=1e-4)


@emulated
def test_a_killed_supervisor_leaves_no_process_no_namespace_and_no_cable(netns: None, runs: Path) -> None:
    devices = set(os.listdir("/sys/class/net"))
    run = _start("cluster=2x2-100mbit", *LONG)
    until_step(run, 3)
    with open_run(run.folder) as emulation:
        namespaces = namespaces_of(emulation)
    assert len(namespaces) >= 3 * 3  # of two nodes and the switch
    pids = [worker.pid for worker in run.status().workers if worker.pid]
    owner = run.status().owner
    assert owner is not None and len(pids) == 4
    assert holders_of(namespaces) == {owner.pid, *pids}
    os.kill(owner.pid, signal.SIGKILL)
    until(lambda: not any(psutil.pid_exists(pid) for pid in [owner.pid, *pids]), "end of all processes", 10)
    assert holders_of(namespaces) == set()
    assert set(os.listdir("/sys/class/net")) == devices
    assert run.status().state is RunState.LOST
    with pytest.raises(ConfigError, match="run must be going on"):
        open_run(run.folder)


@emulated
def test_a_cut_link_ends_the_run_in_time_and_names_the_node(netns: None, runs: Path) -> None:
    run = _start("cluster=3x1", *LONG, "launch.comm_timeout_s=2")
    until_step(run, 3)
    with open_run(run.folder) as emulation:
        cut_link(emulation, "node2")
    began_at = time.monotonic()
    status = run.wait(WAIT_S)
    assert status.state is RunState.FAILED and time.monotonic() - began_at < 15
    assert status.error is not None and status.error.node == "node2"
    assert status.error.message.startswith("link of node2 is cut: worker ")
    assert "link of node2 cut" in run.folder.supervisor_log.read_text()


@emulated
def test_a_run_survives_a_link_that_is_healed_in_time(netns: None, runs: Path) -> None:
    run = _start("cluster=2x1", *LONG, "launch.comm_timeout_s=30")
    until_step(run, 3)
    with open_run(run.folder) as emulation:
        cut_link(emulation, "node1")
        time.sleep(0.5)
        stuck_at = run.folder.history()[-1]["step"]
        time.sleep(0.5)
        assert run.folder.history()[-1]["step"] == stuck_at
        heal_link(emulation, "node1")
    until_step(run, stuck_at + 10)
    assert run.stop().state is RunState.KILLED


@emulated
def test_a_slower_link_slows_the_run_down(netns: None, runs: Path) -> None:
    # 5.2 MB of gradients: 44 ms at 1 Gbit/s, 440 ms at 100 Mbit/s.
    model = ["model.hidden_sizes=[4096, 256]", "engine.num_epochs=500"]
    run = _start("cluster=2x1", "cluster.link_mbit=1000", *model)
    until_step(run, 5)
    with open_run(run.folder) as emulation:
        set_link(emulation, "node1", up_mbit=100, down_mbit=100)
    changed_at = run.folder.history()[-1]["step"]
    until_step(run, changed_at + 5)
    run.stop()
    times = [event["values"]["perf/step_ms"] for event in run.folder.history()]
    assert statistics.median(times[changed_at + 1 :]) > 2 * statistics.median(times[1:changed_at])


@emulated
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=2x1", "cluster.link_mbit=1e-6"], "up_mbit of node node0 must be 0.01 to 100000 Mbit/s"),
        (["cluster=254x1", "engine.global_batch_size=254"], "cluster.nodes must be at most 253"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(runs: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _start(*overrides)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert list(runs.iterdir()) == []


def test_a_notebook_that_declares_no_emulation_can_not_be_emulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    notebook = Path(__file__).parent.parent / "notebooks" / "00_quickstart.ipynb"
    assert main(["run", str(notebook), "--emulate", "--dry-run"]) == 2
    assert "parameter 'is_emulated' must be one that the notebook declares" in capsys.readouterr().err


def test_real_machines_are_not_emulated(runs: Path) -> None:
    with pytest.raises(ConfigError, match="launch.is_emulated must be false with a rendezvous"):
        labkit.start(
            labkit.from_overrides([*FAST, "cluster=2x1"]), rendezvous="127.0.0.1:29400", node="node0"
        )


# --- clusters that stand by themselves ---------------------------------------------------------------------------


@pytest.fixture
def standing_cluster(netns: None, runs: Path) -> Iterator[str]:
    assert main(["cluster", "up", "2x2-100mbit", "--name", "mine"]) == 0
    yield "mine"
    for record in standing.all_standing():
        standing.down(record.name)


def _json_of(capsys: pytest.CaptureFixture[str], *words: str) -> object:
    capsys.readouterr()
    assert main(list(words)) == 0
    return json.loads(capsys.readouterr().out)


@emulated
def test_a_standing_cluster_is_shown_changed_and_taken_down(
    standing_cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = _json_of(capsys, "cluster", "status", "--json")  # type: ignore[misc]
    assert shown["name"] == "mine"
    assert [(link["node"], link["up_mbit"]) for link in shown["links"]] == [
        ("node0", 100.0),
        ("node1", 100.0),
    ]
    changed = _json_of(capsys, "cluster", "link", "node1", "--up", "5", "--json")
    assert (changed["up_mbit"], changed["down_mbit"]) == (5.0, 100.0)  # type: ignore[index]
    cut = _json_of(capsys, "cluster", "link", "node1", "--cut", "--cluster", "mine", "--json")
    assert cut["is_cut"] and cut["up_mbit"] == 5.0  # type: ignore[index]
    healed = _json_of(capsys, "cluster", "link", "node1", "--heal", "--json")
    assert not healed["is_cut"]  # type: ignore[index]
    holder = standing.find("mine").emulation.holder
    assert main(["cluster", "down", "mine"]) == 0
    assert not holder.is_alive()
    capsys.readouterr()
    assert main(["cluster", "status"]) == 0
    assert "No cluster stands. Presets: " in capsys.readouterr().out


@emulated
def test_a_run_is_put_on_the_standing_cluster_of_its_name(
    standing_cluster: str, capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    words = ["run", "model=mlp", "engine.max_steps=3", "launch.is_tracked=false"]
    assert main([*words, "--cluster", "mine", "--emulate"]) == 0
    (run,) = labkit.all_runs(runs)
    assert "standing cluster mine, 2 emulated nodes" in run.supervisor_log.read_text()
    with standing.open_standing("mine") as emulation:
        assert link_bytes(emulation, "node0").sent > 10_000


@emulated
def test_a_killed_holder_leaves_nothing_standing(standing_cluster: str, runs: Path) -> None:
    holder: ProcessId = standing.find("mine").emulation.holder
    os.kill(holder.pid, signal.SIGKILL)
    until(lambda: not holder.is_alive(), "end of the holder", 5)
    assert standing.all_standing() == []
    assert not standing.state_file("mine").exists()


@emulated
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["up", "2x2-100mbit", "--name", "mine"], "name of a cluster must be free, got 'mine'"),
        (["up", "2x2", "--name", "../mine"], "name of a cluster must be letters, digits"),
        (["up", "nothing"], "cluster must be NODESxWORKERS, a .yaml file or a mapping, got 'nothing'"),
        (["down", "min"], "cluster must be one that stands, got 'min'. Did you mean 'mine'?"),
        (["down"], "what to take down must be names or --all"),
        (["link", "nod1"], "node must be one of node0, node1, got 'nod1'"),
        (
            ["link", "node1", "--cut", "--mbit", "5"],
            "change of a link must be one of a rate, --cut and --heal",
        ),
        (["link", "node1", "--mbit", "1e-9"], "up_mbit of node node1 must be 0.01 to 100000"),
        (["link", "node1", "--run", "latest"], "run must be a run folder"),
        (
            ["link", "node1", "--run", "x", "--cluster", "mine"],
            "where the link is must be --cluster or --run",
        ),
    ],
)
def test_bad_words_are_refused_in_one_line(
    standing_cluster: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    capsys.readouterr()
    assert main(["cluster", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


@emulated
def test_a_run_on_loopback_has_no_link_to_change(netns: None, runs: Path) -> None:
    run = _start("cluster=1x1", "engine.max_steps=1", "launch.is_emulated=false")
    run.wait(WAIT_S)
    with pytest.raises(ConfigError, match="run must be emulated, got .*, which is on loopback"):
        open_run(run.folder)
