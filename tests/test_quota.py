"""Processor quotas: shares in proportion to speed, really enforced, and gone when their owner is."""

import contextlib
import os
import shutil
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch  # noqa: F401  a supervisor imports it: before the rights are gone
from support import need, until, until_step

import labkit
from labkit.cli import main
from labkit.config import EngineConfig, from_overrides
from labkit.engine import quota
from labkit.engine.quota import Controller, Quotas, cores_of, enter, find_controller, num_threads
from labkit.errors import ConfigError
from labkit.launch import Run
from labkit.launch.emulation import build
from labkit.launch.emulation.kernel import in_child
from labkit.runfolder import ProcessId, RunState

pytestmark = [pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")]

WAIT_S = 60.0
UNLIKE = "cluster={nodes: [{name: a, workers: 1}, {name: b, workers: 1, speed: 0.25}]}"
RUN = ["name=t", "model=mlp", "launch.is_tracked=false", "launch.is_emulated=true", "engine.num_threads=1"]


# --- the rules, pure -------------------------------------------------------------------------------------------


def test_the_fastest_worker_has_all_its_cores_and_the_others_their_part() -> None:
    assert cores_of([1, 0.5, 0.25], 1) == [1.0, 0.5, 0.25]
    assert cores_of([4, 1], 2) == [2.0, 0.5]
    assert cores_of([3, 3], 1) == [1.0, 1.0]


def test_a_share_that_the_kernel_can_not_give_is_refused() -> None:
    assert cores_of([1, 0.05], 1) == [1.0, 0.05]
    with pytest.raises(ConfigError) as caught:
        cores_of([1, 0.01], 1)
    assert "speed of worker 1 must be at least 0.05 of the fastest one's" in str(caught.value)
    assert "got 0.01 of it" in str(caught.value) and "engine.step_padding_s" in str(caught.value)


def test_threads_are_what_is_said_or_a_part_of_the_cores() -> None:
    assert num_threads(EngineConfig(num_threads=3), 8) == 3
    assert num_threads(EngineConfig(), 1) == len(os.sched_getaffinity(0))
    assert num_threads(EngineConfig(), 10_000) == 1


def test_quotas_are_for_unlike_speeds_without_padding() -> None:
    assert from_overrides([UNLIKE, "launch.is_emulated=true"]).has_quotas
    assert not from_overrides([UNLIKE, "launch.is_emulated=true", "engine.step_padding_s=0.1"]).has_quotas
    assert not from_overrides([UNLIKE, "engine.step_padding_s=0.1"]).has_quotas
    assert not from_overrides(["cluster=2x1", "launch.is_emulated=true"]).has_quotas
    like = UNLIKE.replace("workers: 1}", "workers: 1, speed: 0.25}")
    assert not from_overrides([like]).has_quotas


def test_unlike_speeds_that_nothing_emulates_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        from_overrides([UNLIKE])
    text = str(caught.value)
    assert "cluster speeds must be emulated by padded compute or by processor quotas" in text
    assert "got speeds 0.25, 1 with neither" in text
    assert "engine.step_padding_s" in text and "launch.is_emulated" in text and "\n" not in text


# --- both interfaces of the kernel -----------------------------------------------------------------------------


def _mounted(folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_v2: bool) -> Path:
    """A folder that looks like a mounted cpu controller, but for what the kernel makes in a new group."""
    root = folder / "cpu"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpu memory")
    (root / "cgroup.subtree_control").write_text("memory")
    mounts = folder / "mounts"
    kind = "cgroup2 rw,nosuid" if is_v2 else "cgroup rw,cpu,cpuacct"
    mounts.write_text(f"proc /proc proc rw 0 0\ncgroup {folder} cgroup rw,cpuset 0 0\nx {root} {kind} 0 0\n")
    monkeypatch.setattr(quota, "_MOUNTS", mounts)
    return root


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_group_is_told_its_quota_by_the_interface_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_v2: bool
) -> None:
    root = _mounted(tmp_path, monkeypatch, is_v2=is_v2)
    assert find_controller() == Controller(root, is_v2=is_v2)
    quotas = Quotas([1.0, 0.25])
    told = [{file.name: file.read_text() for file in group.iterdir()} for group in quotas.groups]
    if is_v2:
        assert told == [{"cpu.max": "20000 20000"}, {"cpu.max": "5000 20000"}]
        assert (root / "cgroup.subtree_control").read_text() == "+cpu"
    else:
        assert [(t["cpu.cfs_period_us"], t["cpu.cfs_quota_us"]) for t in told] == [
            ("20000", "20000"),
            ("20000", "5000"),
        ]


