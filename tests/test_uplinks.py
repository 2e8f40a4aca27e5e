"""Links between devices and their host: their curves, several devices on one, taking turns, measuring them."""

import dataclasses
import itertools
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import newest_checkpoint
from test_memory import _chain, emulated_link

import labkit
from labkit.cli import main
from labkit.cluster.placement import placements
from labkit.config import from_mapping, load_cluster
from labkit.engine.uplinks import uplink_of
from labkit.errors import ConfigError
from labkit.launch import Run
from labkit.launch.forked import run_workers
from labkit.memory import Decision, Limits, Link, Profile, Uplink, make_plan, simulate, simulate_shared
from labkit.memory.adapter import CpuAdapter
from labkit.memory.turns import EmulatedLink, LinkState, make_state, open_state
from labkit.memory.uplink import groups_behind_bridges
from labkit.runfolder import RunState

KEEP, OFFLOAD, RECOMPUTE = Decision.KEEP, Decision.OFFLOAD, Decision.RECOMPUTE
MB = 10**6
FALLING = Uplink((25e9, 20e9, 10e9, 6e9), (25e9,), (12e9,), (12e9,))


# --- curves ------------------------------------------------------------------------------------------------


def test_a_share_is_what_comes_through_together_over_those_who_copy() -> None:
    assert FALLING.share(1) == Link(25e9, 25e9) and FALLING.share(4) == Link(1.5e9, 6.25e9)
    assert FALLING.share(8).out_bytes_per_s == 6e9 / 8  # the last measured one holds for more
    assert FALLING.rate("out", 1, 1) == 12e9 and FALLING.rate("in", 2, 2) == 12e9


def test_turns_are_taken_only_where_less_comes_through_together() -> None:
    assert FALLING.falls("out") and not FALLING.falls("in")
    assert not Uplink((25e9, 24e9), (25e9,)).falls("out")  # within what measuring is good for
    assert FALLING.in_turns().share(4) == Link(25e9 / 4, 25e9 / 4)
    assert Uplink.ideal(4e9).in_turns() == Uplink.ideal(4e9)


def test_devices_below_one_port_share_it_through_any_switches() -> None:
    root = "/sys/devices/pci0000:00"
    paths = [
        f"{root}/0000:00:01.0/0000:01:00.0/0000:02:08.0/0000:03:00.0",
        f"{root}/0000:00:01.0/0000:01:00.0/0000:02:10.0/0000:04:00.0",
        f"{root}/0000:00:02.0/0000:05:00.0",
        "/sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0",
    ]
    assert groups_behind_bridges(paths) == [[0, 1], [2], [3]]
    unknown = ["/sys/bus/pci/devices/0000:17:00.0", "/sys/bus/pci/devices/0000:65:00.0"]
    assert groups_behind_bridges(unknown) == [[0], [1]]


# --- several devices on one link -----------------------------------------------------------------------------


profiles = st.lists(st.integers(1, 100), min_size=1, max_size=8).map(_chain)
plans = st.lists(st.sampled_from([KEEP, OFFLOAD, RECOMPUTE]), min_size=8, max_size=8)


@settings(deadline=None, max_examples=60)
@given(profiles, plans, st.floats(20, 2000), st.floats(0.3, 1.0))
def test_one_device_is_what_the_planner_asks(
    profile: Profile, plan: list[Decision], rate: float, share: float
) -> None:
    plan, budget = plan[: len(profile.blocks)], max(1, int(share * profile.saved_bytes))
    one = simulate(profile, plan, Link(rate, rate), budget_bytes=budget)
    (same,) = simulate_shared([profile], [plan], Uplink.ideal(rate), limits=Limits(budget))
    assert same.step_s == pytest.approx(one.step_s) and same.peak_bytes == one.peak_bytes
    assert same.stall_s == pytest.approx(one.stall_s, abs=1e-6)


@settings(deadline=None, max_examples=40)
@given(profiles, plans, st.floats(20, 2000), st.integers(2, 4))
def test_like_devices_have_equal_parts(
    profile: Profile, plan: list[Decision], rate: float, count: int
) -> None:
    plan = plan[: len(profile.blocks)]
    found = simulate_shared([profile] * count, [plan] * count, Uplink.ideal(rate))
    (first, *others) = [outcome.step_s for outcome in found]
    assert all(step_s == pytest.approx(first) for step_s in others)
    alone = simulate(profile, plan, Link(rate / count, rate / count))
    assert first == pytest.approx(alone.step_s, rel=1e-3)


