"""What only the two-level strategy promises: one copy per node, nothing left behind, any moment survived."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import labkit
from labkit.cluster.placement import placements
from labkit.comm import Arena, Communicator, Counters, PeerError, SoloCommunicator, Work, padded_bytes
from labkit.config import HierarchicalConfig, from_overrides
from labkit.errors import ConfigError
from labkit.launch.forked import WorkerFailed, run_workers
from labkit.runfolder import RunState
from labkit.sync import build_strategy, flat
from labkit.sync.node_reduce import Chunk, NodeReducer, cut
from labkit.sync.tune import Plan, candidates, choose

# --- arena -------------------------------------------------------------------------------------------------


def _write_and_read(comm: Communicator) -> list[float]:
    arena = Arena(comm, padded_bytes(4, torch.float32) * 2)
    first, second = arena.tensor(4, torch.float32), arena.tensor(4, torch.float32)
    assert not first.any() and not second.any()
    comm.barrier()
    first[comm.rank] = comm.rank + 1.0
    comm.barrier()
    return first.tolist()


def test_all_workers_of_a_node_see_one_memory() -> None:
    assert run_workers(_write_and_read, 3) == [[1.0, 2.0, 3.0, 0.0]] * 3


def _die_in_the_middle(comm: Communicator) -> None:
    Arena(comm, 1 << 20)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)


def test_an_arena_has_no_name_that_a_killed_worker_could_leave() -> None:
    before = sorted(os.listdir("/dev/shm"))
    with pytest.raises(WorkerFailed, match="worker 1 failed:\ndied with exit code -9"):
        run_workers(_die_in_the_middle, 2)
    assert sorted(os.listdir("/dev/shm")) == before


def test_an_arena_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model must fit in the node's memory, got an arena of \d+ MiB"):
        Arena(SoloCommunicator(), psutil.virtual_memory().total * 2)


def _wait_for_nobody(comm: Communicator, how: str) -> str:
    arena = Arena(comm, Counters.bytes_for(2))
    counters = Counters(arena, comm, ["worker 4 on a", "worker 5 on a"], timeout_s=0.5)
    if comm.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3)
        return ""
    with pytest.raises(PeerError) as caught:
        counters.set(1)
        counters.wait(1)
    return str(caught.value)


def test_a_peer_that_is_late_is_named() -> None:
    found = run_workers(_wait_for_nobody, 2, "sleeps")
    assert found[0].startswith("worker 5 on a is 1 s late (its process is")


def _report_to_file(comm: Communicator, path: str) -> None:
    Path(path).write_text(_wait_for_nobody(comm, "dies"))


def test_a_peer_that_is_dead_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed):
        run_workers(_report_to_file, 2, str(tmp_path / "said"))
    assert (tmp_path / "said").read_text() == "worker 5 on a is gone"


# --- chunks and slices ----------------------------------------------------------------------------------------


@given(st.integers(1, 500), st.integers(1, 60), st.integers(1, 5))
def test_chunks_cover_the_row_once_and_senders_take_turns(num: int, size: int, senders: int) -> None:
    chunks = cut(num, size, senders)
    assert [i for chunk in chunks for i in range(chunk.start, chunk.end)] == list(range(num))
    assert [chunk.sender for chunk in chunks] == [index % senders for index in range(len(chunks))]


@given(st.integers(1, 2_000_000), st.integers(1, 9))
def test_slices_cover_everything_and_end_at_grains(num: int, workers: int) -> None:
    found = flat.slices(num, workers)
    assert found[0][0] == 0 and found[-1][1] == num
    assert all(a[1] == b[0] for a, b in zip(found, found[1:], strict=False))
    assert all(end % flat.GRAIN == 0 or end == num for _, end in found)
    sizes = [end - start for start, end in found]
    assert max(sizes) - min(sizes) <= 2 * flat.GRAIN


def test_pieces_are_the_same_for_any_slicing() -> None:
    model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 3))
    layout = flat.spans(model)
    found = flat.pieces(layout)
    assert sum(piece.end - piece.start for piece in found) == layout[-1].end
    for workers in range(1, 6):
        borders = {start for start, _ in flat.slices(layout[-1].end, workers)}
        assert borders <= {piece.start for piece in found} | {layout[-1].end}


# --- while back-propagation runs -----------------------------------------------------------------------------------


def _reducer_of_node(comm: Communicator, num: int) -> tuple[torch.Tensor, NodeReducer]:
    """One node whose only sender is worker 0."""
    arena = Arena(comm, padded_bytes(2 * num, torch.float32) + 2 * Counters.bytes_for(2))
    rows = arena.tensor(2 * num, torch.float32).view(2, num)
    ready, done = (Counters(arena, comm, ["worker 0", "worker 1"], 10.0) for _ in range(2))
    senders = comm.groups([[0]])
    chunks = cut(num, num // 2, 1)
    return rows, NodeReducer(rows, chunks, senders, ready, done, wire=torch.float32, is_overlapped=True)


def _compute_on(comm: Communicator) -> tuple[float, float, bool]:
    rows, reducer = _reducer_of_node(comm, 8)
    rows[comm.rank] = comm.rank + 1.0
    if comm.rank == 1:
        time.sleep(0.3)  # the slowest fills last, long after the sender last called anything
    reducer.fill(4)
    deadline = time.monotonic() + 10
    while comm.rank == 0 and float(rows[0, 0]) != 3.0 and time.monotonic() < deadline:
        time.sleep(1e-3)
    before = float(rows[0, 0])
    reducer.fill(8)
    reducer.finish()
    reducer.close()
    return before, float(rows[0, 7]), any(t.name == "labkit-reduce" for t in threading.enumerate())


def test_a_chunk_goes_out_when_the_slowest_has_filled_it_though_its_sender_computes() -> None:
    first, _ = run_workers(_compute_on, 2)
    assert first == (3.0, 3.0, False)


class _Cut(SoloCommunicator):
    def all_reduce_(self, tensor: torch.Tensor) -> Work:
        raise PeerError("the wire is cut")


def test_what_fails_in_the_thread_is_raised_in_the_step() -> None:
    alone = SoloCommunicator()
    arena = Arena(alone, padded_bytes(8, torch.float32) + 2 * Counters.bytes_for(1))
    rows = arena.tensor(8, torch.float32).view(1, 8)
    ready, done = (Counters(arena, alone, ["worker 0"], 10.0) for _ in range(2))
    chunks = cut(8, 4, 1)
    reducer = NodeReducer(rows, chunks, [_Cut()], ready, done, wire=torch.float32, is_overlapped=True)
    reducer.fill(4)
    with pytest.raises(PeerError, match="the wire is cut"):
        reducer.finish()
    reducer.close()


# --- bfloat16 on the wire ---------------------------------------------------------------------------------------


def _rounds(comm: Communicator, values: list[float]) -> tuple[list[float], list[float]]:
    """Sum one number over two nodes of one worker each, many rounds, in bfloat16."""
    (alone,) = (group for group in comm.groups([[0], [1]]) if group is not None)
    arena = Arena(alone, padded_bytes(2, torch.float32) + 2 * Counters.bytes_for(1))
    rows = arena.tensor(2, torch.float32).view(1, 2)
    ready, done = (Counters(arena, alone, ["w"], 10.0) for _ in range(2))
    chunks = [Chunk(0, 1, 0), Chunk(1, 2, 0, is_exact=True)]
    reducer = NodeReducer(rows, chunks, comm.groups([[0, 1]]), ready, done, wire=torch.bfloat16)
    sums, exact = [], []
    for _ in range(64):
        rows[0] = values[comm.rank]
        reducer.fill(2)
        reducer.finish()
        sums.append(float(rows[0, 0]))
        exact.append(float(rows[0, 1]))
    return sums, exact


def test_what_bfloat16_loses_in_one_step_comes_back_in_the_next() -> None:
    values = [1.001, 2.003]  # bfloat16 has steps of 1/128 there: alone it would give 3.0 for ever
    for sums, exact in run_workers(_rounds, 2, values):
        assert max(abs(value - 3.004) for value in exact) < 1e-6  # counts and sums travel exactly
        assert abs(sums[0] - 3.004) > 1e-3
        assert sum(sums) / len(sums) == pytest.approx(3.004, abs=1e-3)


def _train_bfloat16(comm: Communicator) -> float:
    config = from_overrides(["cluster=2x2", "sync={name: hierarchical, wire: bfloat16}"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    strategy = build_strategy(config, model, comm, placements(config.cluster), clock=time.perf_counter)
    inputs = torch.randn(64, 8)
    targets = inputs[:, :1] * inputs[:, 1:2]
    totals = 0.0
    for _ in range(100):
        strategy.begin_step(16, 1)
        own = slice(16 * comm.rank, 16 * comm.rank + 16)
        losses = ((model(inputs[own]) - targets[own]) ** 2).mean(1)
        strategy.backward(losses, losses.detach())
        totals = strategy.end_step(0.1).loss_sum
    return totals / 64


def test_training_learns_with_half_the_bytes() -> None:
    assert max(run_workers(_train_bfloat16, 4)) < 0.2


def test_bfloat16_is_refused_where_it_can_not_be() -> None:
    with pytest.raises(
        ConfigError, match="sync.wire must be 'float32' with engine.dtype 'float64', got 'bfloat16'"
    ):
        from_overrides(["sync={name: hierarchical, wire: bfloat16}", "engine.dtype=float64"])


# --- memory ---------------------------------------------------------------------------------------------------


def _bytes_held(comm: Communicator) -> dict[str, int]:
    """Where one worker's parameters, gradients and state lie."""
    config = from_overrides(["cluster=1x4", "sync=hierarchical"])
    model = nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 512))
    strategy = build_strategy(config, model, comm, placements(config.cluster), clock=time.perf_counter)
    strategy.begin_step(1, 1)
    losses = model(torch.ones(1, 1024)).sum(1)
    strategy.backward(losses, losses.detach())
    strategy.end_step(0.1)
    slice_optimizer = strategy._slice._optimizer  # type: ignore[attr-defined]
    state = sum(t.nbytes for s in slice_optimizer.state.values() for t in s.values() if torch.is_tensor(t))
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with open("/proc/self/maps") as maps:
        shared = [line for line in maps if "memfd:labkit" in line]
    spans = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in shared]
    is_shared = all(any(low <= p.data_ptr() < high for low, high in spans) for p in model.parameters())
    return {"state": state, "storages": len(storages), "is_shared": int(is_shared)}