def test_a_machine_without_the_controller_is_told_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(quota, "_MOUNTS", mounts)
    for text in (None, f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"):  # no Linux; a v2 without the controller
        if text is not None:
            mounts.write_text(text)
        quota.sweep()  # nothing to do, nothing to complain about
        with pytest.raises(ConfigError) as caught:
            Quotas([1.0, 0.5])
        message = str(caught.value)
        assert "got: no cpu controller among the mounted cgroup file systems" in message
        assert "engine.step_padding_s" in message and "\n" not in message


def test_more_cores_than_there_are_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _mounted(tmp_path, monkeypatch, is_v2=False)
    cores = len(os.sched_getaffinity(0))
    few = Quotas([0.5, 0.25])
    assert str(few) == "processor quotas of 0.5, 0.25 cores"
    for group in few.groups:
        shutil.rmtree(group)
    assert str(Quotas([1.0] + [0.5] * 2 * cores)).endswith(
        f"MORE THAN THE {cores} HERE: speeds come out less unlike"
    )


# --- the kernel's own ------------------------------------------------------------------------------------------


def _groups() -> set[Path]:
    controller = find_controller()
    return set() if controller is None else set(controller.folder.glob("labkit-*"))


def _own_groups(before: set[Path]) -> set[Path]:
    return _groups() - before


@pytest.fixture
def before() -> Iterator[set[Path]]:
    """Groups of others; a test leaves none of its own."""
    try:
        Quotas([1.0]).remove()
    except ConfigError as error:
        need(False, str(error))
    found = _groups()
    yield found
    until(lambda: _own_groups(found) == set(), "removal of all groups", 5)


def _work_done(group: Path) -> int:
    """Rounds of pure computing within half a second in a group."""

    def work() -> int:
        enter(group)
        rounds, end = 0, time.perf_counter() + 0.5
        while time.perf_counter() < end:
            sum(range(1000))
            rounds += 1
        return rounds

    return in_child(work)


def test_work_done_is_in_proportion_to_the_quotas(before: set[Path]) -> None:
    quotas = Quotas(cores_of([1, 0.25], 1))
    try:
        ratios = []
        for _ in range(4):  # other work on the machine takes from the fast one more than from the slow one
            ratios.append(_work_done(quotas.groups[0]) / _work_done(quotas.groups[1]))
            if 3.0 < ratios[-1] < 5.5:
                break
        assert 3.0 < ratios[-1] < 5.5, ratios
    finally:
        quotas.remove()
    assert _own_groups(before) == set()


def test_groups_of_a_killed_owner_are_swept_and_those_of_a_living_one_kept(before: set[Path]) -> None:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            Quotas([1.0, 0.5])
            signal.pause()
        os._exit(1)
    until(lambda: len(_own_groups(before)) == 2, "groups")
    quota.sweep()
    assert len(_own_groups(before)) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    quota.sweep()
    assert _own_groups(before) == set()


def test_without_the_right_it_says_that_root_is_needed(before: set[Path]) -> None:
    def refused() -> str:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        with pytest.raises(ConfigError) as caught:
            Quotas([1.0, 0.5])
        return str(caught.value)

    need(os.geteuid() == 0, "only root can become another user")
    text = in_child(refused)
    assert "for which root and the cgroup cpu controller are needed, got: Permission denied: /" in text
    assert "engine.step_padding_s" in text and "\n" not in text


# --- runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def emulated(before: set[Path]) -> set[Path]:
    try:
        build(from_overrides(["cluster=1x1"]).cluster).close()
    except ConfigError as error:
        need(False, str(error))
    return before


def _start(*overrides: str) -> Run:
    return labkit.start(from_overrides([*RUN, UNLIKE, *overrides]))


def _compute_s(run: Run, rank: int) -> float:
    return statistics.median([event["compute_s"] for event in run.folder.history(rank, ("step",))[2:]])


@pytest.mark.netns
@pytest.mark.parametrize("launcher", ["local", pytest.param("elastic", marks=pytest.mark.slow)])
def test_a_slow_worker_takes_longer_to_compute(emulated: set[Path], runs: Path, launcher: str) -> None:
    # Steps much longer than a period, or a quota would not bite in every one of them.
    model = ["model.hidden_sizes=[1024, 1024, 1024]", "engine.global_batch_size=512"]
    run = _start(*model, "engine.max_steps=12", f"launch.launcher={launcher}")
    until(lambda: len(_own_groups(emulated)) == 2, "groups")
    assert run.wait(WAIT_S).state is RunState.FINISHED, run.status().error
    (remark,) = run.folder.history(0, ("message",))
    assert "processor quotas of 1, 0.25 cores" in remark["text"]
    assert _compute_s(run, 1) > 2 * _compute_s(run, 0)
    assert _own_groups(emulated) == set()


@pytest.mark.netns
def test_a_run_of_like_speeds_has_no_groups(emulated: set[Path], runs: Path) -> None:
    run = _start("cluster=2x1", "engine.num_epochs=500")
    until_step(run, 3)
    assert _own_groups(emulated) == set()
    assert run.stop().state is RunState.KILLED
    assert "quota" not in run.folder.supervisor_log.read_text()


@pytest.mark.netns
def test_nothing_is_left_of_a_run_whose_processes_are_all_killed(emulated: set[Path], runs: Path) -> None:
    run = _start("engine.num_epochs=500")
    until_step(run, 3)
    status = run.status()
    assert status.owner is not None
    members = {
        int(pid) for group in _own_groups(emulated) for pid in (group / "cgroup.procs").read_text().split()
    }
    assert members == {worker.pid for worker in status.workers}
    owner: ProcessId = status.owner
    for pid in [*members, owner.pid]:
        os.kill(pid, signal.SIGKILL)
    until(
        lambda: not any(psutil.pid_exists(pid) for pid in [owner.pid, *members]), "end of all processes", 10
    )
    assert run.status().state is RunState.LOST  # whoever looks first removes what it left
    assert _own_groups(emulated) == set()


@pytest.mark.netns
def test_a_run_that_can_not_have_them_is_refused_before_anything_starts(
    emulated: set[Path], runs: Path
) -> None:
    for overrides, message in (
        ([UNLIKE.replace("0.25", "0.001")], "speed of worker 1 must be at least 0.05 of the fastest one's"),
        ([UNLIKE, "launch.is_emulated=false"], "cluster speeds must be emulated"),
    ):
        with pytest.raises(ConfigError) as caught:
            _start(*overrides)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    assert list(runs.iterdir()) == []


def test_the_command_line_says_it_in_one_line(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unlike.yaml").write_text(f"{{{UNLIKE.removeprefix('cluster={').removesuffix('}')}}}")
    assert main(["run", "model=mlp", "--cluster", str(tmp_path / "unlike.yaml")]) == 2
    error = capsys.readouterr().err
    assert "cluster speeds must be emulated" in error and len(error.strip().splitlines()) == 1
