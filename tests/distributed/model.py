"""The model and data of train.py, in float64 so that only the order of additions may differ between runs."""

from __future__ import annotations

import torch
from torch import nn

STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 24)
        self.outer = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(12, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return x, torch.stack([x.sum(1), x.prod(1)], 1)


def loss_of(predicted: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (predicted - expected).square().mean()
