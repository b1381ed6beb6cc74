"""A small decoder-only transformer over characters.

Pre-norm blocks (Xiong et al. 2020, arXiv:2002.04745), rotary positions (Su et al. 2021, arXiv:2104.09864), a SwiGLU
feed-forward layer (Shazeer 2020, arXiv:2002.05202), and one matrix shared by the embedding and the output layer
(Press and Wolf 2017, arXiv:1608.05859). Nothing here knows on which device it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10_000.0  # Su et al. 2021, section 3.2.2


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. Two models with equal configurations can exchange weights.

    ``vocabulary`` is the number of characters, ``context`` the longest input in characters, ``width`` the size of the
    residual stream. Raises ValueError where the numbers do not describe a model.
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "width", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} does not divide into {self.heads} heads of an even size, which rotary positions "
                f"need: choose a width that is a multiple of {2 * self.heads}, or another number of heads"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, found {self.dropout}")

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer: 8/3 of ``width``, so that SwiGLU's three matrices hold as many numbers as
        the two of a plain layer four times as wide (Shazeer 2020, section 2), rounded up to a multiple of 32."""
        return 32 * math.ceil(self.width * 8 / 3 / 32)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, (batch, time, width) to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class FeedForward(nn.Module):
    """SwiGLU, (..., width) to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One pre-norm transformer block, (batch, time, width) to the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width, bias=False)
        self.feed_forward = FeedForward(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.attention_norm(x), cos, sin))
        return x + self.drop(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """The whole model: character numbers (batch, time) of dtype int64 to logits (batch, time, vocabulary)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        cos, sin = rotary_tables(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        # GPT-2's scheme (Radford et al. 2019, section 2.3): the layers that write into the residual stream start
        # smaller by sqrt(number of such layers), so that its variance does not grow with depth. The spread of the
        # other matrices follows the width (1 / sqrt(fan-in)) rather than a constant, as narrow models need.
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            spread = 0.02 if name == "embedding.weight" else 1 / math.sqrt(parameter.shape[1])
            if name.endswith(("out.weight", "down.weight")):
                spread /= math.sqrt(2 * self.config.layers)
            nn.init.normal_(parameter, std=spread)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(f"the model reads at most {self.config.context} characters at a time, found {time}")
        x = self.embedding(tokens)
        cos, sin = self.cos[:time], self.sin[:time]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def parameter_count(self) -> int:
        """Number of trained numbers; the matrix shared by embedding and output counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


def rotary_tables(context: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation of each pair, each float32 (context, size / 2), for heads of ``size``."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + size / 2) of ``x`` (batch, heads, time, size) by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
