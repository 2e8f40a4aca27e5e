"""What only the two-level strategy of accelerators promises: buckets that go out early and change nothing."""

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit.cluster.placement import placements
from labkit.comm import Communicator, PeerError, SoloCommunicator, Work
from labkit.comm.communicator import GroupCommunicator
from labkit.config import ExperimentConfig, HierarchicalConfig, from_overrides
from labkit.launch.forked import run_workers
from labkit.sync import ShardedHierarchical, build_strategy, flat
from labkit.sync.device_reduce import DeviceReducer


@pytest.fixture(autouse=True)
def _small_grains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models get several buckets; workers are forked and inherit it."""
    monkeypatch.setattr(flat, "GRAIN", 16)


def _config(*more: str) -> ExperimentConfig:
    return from_overrides(["sync.name=hierarchical", "sync.chunk_bytes=256", "cluster=2x2", *more])


def _build(config: ExperimentConfig, model: nn.Module, comm: Communicator) -> ShardedHierarchical:
    assert isinstance(config.sync, HierarchicalConfig)
    places = placements(config.cluster)
    clip = config.engine.clip_norm
    return ShardedHierarchical(model, config.optimizer, comm, config.sync, places, clip_norm=clip)


def _network() -> nn.Sequential:
    torch.manual_seed(7)
    widths = [7, 8, 13, 11, 3]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(widths[:-1], widths[1:], strict=True)]
    return nn.Sequential(*layers)


def _step(strategy: ShardedHierarchical, model: nn.Module, inputs: Tensor, rate: float = 0.05) -> float:
    """One step, in micro-steps of two samples; returns the mean loss over all workers."""
    pieces = inputs.split(2)
    strategy.begin_step(len(inputs), len(pieces), expected_samples=4 * len(inputs))
    for piece in pieces:
        losses = (model(piece) - piece[:, :3].sin()).square().sum(1)
        strategy.backward(losses, losses.detach())
    totals = strategy.end_step(rate)
    return totals.loss_sum / totals.num_samples


# --- buckets -------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.integers(1, 9), st.integers(1, 1000))
def test_buckets_cover_everything_and_split_into_whole_grains(num: int, workers: int, size: int) -> None:
    found = flat.buckets(num, workers, size)
    assert found[0][0] == 0 and num <= found[-1][1] < num + workers * flat.GRAIN
    assert all(a[1] == b[0] for a, b in zip(found, found[1:], strict=False))
    assert all((end - start) % (workers * flat.GRAIN) == 0 for start, end in found)
    assert all(end - start <= max(size, workers * flat.GRAIN) for start, end in found)


def _sums(comm: Communicator, buckets: list[tuple[int, int]], wire: torch.dtype) -> list[list[float]]:
    """Each worker's parts when worker w of two nodes of two gives (w + 1) * (0, 1, 2, ...)."""
    (node,) = (group for group in comm.groups([[0, 1], [2, 3]]) if group is not None)
    (between,) = (group for group in comm.groups([[0, 2], [1, 3]]) if group is not None)
    row = torch.zeros(buckets[-1][1])
    reducer = DeviceReducer(row, buckets, node, between, wire=wire)
    for _ in range(2):
        row.copy_((comm.rank + 1.0) * torch.arange(len(row)))
        for end in range(len(row) + 1):
            reducer.fill(end)
        reducer.finish()
    return [part.tolist() for part in reducer.parts]


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_each_worker_gets_the_sums_of_its_parts_by_hand(wire: torch.dtype) -> None:
    first, second = [[0.0, 10.0], [40.0]], [[20.0, 30.0], [50.0]]
    assert run_workers(_sums, 4, [(0, 4), (4, 6)], wire) == [first, second, first, second]


# --- early or late, the same ------------------------------------------------------------------------------------


