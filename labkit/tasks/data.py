"""Data sets by name: scikit-learn's digits, the standard library's own sources, shards, the user's own."""

import gzip
import importlib.util
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.config import DigitsConfig, ShardsConfig, TextConfig, UserDataConfig
from labkit.errors import ConfigError
from labkit.tasks.entry_point import load_entry_point
from labkit.tasks.samples import DataInfo, Samples, StreamedSamples, TensorSamples
from labkit.tasks.shards import ShardSamples, shard_folders

Losses = tuple[Tensor, Tensor]


def cross_entropy_per_sample(outputs: Tensor, targets: Tensor) -> Losses:
    """Cross-entropy and accuracy of each sample, averaged over the sample's own positions.

    Args:
        outputs: Logits; shape (b, ..., classes).
        targets: Class indices; shape (b, ...).

    Returns:
        Loss and share of right predictions per sample; shapes (b,), (b,).
    """
    classes = outputs.shape[-1]
    losses = F.cross_entropy(outputs.reshape(-1, classes), targets.reshape(-1), reduction="none")
    right = (outputs.argmax(-1) == targets).to(losses.dtype)
    rows = len(targets)
    positions = max(1, targets[:1].numel() if rows else targets.shape[1:].numel())
    return losses.view(rows, positions).mean(1), right.view(rows, positions).mean(1)


@dataclass(frozen=True)
class Data:
    """A data set: what to train on, what to hold out, and the loss of a sample.

    Attributes:
        train: Samples to train on.
        val: Samples held out.
        info: What a model must know.
        losses: From model outputs and targets to loss and accuracy per sample, each of shape (b,).
    """

    train: Samples
    val: Samples
    info: DataInfo
    losses: Callable[[Tensor, Tensor], Losses] = field(default=cross_entropy_per_sample)

    def close(self) -> None:
        """End what reads ahead."""
        for samples in (self.train, self.val):
            if isinstance(samples, StreamedSamples):
                samples.close()


def load_data(config: DigitsConfig | TextConfig | ShardsConfig | UserDataConfig, seed: int = 0) -> Data:
    """Load the data set that a configuration names.

    Args:
        config: Of the data.
        seed: Of random transforms of shards.

    Raises:
        ConfigError: it is not there, or the user's function does not return a `Data`.
    """
    if isinstance(config, DigitsConfig):
        return _digits(config)
    if isinstance(config, TextConfig):
        return _text(config)
    if isinstance(config, ShardsConfig):
        train, val = shard_folders(config)
        samples = ShardSamples(train, config, seed, is_training=True)
        return Data(samples, ShardSamples(val, config, seed, is_training=False), samples.info())
    data = load_entry_point(config.name, "data.name")(**config.options)
    if not isinstance(data, Data):
        raise ConfigError(
            f"data.name must be a function that returns a labkit.tasks.Data, got {type(data).__name__} "
            f"from {config.name}. Return Data(train, val, info)."
        )
    return data


def _digits(config: DigitsConfig) -> Data:
    # The file is read without importing scikit-learn, which would cost each worker a second.
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ConfigError("data.name='digits' must find scikit-learn, got nothing. Install scikit-learn.")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rb") as file:
        table = np.array(file.read().replace(b"\n", b",").strip(b",").split(b","), dtype=np.float32)
    table = table.reshape(-1, 65)
    # A fixed shuffle: the file's own order is not random, its tail would be a biased held-out set.
    table = table[np.random.Generator(np.random.Philox(1797)).permutation(len(table))]
    inputs = torch.from_numpy(table[:, :64] / 16.0 - 0.5).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(table[:, 64].astype(np.int64))
    cut = len(table) - config.num_val
    return Data(
        TensorSamples(inputs[:cut], targets[:cut]),
        TensorSamples(inputs[cut:], targets[cut:]),
        DataInfo((1, 8, 8), 10),
    )


def _text(config: TextConfig) -> Data:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = np.frombuffer(_read_sources(stdlib, config.max_bytes), dtype=np.uint8).astype(np.int64)
    num_windows = (len(text) - 1) // config.context
    if num_windows <= config.num_val:
        raise ConfigError(
            f"data.num_val must be less than the number of windows ({num_windows}), got "
            f"{config.num_val}. Raise data.max_bytes or lower data.num_val."
        )
    used = num_windows * config.context
    inputs = torch.from_numpy(text[:used].reshape(num_windows, config.context))
    targets = torch.from_numpy(text[1 : used + 1].reshape(num_windows, config.context))
    # Held-out windows are spread over all files: the last file alone would be another kind of text.
    held_out = torch.zeros(num_windows, dtype=torch.bool)
    held_out[torch.arange(config.num_val) * num_windows // config.num_val] = True
    return Data(
        TensorSamples(inputs[~held_out], targets[~held_out]),
        TensorSamples(inputs[held_out], targets[held_out]),
        DataInfo((config.context,), 256),
    )


def _read_sources(stdlib: Path, max_bytes: int) -> bytes:
    """Python files of the standard library one after the other, in the order of their paths."""
    skipped = {"site-packages", "dist-packages", "test", "idlelib", "__pycache__"}
    pieces: list[bytes] = []
    missing_bytes = max_bytes
    for folder, below, files in os.walk(stdlib):
        below[:] = sorted(set(below) - skipped)
        for name in sorted(file for file in files if file.endswith(".py")):
            pieces.append((Path(folder) / name).read_bytes()[:missing_bytes])
            missing_bytes -= len(pieces[-1])
            if missing_bytes == 0:
                return b"".join(pieces)
    return b"".join(pieces)