def test_a_node_holds_parameters_and_state_once() -> None:
    held = run_workers(_bytes_held, 4)
    num = 1024 * 512 + 512 + 512 * 512 + 512
    assert sum(worker["state"] for worker in held) == 4 * num  # momentum once for the whole node
    assert all(worker["is_shared"] for worker in held)


# --- choice by measurement ---------------------------------------------------------------------------------------


def test_what_the_user_fixes_is_not_tried() -> None:
    nodes = [[0, 1], [2, 3]]
    assert candidates(HierarchicalConfig(), nodes, 40_000_000) == [Plan(2, 2**20), Plan(1, 2**20)]
    assert len(candidates(HierarchicalConfig(is_overlapped=False), nodes, 40_000_000)) == 4
    assert candidates(HierarchicalConfig(num_senders=2, chunk_bytes=100), nodes, 10) == [Plan(2, 100)]
    assert len(candidates(HierarchicalConfig(), [[0, 1, 2]], 40_000_000)) == 1  # one node: no wire


def test_the_usual_plan_stays_unless_another_is_clearly_faster() -> None:
    plans = [Plan(1, 2**20), Plan(2, 2**20)]
    times = {1: 1.0, 2: 0.98}
    assert choose(plans, SoloCommunicator(), lambda plan, size: times[plan.num_senders])[0] == plans[0]
    times[2] = 0.9
    chosen, reason = choose(plans, SoloCommunicator(), lambda plan, size: times[plan.num_senders])
    assert chosen == plans[1]
    assert reason.startswith("2 senders per node, chunks of 1 MiB, measured with 1 MiB (one sender")