@settings(deadline=None, max_examples=40)
@given(st.lists(profiles, min_size=1, max_size=4), st.floats(20, 2000))
def test_no_schedule_beats_the_floor_and_no_byte_is_lost(several: list[Profile], rate: float) -> None:
    chosen = [[OFFLOAD] * len(profile.blocks) for profile in several]
    found = simulate_shared(several, chosen, Uplink.ideal(rate))
    for way in ("out", "in"):
        copies = [t for outcome in found for t in outcome.transfers if t.direction == way]
        if copies:
            last, first = max(t.end_s for t in copies), min(t.begin_s for t in copies)
            assert last - first >= sum(t.size_bytes for t in copies) / rate * (1 - 1e-6)
    for outcome, profile in zip(found, several, strict=True):
        assert outcome.live[-1][1] == 0 and outcome.step_s >= profile.step_s - 1e-9
        for one, other in itertools.pairwise(t for t in outcome.transfers if t.direction == "out"):
            assert other.begin_s >= one.end_s - 1e-9


def test_a_device_that_is_done_leaves_its_part_to_the_others() -> None:
    small, large = _chain([10, 1]), _chain([100, 1])
    alone = simulate(large, [OFFLOAD, KEEP], Link(100, 100)).transfers[0]
    shared = simulate_shared([small, large], [[OFFLOAD, KEEP]] * 2, Uplink.ideal(100))[1].transfers[0]
    # 10 and 10 bytes at half the rate, then 90 at the whole one.
    assert alone.end_s - alone.begin_s == pytest.approx(1.0)
    assert shared.end_s - shared.begin_s == pytest.approx(1.1)


def test_gradients_on_the_same_link_take_their_part_of_the_backward_pass() -> None:
    profile = _chain([100] * 4)
    quiet = simulate(profile, [OFFLOAD] * 4, Link(220, 220))
    busy = simulate(dataclasses.replace(profile, gradient_bytes=400), [OFFLOAD] * 4, Link(220, 220))
    assert busy.step_s > quiet.step_s and sum(t.block < 0 for t in busy.transfers) == 0
    alone = simulate(dataclasses.replace(profile, gradient_bytes=440), [KEEP] * 4, Link(100, 100))
    assert alone.step_s == pytest.approx(1.0 + 4.4) and alone.stall_s == pytest.approx(2.4)


def test_planning_with_the_share_computes_again_where_the_whole_link_would_have_moved() -> None:
    profile, uplink, budget = _chain([100] * 8), Uplink.ideal(600), 400
    steps = {}
    for name, count in (("share", 4), ("alone", 1)):
        plan = make_plan(profile, uplink.share(count), budget_bytes=budget).decisions
        found = simulate_shared([profile] * 4, [plan] * 4, uplink, limits=Limits(budget))
        steps[name] = max(outcome.step_s for outcome in found)
    assert steps["share"] < 0.9 * steps["alone"]


# --- processes on one emulated link --------------------------------------------------------------------------


def _copy_for_a_while(comm: Any, fd: int, uplink: Uplink, ways_in_turns: tuple[str, ...]) -> float:
    """Bytes a second of one process's copies out."""
    state = LinkState(os.dup(fd), comm.rank)
    adapter = CpuAdapter(EmulatedLink(uplink, state), state, ways_in_turns)
    source = torch.zeros(4 * 2**20, dtype=torch.uint8)
    target = torch.empty_like(source)
    comm.barrier()
    began_at = time.perf_counter()
    copies = [adapter.copy_out(source, target) for _ in range(6)]
    for copy in copies:
        copy.wait()
    seconds = time.perf_counter() - began_at
    adapter.close()
    return 6 * source.numel() / seconds


@pytest.mark.parametrize(("ways", "wanted"), [((), 40 * MB), (("out",), 160 * MB)])
def test_processes_share_a_link_and_turns_keep_its_rate(ways: tuple[str, ...], wanted: int) -> None:
    uplink = Uplink((160 * MB, 80 * MB, 40 * MB), (160 * MB,))  # three together bring less than one
    fd = make_state()
    rates = run_workers(_copy_for_a_while, 3, fd, uplink, ways)
    os.close(fd)
    assert sum(rates) == pytest.approx(wanted, rel=0.35)
    assert max(rates) < 1.6 * min(rates)


