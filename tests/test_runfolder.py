"""The run folder is the truth: whole files, states that are true, events that survive a resume."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from labkit.cluster.placement import placements
from labkit.config import from_overrides
from labkit.engine.events import EventLog
from labkit.errors import ConfigError
from labkit.launch.code import code_digests, user_modules
from labkit.launch.launcher import Exit
from labkit.launch.verdict import root_cause
from labkit.runfolder import (
    ProcessId,
    RunFolder,
    RunState,
    all_runs,
    find_run,
    last_attempt_wins,
    run_key,
    write_atomically,
)


def _events(*triples: tuple[int, int, float]) -> list[dict[str, object]]:
    return [{"kind": "metrics", "attempt": a, "step": s, "value": v} for a, s, v in triples]


def test_the_last_attempt_wins_and_no_step_stands_twice() -> None:
    first = [(1, step, 1.0) for step in range(1, 8)]
    second = [(2, step, 2.0) for step in range(6, 9)]
    found = last_attempt_wins(iter(_events(*first, *second)))
    assert [(e["step"], e["value"]) for e in found] == [
        *((s, 1.0) for s in range(1, 6)),
        (6, 2.0),
        (7, 2.0),
        (8, 2.0),
    ]


def test_a_later_attempt_that_ended_earlier_drops_what_came_after() -> None:
    found = last_attempt_wins(iter(_events((1, 1, 1.0), (1, 2, 1.0), (1, 3, 1.0), (2, 2, 2.0))))
    assert [(e["step"], e["value"]) for e in found] == [(1, 1.0), (2, 2.0)]


def test_a_restart_under_the_same_attempt_writes_each_step_once() -> None:
    found = last_attempt_wins(iter(_events((1, 1, 1.0), (1, 2, 1.0), (1, 1, 2.0), (1, 2, 2.0), (1, 3, 2.0))))
    assert [(e["step"], e["value"]) for e in found] == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_a_line_that_is_being_written_is_left_for_the_next_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.events_dir.mkdir()
    file = folder.events_file(0)
    file.write_text('{"kind": "a"}\n{"kind"')
    events, offset = folder.read_events(0)
    assert [e["kind"] for e in events] == ["a"]
    with file.open("a") as stream:
        stream.write(': "b"}\n')
    assert [e["kind"] for e in folder.read_events(0, offset)[0]] == ["b"]


def test_events_of_many_writers_stay_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "rank0000.jsonl"
    logs = [EventLog(file, 1) for _ in range(4)]

    def write(log: EventLog) -> None:
        for step in range(200):
            log.write("metrics", step=step, values={"a": 1.0}, text="x" * 300)

    threads = [threading.Thread(target=write, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
    folder = RunFolder(tmp_path)
    (tmp_path / "events").mkdir()
    file.rename(folder.events_file(0))
    assert len(folder.read_events(0)[0]) == 800


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new\ud800")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_process_is_told_from_a_later_one_of_the_same_number() -> None:
    me = ProcessId.current()
    assert me.is_alive()
    assert not me.model_copy(update={"started_at": me.started_at - 100}).is_alive()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    import psutil

    dead = ProcessId(pid=child.pid, host=me.host, started_at=psutil.Process(child.pid).create_time())
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert not dead.is_alive()  # ended, though its number is still taken
    child.wait()
    assert not dead.is_alive()


def test_final_states_and_their_exit_codes() -> None:
    assert [state.value for state in RunState if not state.is_final] == ["planned", "running"]
    codes = {state.value: state.exit_code for state in RunState if state.is_final}
    assert codes == {"finished": 0, "failed": 1, "killed": 130, "timeout": 124, "lost": 1}


# --- identity ---------------------------------------------------------------------------------------------


def test_a_key_is_of_content_and_code_but_not_of_name_and_launch() -> None:
    base = run_key(from_overrides([]), {"labkit": "1"})
    assert len(base) == 10
    assert run_key(from_overrides(["name=other", "launch.timeout_s=9"]), {"labkit": "1"}) == base
    assert run_key(from_overrides(["seed=1"]), {"labkit": "1"}) != base
    assert run_key(from_overrides([]), {"labkit": "2"}) != base


def test_an_edit_of_the_users_module_makes_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "edited.py"
    config = from_overrides(["model={name: 'edited:build'}"])
    keys = []
    for body in ("1", "2"):
        file.write_text(f"def build(info):\n    return {body}\n")
        keys.append(run_key(config, code_digests(user_modules(config))))
    assert keys[0] != keys[1]


def test_a_module_is_checked_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loud.py").write_text("raise SystemExit('ran')\ndef build(info): ...\n")
    (module,) = user_modules(from_overrides(["model={name: 'loud:build'}"]))
    assert module.is_single_file and module.file == tmp_path / "loud.py"
    (tmp_path / "broken.py").write_text("def build(:\n")
    with pytest.raises(ConfigError, match="broken.py must be Python, got .* in line 1"):
        user_modules(from_overrides(["model={name: 'broken:build'}"]))


def test_runs_are_found_by_folder_key_beginning_and_latest(runs: Path) -> None:
    made = []
    for key in ("abcdef0001", "abcdef0002", "123456789a"):
        folder = RunFolder(runs / "e" / key)
        folder.create(from_overrides([]))
        made.append(folder)
    assert find_run(str(made[0].path)).path == made[0].path
    assert find_run("123").path == made[2].path
    assert find_run("abcdef0002").path == made[1].path
    assert find_run("latest").path == all_runs()[-1].path == made[2].path
    with pytest.raises(
        ConfigError, match="run must name one run, got 'abc', which fits abcdef0001, abcdef0002"
    ):
        find_run("abc")
    with pytest.raises(ConfigError, match="got 'zzz': none found"):
        find_run("zzz")


def test_a_broken_configuration_is_said(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(ConfigError, match="run must be a run folder"):
        folder.read_config()
    folder.config_file.write_text("{")
    with pytest.raises(ConfigError, match="must be JSON"):
        folder.read_config()


# --- the root cause -----------------------------------------------------------------------------------------

PLACES = placements(from_overrides(["cluster=2x2"]).cluster)


def _fault(rank: int, t: float, *, is_peer: bool) -> dict[str, object]:
    return {"rank": rank, "t": t, "message": f"m{rank}", "traceback": f"tb{rank}", "is_peer_failure": is_peer}


@pytest.mark.parametrize(
    ("exits", "errors", "rank", "message"),
    [
        # A killed worker can't report; its peers do, and first.
        ([Exit(0, 1), Exit(2, -9)], {0: _fault(0, 1.0, is_peer=True)}, 2, "worker 2 on node1 was killed by SIGKILL"),
        # One raised, the other lost its peer a moment before it was noticed.
        ([Exit(0, 1), Exit(3, 1)], {0: _fault(0, 1.0, is_peer=True), 3: _fault(3, 2.0, is_peer=False)}, 3, "worker 3 on node1 failed: m3"),
        # Two raised for themselves: the earlier one.
        ([Exit(1, 1), Exit(2, 1)], {1: _fault(1, 5.0, is_peer=False), 2: _fault(2, 4.0, is_peer=False)}, 2, "worker 2 on node1 failed: m2"),
        ([Exit(1, 143)], {}, 1, "worker 1 on node0 was ended by SIGTERM"),
        ([Exit(1, 7)], {}, 1, "worker 1 on node0 ended with exit code 7"),
    ],
)  # fmt: skip
def test_the_root_cause_comes_before_what_it_caused(
    exits: list[Exit], errors: dict[int, dict[str, object]], rank: int, message: str
) -> None:
    found = root_cause(exits, errors, PLACES)
    assert found.rank == rank
    assert found.message.startswith(message)


def test_importing_labkit_imports_neither_torch_nor_mlflow() -> None:
    code = "import labkit, labkit.launch, labkit.config, sys; print(sorted({'torch', 'mlflow'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"
