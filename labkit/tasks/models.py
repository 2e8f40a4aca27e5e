"""Small models for the built-in data sets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.config import ConvNetConfig, GptConfig, MlpConfig, UserModelConfig
from labkit.errors import ConfigError
from labkit.tasks.entry_point import load_entry_point
from labkit.tasks.samples import DataInfo


def build_model(config: MlpConfig | ConvNetConfig | GptConfig | UserModelConfig, info: DataInfo) -> nn.Module:
    """Build the model that a configuration names, with torch's global random stream.

    Raises:
        ConfigError: the user's function is missing or does not return a module.
    """
    if isinstance(config, MlpConfig):
        return _mlp(config, info)
    if isinstance(config, ConvNetConfig):
        return _convnet(config, info)
    if isinstance(config, GptConfig):
        return Gpt(config, info)
    model = load_entry_point(config.name, "model.name")(info, **config.options)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.name must be a function that returns a torch.nn.Module, got {type(model).__name__} "
            f"from {config.name}. Return the model."
        )
    return model


def _mlp(config: MlpConfig, info: DataInfo) -> nn.Module:
    width = int(torch.Size(info.input_shape).numel())
    layers: list[nn.Module] = [nn.Flatten()]
    for hidden in config.hidden_sizes:
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, info.num_classes))


def _convnet(config: ConvNetConfig, info: DataInfo) -> nn.Module:
    channels, height, width = info.input_shape
    layers: list[nn.Module] = []
    for out in config.channels:
        layers.append(nn.Conv2d(channels, out, 3, padding=1, bias=not config.has_batch_norm))
        if config.has_batch_norm:
            layers.append(nn.BatchNorm2d(out))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
        channels, height, width = out, height // 2, width // 2
    if height * width == 0:
        raise ConfigError(
            f"model.channels must have at most {info.input_shape[1].bit_length() - 1} blocks for "
            f"{info.input_shape[1]}x{info.input_shape[2]} images, got {len(config.channels)}. Remove some."
        )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, info.num_classes))


class Gpt(nn.Module):
    """Decoder-only transformer with pre-norm blocks (Radford et al., 2019).

    Inputs have shape (b, t), logits (b, t, classes).
    """

    def __init__(self, config: GptConfig, info: DataInfo) -> None:
        super().__init__()
        (context,) = info.input_shape
        self.tokens = nn.Embedding(info.num_classes, config.width)
        self.positions = nn.Embedding(context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, info.num_classes, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the next byte at every position."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.dropout(self.tokens(inputs) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Block(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = (
            part.view(b, t, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        heads = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.out(heads.transpose(1, 2).reshape(b, t, width))
        grown: Tensor = x + self.mlp(self.mlp_norm(x))
        return grown