def _die_with_the_turn(comm: Any, fd: int) -> float:
    state = LinkState(os.dup(fd), comm.rank)
    if comm.rank == 1:
        state.take_turn("out")
        comm.send(torch.zeros(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.receive_(torch.zeros(1), 1)
    began_at = time.monotonic()
    for _ in range(3):
        state.take_turn("out")
        state.end_turn("out")
    print(f"waited {time.monotonic() - began_at:.3f}", flush=True)
    return time.monotonic() - began_at


def test_a_process_that_dies_in_its_turn_holds_up_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    fd = make_state()
    with pytest.raises(AssertionError):  # a worker of the two is gone
        run_workers(_die_with_the_turn, 2, fd)
    os.close(fd)
    (waited,) = re.findall(r"waited ([0-9.]+)", capfd.readouterr().out)
    assert float(waited) < 1.0


def _take_many_turns(comm: Any, fd: int) -> list[float]:
    """When this process had its turns; the first two are always urgent."""
    state = LinkState(os.dup(fd), comm.rank)
    comm.barrier()
    at = []
    for _ in range(12 if comm.rank == 2 else 60):
        state.take_turn("in", lambda: comm.rank != 2)
        at.append(time.monotonic())
        time.sleep(0.002)
        state.end_turn("in")
    return at


def test_who_is_waited_for_overtakes_and_yet_nobody_starves() -> None:
    fd = make_state()
    first, second, patient = run_workers(_take_many_turns, 3, fd)
    os.close(fd)
    assert patient[-1] < max(first[-1], second[-1])  # it had its turns among theirs
    urgent = sorted([*first, *second])
    between = [sum(a < at < b for at in urgent) for a, b in itertools.pairwise(patient)]
    # Four overtake it, beside the two that may have come before it.
    assert max(between) <= 6 and sum(between) / len(between) >= 3


def _turns_both_ways(comm: Any, fd: int) -> int:
    """Turns of two threads, one for each direction."""
    state = LinkState(os.dup(fd), comm.rank)
    done: list[str] = []

    def work(direction: str) -> None:
        for _ in range(150):
            state.take_turn(direction)
            state.end_turn(direction)
            done.append(direction)

    threads = [threading.Thread(target=work, args=(way,)) for way in ("out", "in")]
    comm.barrier()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm.barrier()
    state.close()
    return len(done)


def test_both_directions_at_once_are_no_deadlock_to_the_kernel() -> None:
    fd = make_state()
    assert run_workers(_turns_both_ways, 4, fd) == [300] * 4
    os.close(fd)


def _die_and_come_back(comm: Any, path: Path, is_first: bool) -> float:
    state = LinkState(open_state(path), 0)
    began_at = time.monotonic()
    state.take_turn("out")
    if is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    state.end_turn("out")
    state.close()
    return time.monotonic() - began_at


def test_a_worker_that_is_started_again_does_not_wait_for_itself(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_workers(_die_and_come_back, 1, tmp_path / "l", True)
    (waited_s,) = run_workers(_die_and_come_back, 1, tmp_path / "l", False)
    assert waited_s < 1.0


def test_copies_far_between_take_their_time_too() -> None:
    adapter = CpuAdapter(emulated_link(50 * MB))
    source, target = torch.zeros(500_000, dtype=torch.uint8), torch.empty(500_000, dtype=torch.uint8)
    for _ in range(12):
        adapter.copy_out(source, target).wait()
        time.sleep(0.01)
    assert adapter.rates()["out"] == pytest.approx(50 * MB, rel=0.4)
    adapter.close()


# --- in a cluster file, and in runs --------------------------------------------------------------------------

CLUSTER: dict[str, Any] = {
    "nodes": [
        {
            "name": "a",
            "workers": 3,
            "uplinks": [{"workers": [0, 2], "out_rates": ["40MB", "20MB"], "in_rates": "40MB"}],
        }
    ]
}  # fmt: skip


def test_uplinks_of_a_cluster_file_and_what_was_measured() -> None:
    config = from_mapping({"cluster": CLUSTER})
    places, cpu = placements(config.cluster), torch.device("cpu")
    found = uplink_of(config.cluster, places[2], cpu)
    assert found.local_ranks == (0, 2) and found.given == Uplink((40e6, 20e6), (40e6,))
    assert found.ways_in_turns == {"out"}
    assert uplink_of(config.cluster, places[1], cpu).known is None
    rates = {"out_rates": [30 * MB, 29 * MB], "in_rates": [50 * MB, 50 * MB]}
    measured = {"node": "a", "workers": [0, 2], **rates}
    config = from_mapping({"cluster": {**CLUSTER, "measured_uplinks": [measured]}})
    found = uplink_of(config.cluster, places[0], cpu)
    assert found.known == Uplink((30e6, 29e6), (50e6, 50e6)) and not found.ways_in_turns


@pytest.mark.parametrize(
    ("uplinks", "message"),
    [
        ([{"workers": [0, 3], "out_rates": "1GB", "in_rates": "1GB"}], r"each of its workers \(0 to 2\) once"),
        ([{"out_rates": "1GB", "in_rates": "1GB"}] * 2, "Give each worker one uplink"),
        ([{"out_rates": "fast", "in_rates": "1GB"}], "size must be a number of bytes"),
        ([{"out_rates": [], "in_rates": "1GB"}], "out_rates"),
    ],
)  # fmt: skip
def test_bad_uplinks_are_refused(uplinks: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping({"cluster": {"nodes": [{"name": "a", "workers": 3, "uplinks": uplinks}]}})


def test_probe_measures_what_devices_bring_through_together(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {
        "name": "a",
        "workers": 3,
        "uplinks": [{"out_rates": ["80MB", "80MB", "40MB"], "in_rates": "120MB", "both_in_rates": "60MB"}],
    }
    file = tmp_path / "c.yaml"
    file.write_text("# mine\n" + json.dumps({"nodes": [node]}))
    figure = tmp_path / "f.html"
    assert main(["probe", str(file), "--links", "--figure", str(figure)]) == 0
    said = capsys.readouterr().out
    assert "devices at once" in said and "memory.device_budget" in said and figure.stat().st_size > 10_000
    assert file.read_text().startswith("# mine\n")
    (found,) = load_cluster(str(file)).measured_uplinks
    assert found.node == "a" and found.workers == (0, 1, 2)
    assert list(found.out_rates) == pytest.approx([80e6, 80e6, 40e6], rel=0.3)
    assert list(found.in_rates) == pytest.approx([120e6] * 3, rel=0.3)
    assert list(found.both_in_rates) == pytest.approx([60e6] * 3, rel=0.3)


def _finish(*overrides: str) -> Run:
    run = labkit.start(labkit.from_overrides(list(overrides)))
    status = run.wait(60.0)
    assert status.state is RunState.FINISHED, status.error
    return run


def test_runs_on_a_shared_link_plan_with_their_share_and_come_to_the_same_bits(runs: Path) -> None:
    common = [
        "name=t", "model=gpt", "model.num_layers=4", "model.width=32", "data=text", "data.max_bytes=100000",
        "engine.global_batch_size=16", "engine.max_steps=6", "launch.is_tracked=false", "cluster=1x2",
    ]  # fmt: skip
    uplink = {"out_rates": ["80MB", "40MB"], "in_rates": "80MB"}
    cluster = {"nodes": [{"name": "a", "workers": 2, "uplinks": [uplink]}]}
    plain = _finish(*common)
    moved = _finish(*common[:-1], f"cluster={json.dumps(cluster)}", "memory.device_budget=3500KB")
    for name, value in newest_checkpoint(plain)["model"].items():
        assert torch.equal(value, newest_checkpoint(moved)["model"][name]), name
    for rank in range(2):
        (report,) = moved.folder.history(rank, ("memory",))
        (plan,) = moved.folder.history(rank, ("memory_plan",))
        assert report["moved_bytes"] + report["num_recomputed"] > 0
        assert 30e6 < plan["link"][1] < 90e6  # its share, or what it had where the other one moved less


def test_nothing_is_left_of_a_link(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    state = LinkState(open_state(tmp_path / "links" / "a-0"), 0)
    state.take_turn("out")
    state.end_turn("out")
    state.close()
    assert len(os.listdir("/proc/self/fd")) == before