def _weights(comm: Communicator, config: ExperimentConfig) -> list[Tensor]:
    model = _network()
    strategy = _build(config, model, comm)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(5):
        _step(strategy, model, torch.randn(5, 7, generator=generator))
    strategy.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "more",
    [
        ["cluster=2x2", "optimizer=lars", "engine.clip_norm=0.5"],
        ["cluster=1x3", "optimizer=adamw", "engine.clip_norm=0.5"],
        ["cluster=3x1", "sync.wire=bfloat16"],
    ],
    ids=str,
)
def test_overlapped_or_not_gives_the_same_bits(more: list[str]) -> None:
    early, late = (_config(*more, f"sync.is_overlapped={flag}") for flag in ("true", "false"))
    workers = early.cluster.num_workers
    found = [*run_workers(_weights, workers, early), *run_workers(_weights, workers, late)]
    for weights in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, found[0], strict=True))
    assert not torch.equal(found[0][0], _network()[0][0].weight)


# --- while back-propagation runs -----------------------------------------------------------------------------------


def _note_collectives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the collectives that this process starts from now on."""
    started: list[str] = []
    for name in ("reduce_scatter_", "all_reduce_"):
        original: Callable[..., Work] = getattr(GroupCommunicator, name)

        def noting(
            comm: Communicator, *tensors: Tensor, name: str = name, original: Callable[..., Work] = original
        ) -> Work:
            started.append(name)
            return original(comm, *tensors)

        monkeypatch.setattr(GroupCommunicator, name, noting)
    return started


def _sent_early(comm: Communicator, config: ExperimentConfig) -> tuple[list[str], list[str]]:
    """What has been sent while the gradient of the first layer is still to come, and in the whole step."""
    model = _network()
    strategy = _build(config, model, comm)
    early: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        started = _note_collectives(monkeypatch)

        def compute_on(gradient: Tensor) -> None:
            deadline = time.monotonic() + 10
            while started.count("all_reduce_") < started.count("reduce_scatter_"):
                assert time.monotonic() < deadline, "nobody sends between nodes what the node has summed"
                time.sleep(1e-3)
            early.extend(started)

        model[0].register_forward_hook(lambda module, given, out: out.register_hook(compute_on) and None)
        _step(strategy, model, torch.ones(4, 7) * (comm.rank + 1))
    strategy.close()
    return early, started


def test_buckets_go_out_on_both_levels_before_back_propagation_ends() -> None:
    for early, _ in run_workers(_sent_early, 4, _config()):
        assert early.count("reduce_scatter_") == early.count("all_reduce_") == 4


def test_without_overlap_all_go_out_after_it_and_as_many() -> None:
    ((_, of_early), *_), late = (
        run_workers(_sent_early, 4, _config(f"sync.is_overlapped={flag}")) for flag in ("true", "false")
    )
    for early, of_late in late:
        assert early == []
        assert sorted(of_late) == sorted(of_early)
    assert len(flat.buckets(371, 2, 64)) == of_early.count("reduce_scatter_") == 6
    assert of_early.count("all_reduce_") == 6 + 1  # and the counts


class _Cut(SoloCommunicator):
    def all_reduce_(self, tensor: Tensor) -> Work:
        if tensor.dtype == torch.float32:  # a gradient, no count
            raise PeerError("the wire is cut")
        return super().all_reduce_(tensor)


def test_what_fails_in_the_thread_is_raised_in_the_step() -> None:
    model = _network()
    strategy = _build(_config("cluster=1x1"), model, _Cut())
    strategy.begin_step(1, 1)
    losses = model(torch.ones(1, 7)).sum(1)
    strategy.backward(losses, losses.detach())
    with pytest.raises(PeerError, match="the wire is cut"):
        strategy.end_step(0.1)
    strategy.close()


# --- bfloat16 on the wire ----------------------------------------------------------------------------------------


def _rounds(comm: Communicator, values: list[float]) -> list[float]:
    row = torch.zeros(4)
    reducer = DeviceReducer(row, [(0, 2), (2, 4)], SoloCommunicator(), comm, wire=torch.bfloat16)
    sums = []
    for _ in range(64):
        row.fill_(values[comm.rank])
        reducer.fill(4)
        reducer.finish()
        sums.append(float(reducer.parts[1][1]))
    return sums


def test_what_bfloat16_loses_in_one_step_comes_back_in_the_next() -> None:
    for sums in run_workers(_rounds, 2, [1.001, 2.003]):  # alone it would give 3.0 for ever
        assert abs(sums[0] - 3.004) > 1e-3
        assert sum(sums) / len(sums) == pytest.approx(3.004, abs=1e-3)


def _learns(comm: Communicator) -> float:
    model = _network()
    strategy = _build(_config("sync.wire=bfloat16"), model, comm)
    inputs = torch.randn(16, 7, generator=torch.Generator().manual_seed(0))
    return [_step(strategy, model, inputs[comm.rank :: 4]) for _ in range(150)][-1]


def test_training_learns_with_half_the_bytes() -> None:
    assert max(run_workers(_learns, 4)) < 0.05


# --- state ---------------------------------------------------------------------------------------------------------


def _there_and_back(comm: Communicator, config: ExperimentConfig) -> list[bool]:
    """A state given to all-reduce and taken back is the same, and so is the next step, bit for bit."""
    flat_config = from_overrides(["sync.name=allreduce"], base=config)
    models = [_network(), _network(), _network()]
    first, third = (_build(config, models[index], comm) for index in (0, 2))
    second = build_strategy(flat_config, models[1], comm, placements(config.cluster), clock=time.perf_counter)
    generator = torch.Generator().manual_seed(comm.rank)
    for _ in range(3):
        _step(first, models[0], torch.randn(4, 7, generator=generator))
    states = [first.state_dict()]
    for strategy, model in ((second, models[1]), (third, models[2])):
        states = [states[-1]]
        torch.distributed.broadcast_object_list(states)
        model.load_state_dict(models[0].state_dict())
        strategy.load_state_dict(states[-1])
        states.append(strategy.state_dict())
    is_same = comm.rank != 0 or all(
        torch.equal(states[0]["state"][key][name], value)
        for key, held in states[-1]["state"].items()
        for name, value in held.items()
    )
    is_held = comm.rank != 0 or len(states[-1]["state"]) == len(list(models[0].parameters()))
    inputs = torch.randn(4, 7, generator=generator)
    _step(first, models[0], inputs)
    _step(third, models[2], inputs)
    pairs = zip(models[0].parameters(), models[2].parameters(), strict=True)
    return [is_same, is_held, all(torch.equal(a, b) for a, b in pairs)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
@pytest.mark.parametrize("shape", ["2x2", "1x3", "3x1"])
def test_a_state_that_went_through_all_reduce_is_the_same(optimizer: str, shape: str) -> None:
    config = _config(f"optimizer={optimizer}", f"cluster={shape}")
    workers = config.cluster.num_workers
    assert run_workers(_there_and_back, workers, config) == [[True] * 3] * workers


# --- streams -------------------------------------------------------------------------------------------------------


class _Event:
    """Work that blocks a stream, not the process, as NCCL's does."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        self._event.wait()

    def is_done(self) -> bool:
        return self._event.query()


class _Slow(SoloCommunicator):
    """Alike to NCCL on one GPU: slow collectives on a stream of their own, behind the caller's stream."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._stream = torch.cuda.Stream()

    def _run(self, collective: Callable[[], Tensor]) -> Work:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(10_000_000)
            collective()
            return _Event()

    def reduce_scatter_(self, shard: Tensor, tensor: Tensor) -> Work:
        return self._run(lambda: shard.copy_(tensor))

    def all_reduce_(self, tensor: Tensor) -> Work:
        return self._run(lambda: tensor.mul_(2))


@pytest.mark.gpu
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_nothing_is_read_before_it_is_written(wire: torch.dtype) -> None:
    row = torch.zeros(2**20, device="cuda")
    half = len(row) // 2
    reducer = DeviceReducer(row, [(0, half), (half, len(row))], _Slow(1), _Slow(2), wire=wire)
    found = []
    for step in range(4):
        for start, end in ((0, half), (half, len(row))):
            torch.cuda._sleep(10_000_000)
            row[start:end].fill_(step + start / half)
            reducer.fill(end)
        reducer.finish()
        found += [part.clone() for part in reducer.parts]
    assert [set(part.tolist()) for part in found] == [{2.0 * (i // 2 + i % 2)} for i in range(8)]