# --- any moment -----------------------------------------------------------------------------------------------------

SETTINGS = [
    "name=t",
    "cluster=2x2",
    "sync.name=hierarchical",
    "launch.is_tracked=false",
    "engine.num_epochs=4",
]
SETTINGS += ["engine.checkpoint_every_steps=6", "launch.worker_timeout_s=3"]


def _losses(run: labkit.Run) -> list[float]:
    return [event["values"]["train/loss"] for event in run.folder.history()]


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_a_worker_lost_at_any_moment_is_named_and_the_resume_is_exact(runs: Path, count: int) -> None:
    undisturbed = labkit.start(labkit.from_overrides(SETTINGS))
    assert undisturbed.wait(60).state is RunState.FINISHED
    expected = _losses(undisturbed)
    shared_memory = sorted(os.listdir("/dev/shm"))
    moments = random.Random(count)
    for index in range(count):
        run = labkit.start(labkit.from_overrides([*SETTINGS, "engine.step_padding_s=0.005"]), is_repeat=True)
        first_step = moments.randint(1, 60)
        while not run.folder.history() or run.folder.history()[-1]["step"] < first_step:
            assert not run.status().state.is_final
            time.sleep(0.005)
        time.sleep(moments.random() * 0.02)  # somewhere inside a step
        victim = moments.randrange(4)
        number = signal.SIGKILL if index % 2 == 0 else signal.SIGSTOP
        os.kill(run.status().workers[victim].pid or 0, number)
        status = run.wait(30)
        assert status.state is RunState.FAILED
        assert status.error is not None and status.error.rank == victim, status.error
        assert labkit.resume(run.folder).wait(60).state is RunState.FINISHED
        assert _losses(run) == expected
    assert sorted(os.listdir("/dev/shm")) == shared_memory
