"""Laws of the training loop: one update per global batch, the cluster does not change the data, resume is exact."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from labkit.cluster.placement import placements
from labkit.comm import Communicator, SoloCommunicator
from labkit.config import ExperimentConfig, from_overrides
from labkit.engine import checkpoint, random_state
from labkit.engine.events import EventLog
from labkit.engine.train import Trainer
from labkit.errors import ConfigError
from labkit.launch.forked import run_workers
from labkit.runfolder import RunFolder

SMALL = [
    "engine.max_steps=10",
    "engine.dtype=float64",
    "optimizer.learning_rate=0.05",
    "launch.comm_timeout_s=30",
]


def _trainer(comm: Communicator, config: ExperimentConfig, folder: RunFolder, attempt: int = 1) -> Trainer:
    torch.set_num_threads(1)
    place = placements(config.cluster)[comm.rank]
    log = EventLog(folder.events_file(comm.rank), attempt)
    return Trainer(config, place, comm, log, folder, device=torch.device("cpu"))


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def _run(
    comm: Communicator, config: ExperimentConfig, path: str, is_resume: bool = False, attempt: int = 1
) -> dict[str, Tensor]:
    trainer = _trainer(comm, config, RunFolder(path), attempt)
    if is_resume:
        trainer.resume()
    trainer.train()
    trainer.strategy.close()
    trainer.log.close()
    return _weights(trainer)


def _folder(path: Path, config: ExperimentConfig) -> str:
    folder = RunFolder(path)
    folder.create(config)
    return str(folder.path)


def _config(*overrides: str) -> ExperimentConfig:
    return from_overrides([*SMALL, *overrides])


CLUSTERS = {
    "2x2": "2x2",
    "unequal": "{nodes: [{name: a, workers: [{local_batch_size: 40}, {local_batch_size: 0}]}, "
    "{name: b, workers: [{local_batch_size: 24}]}]}",
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=list(CLUSTERS))
@pytest.mark.parametrize(
    "model",
    [
        "model=mlp",
        "sync.batch_norm=synchronized",
        "sync={name: hierarchical, batch_norm: synchronized, chunk_bytes: 20000, num_senders: 1}",
        "sync={name: parameter_server, batch_norm: synchronized}",
    ],
)
def test_any_cluster_gives_the_weights_and_the_curve_of_one_process(
    tmp_path: Path, cluster: str, model: str
) -> None:
    # 1,500 samples and batches of 64: step 24 of 24 is a partial batch, so 26 steps cross an epoch.
    alone = _config(model, "engine.max_steps=26")
    many = _config(model, "engine.max_steps=26", f"cluster={cluster}")
    expected = _run(SoloCommunicator(), alone, _folder(tmp_path / "alone", alone))
    path = _folder(tmp_path / "many", many)
    for found in run_workers(_run, many.cluster.num_workers, many, path):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)
    curves = [
        [(e["step"], e["samples"], pytest.approx(e["values"].get("train/loss", e["values"].get("val/loss")), rel=1e-8))
         for e in RunFolder(tmp_path / who).history(0, ("metrics", "eval"))]
        for who in ("alone", "many")
    ]  # fmt: skip
    assert [(s, n) for s, n, _ in curves[0]] == [(s, n) for s, n, _ in curves[1]]
    assert all(a[2] == b[2].expected for a, b in zip(*curves, strict=True))


def _merged_state(comm: Communicator, config: ExperimentConfig, path: str) -> dict[str, Tensor]:
    trainer = _trainer(comm, config, RunFolder(path))
    trainer.train()
    with trainer.strategy.merged_buffers():
        return _weights(trainer)


def test_local_batch_norm_agrees_on_all_workers_and_in_the_saved_file(tmp_path: Path) -> None:
    config = _config("cluster=1x3")
    path = _folder(tmp_path / "run", config)
    first, *others = run_workers(_merged_state, 3, config, path)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    saved = checkpoint.read_checkpoint(RunFolder(path).checkpoint_file(10).read_bytes(), "it")["model"]
    assert all(torch.equal(saved[name], first[name]) for name in first)


GPT = [
    "data=text",
    "data.max_bytes=60000",
    "data.num_val=16",
    "data.context=16",
    "model.name=gpt",
    "model.width=16",
    "model.num_heads=2",
    "model.num_layers=1",
    "model.dropout=0.2",
    "engine.global_batch_size=16",
    "optimizer=adamw",
]


HIERARCHICAL = ["sync.name=hierarchical", "sync.num_senders=1", "sync.chunk_bytes=20000"]
LOCAL_SGD = ["sync.name=local_sgd", "sync.period_steps=3", "sync.momentum=kept"]


@pytest.mark.parametrize(
    "extra",
    [
        ["sync.batch_norm=local"],
        GPT,
        HIERARCHICAL,
        [*HIERARCHICAL, "optimizer=adamw"],
        ["sync=parameter_server"],
        LOCAL_SGD,
        [*LOCAL_SGD, "sync.momentum=averaged", "optimizer=adamw"],
    ],
    ids=["convnet", "gpt", "hierarchical", "hierarchical adamw", "server", "local kept", "local adamw"],
)
@pytest.mark.parametrize(("world_size", "stop_at"), [(1, 5), (2, 5), (2, 4)])
def test_ten_steps_are_five_and_a_resume_and_five_bit_for_bit(
    tmp_path: Path, extra: list[str], world_size: int, stop_at: int
) -> None:
    shared = [*extra, "engine.dtype=float32", f"cluster=1x{world_size}", "schedule.name=cosine"]
    whole = _config(*shared, "engine.checkpoint_every_steps=5", "engine.eval_every_steps=5")
    straight = _folder(tmp_path / "straight", whole)
    broken = _folder(tmp_path / "broken", whole)

    def both(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        one = _run(comm, whole, straight)
        # The schedule must still see the whole run: stop by asking, not by another max_steps.
        trainer = _trainer(comm, whole, RunFolder(broken))
        trainer.is_stop_wanted = lambda: comm.rank == 0 and trainer.progress.step == stop_at - 1
        assert not trainer.train()
        trainer.strategy.close()
        random_state.seed_everything(99, comm.rank)  # whatever the streams were, the checkpoint's count
        return one, _run(comm, whole, broken, True, 2)

    for one, two in run_workers(both, world_size):
        assert all(torch.equal(one[name], two[name]) for name in one)
    losses = [[e["values"]["train/loss"] for e in RunFolder(path).history(0)] for path in (straight, broken)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10


def test_a_resume_on_another_cluster_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    one = _config("model=mlp", "engine.checkpoint_every_steps=4", "engine.max_steps=4")
    many = _config("model=mlp", "engine.max_steps=8", "cluster=1x3")
    straight = _config("model=mlp", "engine.max_steps=8")
    expected = _run(SoloCommunicator(), straight, _folder(tmp_path / "straight", straight))
    path = _folder(tmp_path / "moved", one)
    _run(SoloCommunicator(), one, path)
    for found in run_workers(_run, 3, many, path, True, 2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def _damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "flipped":
        data[len(data) // 2] ^= 1
    else:
        data = bytearray()
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_message(tmp_path: Path, how: str) -> None:
    config = _config("model=mlp", "engine.checkpoint_every_steps=3", "engine.max_steps=6")
    path = _folder(tmp_path / "run", config)
    expected = _run(SoloCommunicator(), config, path)
    folder = RunFolder(path)
    _damage(folder.checkpoint_file(6), how)
    found = _run(SoloCommunicator(), config, path, True, 2)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (message,) = folder.history(0, ("message",))
    assert "step00000006.pt must be whole" in message["text"]
    assert [e["step"] for e in folder.history(0, ("metrics",))] == [1, 2, 3, 4, 5, 6]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    config = _config("model=mlp", "engine.checkpoint_every_steps=1", "engine.keep_checkpoints=2")
    path = _folder(tmp_path / "run", config)
    _run(SoloCommunicator(), config, path)
    names = sorted(file.name for file in RunFolder(path).checkpoints_dir.iterdir())
    assert names == ["step00000009.pt", "step00000010.pt"]


def test_a_strangers_checkpoint_can_not_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "pwned",))

    file = tmp_path / "evil.pt"
    torch.save({"format": 1, "model": Evil()}, file)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.read_checkpoint(file.read_bytes(), "evil.pt")
    assert not (tmp_path / "pwned").exists()


def test_random_streams_come_back_exactly() -> None:
    import random

    import numpy as np

    random.gauss(0, 1)  # leaves a second number waiting
    np.random.standard_normal()
    state = random_state.capture()

    def draw() -> list[float]:
        return [
            random.gauss(0, 1),
            random.random(),
            float(np.random.standard_normal()),
            float(torch.rand(())),
        ]

    first = draw()
    draw()
    random_state.restore(state)
    assert draw() == first


def test_evaluation_counts_each_sample_once(tmp_path: Path) -> None:
    config = _config("model=mlp", "cluster=1x4", "engine.micro_batch_size=7", "engine.max_steps=1")
    path = _folder(tmp_path / "run", config)

    def evaluate(comm: Communicator) -> dict[str, float]:
        trainer = _trainer(comm, config, RunFolder(path))
        values = trainer.evaluate()
        with torch.no_grad():
            samples = trainer.data.val
            inputs, targets = samples.batch(range(len(samples)))
            losses, right = trainer.data.losses(trainer.model.eval()(inputs.double()), targets)
        assert values["val/loss"] == pytest.approx(float(losses.mean()), rel=1e-12)
        assert values["val/accuracy"] == pytest.approx(float(right.mean()), rel=1e-12)
        return values

    first, *others = run_workers(evaluate, 4)
    assert all(other == first for other in others)


def test_a_loss_that_is_not_finite_is_written_as_null_and_named(tmp_path: Path) -> None:
    config = _config("model=mlp", "optimizer.learning_rate=1e300", "engine.max_steps=4")
    path = _folder(tmp_path / "run", config)
    _run(SoloCommunicator(), config, path)
    text = RunFolder(path).events_file(0).read_text()
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    last = RunFolder(path).history(0)[-1]
    assert last["values"]["train/loss"] is None
    assert last["nonfinite"]["train/loss"] == "nan"


@pytest.mark.parametrize("strategy", ["sync=allreduce", "sync=hierarchical", "sync=parameter_server"])
def test_the_parts_of_a_step_sum_to_the_step(tmp_path: Path, strategy: str) -> None:
    config = _config("cluster=1x2", strategy)
    path = _folder(tmp_path / "run", config)
    run_workers(_run, 2, config, path)
    for rank in range(2):
        for event in RunFolder(path).history(rank, ("step",)):
            parts = [event[f"{part}_s"] for part in ("data", "compute", "node", "communicate", "wait")]
            assert all(part >= 0 for part in parts)
            assert sum(parts) == pytest.approx(event["step_s"], rel=0.02, abs=1e-5)


def _pad_rank_one(comm: Communicator, config: ExperimentConfig, path: str) -> None:
    padding = {"engine.step_padding_s": 0.05 if comm.rank == 1 else 0.0}
    _run(comm, from_overrides(padding, base=config), path)


def test_waiting_for_a_slow_worker_is_named_waiting(tmp_path: Path) -> None:
    config = _config("cluster=1x2", "model=mlp")
    path = _folder(tmp_path / "run", config)
    run_workers(_pad_rank_one, 2, config, path)
    fast, slow = (RunFolder(path).history(rank, ("step",)) for rank in range(2))
    mean = lambda events, part: sum(e[part] for e in events) / len(events)  # noqa: E731
    assert mean(fast, "wait_s") > 0.03
    assert mean(slow, "wait_s") < 0.01
    assert mean(slow, "compute_s") > 0.045


def test_refuses_more_workers_than_samples(tmp_path: Path) -> None:
    workers = "[{local_batch_size: 2}, {local_batch_size: 0}, {local_batch_size: 0}]"
    config = _config(
        "data.num_val=1795",
        "engine.global_batch_size=2",
        f"cluster={{nodes: [{{name: a, workers: {workers}}}]}}",
    )
    path = _folder(tmp_path / "run", config)

    def build(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            _trainer(comm, config, RunFolder(path))
        return str(caught.value)

    assert "at most as many workers as training samples (2), got 3" in run_workers(build, 3)[0]


def test_refuses_a_warmup_longer_than_the_data_lasts(tmp_path: Path) -> None:
    config = _config(
        "model=gpt",
        "data=text",
        "data.max_bytes=200000",
        "engine.max_steps=null",
        "schedule.warmup_steps=100000",
    )
    path = _folder(tmp_path / "run", config)

    def build(comm: Communicator) -> str:
        with pytest.raises(ConfigError) as caught:
            _trainer(comm, config, RunFolder(path))
        return str(caught.value)

    (text,) = run_workers(build, 1)
    assert text.startswith("schedule.warmup_steps must be at most the ") and "got 100000" in text


THROTTLED = "{nodes: [{name: a, workers: 1}, {name: b, workers: 1, throttle: {factor: 3, from_step: 4}}]}"


@pytest.mark.parametrize("sync", ["allreduce", "hierarchical"])
def test_a_worker_that_slows_down_gets_less_and_the_weights_stay_the_same(tmp_path: Path, sync: str) -> None:
    base = ["model=mlp", f"sync={sync}", "engine.dtype=float64", "engine.max_steps=24"]
    plain = _config(*base, "cluster=2x1")
    slowed = _config(*base, f"cluster={THROTTLED}", "shares.is_rebalanced=true", "engine.step_padding_s=0.03")
    folders = [_folder(tmp_path / name, config) for name, config in (("plain", plain), ("slowed", slowed))]
    expected, got = (
        run_workers(_run, 2, config, path)[0] for config, path in zip((plain, slowed), folders, strict=True)
    )
    for name, value in expected.items():
        assert torch.allclose(value, got[name], rtol=1e-9), name
    changes = RunFolder(folders[1]).history(0, ("shares",))
    assert changes and changes[0]["step"] <= 24
    sizes = [int(size) for size in changes[-1]["values"].values()]
    assert sum(sizes) == slowed.engine.global_batch_size
    assert sizes[1] < 0.4 * sum(sizes)  # a third as fast: a quarter of the batch
    assert {event["samples"] for event in RunFolder(folders[1]).history(1, ("step",))} > {sizes[1]}
    assert not RunFolder(folders[0]).history(0, ("shares",))
