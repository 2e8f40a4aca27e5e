"""The cluster does not change the data: every sample once per epoch, in an order of the seed alone."""

import gzip
import importlib.resources
from collections.abc import Sequence

import numpy as np
import pytest
import sklearn.datasets
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import (
    ConvNetConfig,
    DigitsConfig,
    GptConfig,
    MlpConfig,
    TextConfig,
    UserDataConfig,
    UserModelConfig,
)
from labkit.data.sampler import FullShuffle, GlobalSampler, SamplerState, even_extent, own_part
from labkit.errors import ConfigError
from labkit.tasks import (
    Data,
    DataInfo,
    DatasetSamples,
    TensorSamples,
    build_model,
    cross_entropy_per_sample,
    load_data,
)


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 2**40))
def test_every_sample_exactly_once_per_epoch(num_samples: int, batch: int, seed: int) -> None:
    sampler = GlobalSampler(FullShuffle(num_samples, seed), batch)
    state, seen = SamplerState(), []
    for _ in range(-(-num_samples // batch)):
        indices, state = sampler.batch(state)
        seen.extend(indices.tolist())
    assert sorted(seen) == list(range(num_samples))
    assert state == SamplerState(1, 0)


@given(st.integers(1, 100), st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any))
def test_any_workers_with_any_shares_see_the_same_global_batches(num_samples: int, sizes: list[int]) -> None:
    sampler = GlobalSampler(FullShuffle(num_samples, 5), sum(sizes))
    state = SamplerState()
    for _ in range(2 * -(-num_samples // sum(sizes))):
        batch, state = sampler.batch(state)
        parts = [own_part(batch, sizes, rank).tolist() for rank in range(len(sizes))]
        assert [index for part in parts for index in part] == batch.tolist()


def test_the_order_is_of_seed_and_epoch_alone() -> None:
    a, b = FullShuffle(50, 1), FullShuffle(50, 1)
    assert a.slice(3, 0, 50).tolist() == [*b.slice(3, 0, 7).tolist(), *b.slice(3, 7, 50).tolist()]
    assert a.slice(3, 0, 50).tolist() != a.slice(4, 0, 50).tolist()
    assert a.slice(0, 0, 50).tolist() != FullShuffle(50, 2).slice(0, 0, 50).tolist()


def test_a_resume_on_other_workers_goes_on_with_the_next_samples() -> None:
    # transformers #40245: one worker read 0-3, two workers must go on with [4-7], [8-11].
    sampler = GlobalSampler(FullShuffle(16, 0), 4)
    _, state = sampler.batch(SamplerState())
    wider = GlobalSampler(FullShuffle(16, 0), 8)
    batch, _ = wider.batch(state)
    order = sampler.part(0, 0, 16)
    assert own_part(batch, [4, 4], 0).tolist() == order[4:8].tolist()
    assert own_part(batch, [4, 4], 1).tolist() == order[8:12].tolist()


@pytest.mark.parametrize(
    ("n", "w", "sizes"), [(145, 3, [48, 48, 49]), (10, 4, [2, 3, 2, 3]), (2, 4, [0, 1, 0, 1])]
)
def test_evaluation_parts_are_balanced_and_cover_all(n: int, w: int, sizes: list[int]) -> None:
    parts = [even_extent(n, rank, w) for rank in range(w)]
    assert [len(part) for part in parts] == sizes
    assert [index for part in parts for index in part] == list(range(n))


def test_refuses_no_samples() -> None:
    with pytest.raises(ConfigError, match="at least 1 sample, got 0"):
        GlobalSampler(FullShuffle(0, 0), 4)


# --- data sets --------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns() -> None:
    data = load_data(DigitsConfig())
    assert (len(data.train), len(data.val)) == (1500, 297)
    inputs, targets = (
        torch.cat(pair)
        for pair in zip(data.train.batch(range(1500)), data.val.batch(range(297)), strict=True)
    )
    theirs = sklearn.datasets.load_digits()
    ours = sorted(zip(((inputs + 0.5) * 16).flatten(1).round().int().tolist(), targets.tolist(), strict=True))
    right = sorted(zip(theirs.data.astype(int).tolist(), theirs.target.tolist(), strict=True))
    assert ours == right
    assert torch.bincount(data.val.batch(range(297))[1]).min() > 20  # every class is held out too


def test_text_is_the_standard_librarys_and_targets_are_the_next_bytes() -> None:
    data = load_data(TextConfig(max_bytes=50_000, context=32, num_val=20))
    inputs, targets = data.train.batch([0, 5])
    assert inputs.shape == targets.shape == (2, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert len(data.train) + len(data.val) == (50_000 - 1) // 32
    first = bytes(data.val.batch([0])[0][0].tolist())  # window 0 is held out
    assert first.decode()  # the beginning of a source file
    assert data.info == DataInfo((32,), 256)


def test_text_refuses_to_hold_out_everything() -> None:
    with pytest.raises(ConfigError, match="data.num_val must be less than the number of windows"):
        load_data(TextConfig(max_bytes=1000, context=100, num_val=50))


class _Pairs(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index


def test_a_map_style_data_set_is_stacked_also_into_an_empty_batch() -> None:
    samples = DatasetSamples(_Pairs())  # type: ignore[arg-type]
    inputs, targets = samples.batch([4, 1])
    assert inputs[:, 0].tolist() == [4.0, 1.0] and targets.tolist() == [4, 1]
    inputs, targets = samples.batch([])
    assert inputs.shape == (0, 3) and targets.shape == (0,)


def test_an_empty_batch_keeps_its_shape() -> None:
    inputs, targets = load_data(DigitsConfig()).train.batch(np.empty(0, np.int64))  # type: ignore[arg-type]
    assert inputs.shape == (0, 1, 8, 8) and targets.shape == (0,)


def my_data(size: int) -> Data:
    samples = TensorSamples(torch.zeros(size, 4), torch.zeros(size, dtype=torch.int64))
    return Data(samples, samples, DataInfo((4,), 2))


def my_model(info: DataInfo, width: int = 3) -> torch.nn.Module:
    return torch.nn.Linear(info.input_shape[0], width)


def not_a_model(info: DataInfo) -> str:
    return "no"


def test_the_users_own_data_and_model_come_by_module_and_function() -> None:
    data = load_data(UserDataConfig(name="test_data:my_data", options={"size": 6}))
    assert len(data.train) == 6
    model = build_model(UserModelConfig(name="test_data:my_model", options={"width": 7}), data.info)
    assert model(data.train.batch([0])[0]).shape == (1, 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_data:not_a_model", "must be a function that returns a torch.nn.Module, got str"),
        ("test_data:nothing", "must name a function of test_data, got 'nothing'"),
        ("no_such_module:f", "must be an importable module:function, got 'no_such_module:f'"),
    ],
)
def test_what_is_no_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(UserModelConfig(name=name), DataInfo((4,), 2))


# --- models and losses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "info", "shape"),
    [
        (MlpConfig(), DataInfo((1, 8, 8), 10), (2, 10)),
        (ConvNetConfig(), DataInfo((1, 8, 8), 10), (2, 10)),
        (ConvNetConfig(has_batch_norm=False, channels=(4,)), DataInfo((3, 16, 16), 5), (2, 5)),
        (GptConfig(width=16, num_heads=2), DataInfo((12,), 256), (2, 12, 256)),
    ],
)
def test_models_give_logits(
    config: MlpConfig | ConvNetConfig | GptConfig, info: DataInfo, shape: Sequence[int]
) -> None:
    torch.manual_seed(0)
    inputs = torch.zeros(
        2, *info.input_shape, dtype=torch.int64 if len(info.input_shape) == 1 else torch.float32
    )
    assert build_model(config, info)(inputs).shape == tuple(shape)


def test_the_language_model_can_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = build_model(GptConfig(width=16, num_heads=2), DataInfo((8,), 256)).eval()
    text = torch.arange(8).view(1, 8)
    changed = text.clone()
    changed[0, 5] = 99
    one, two = model(text), model(changed)
    assert torch.equal(one[0, :5], two[0, :5]) and not torch.equal(one[0, 5:], two[0, 5:])


def test_too_many_blocks_for_the_image_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 3 blocks for 8x8 images, got 4"):
        build_model(ConvNetConfig(channels=(2, 2, 2, 2)), DataInfo((1, 8, 8), 10))


def test_the_loss_of_a_sample_is_torchs_mean_over_its_positions() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    losses, right = cross_entropy_per_sample(logits, targets)
    for row in range(3):
        assert losses[row] == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits[row], targets[row]))
        )
        assert right[row] == pytest.approx(float((logits[row].argmax(-1) == targets[row]).float().mean()))


@pytest.mark.parametrize("shape", [(0,), (0, 5)])
def test_the_loss_of_no_samples_is_empty(shape: tuple[int, ...]) -> None:
    losses, right = cross_entropy_per_sample(torch.zeros(*shape, 7), torch.zeros(shape, dtype=torch.int64))
    assert losses.shape == right.shape == (0,)


def test_digits_lie_where_they_are_read() -> None:
    with importlib.resources.path("sklearn.datasets.data", "digits.csv.gz") as path, gzip.open(path) as file:
        assert len(file.readlines()) == 1797
