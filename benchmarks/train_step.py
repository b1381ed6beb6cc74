"""A training step written through `portable` against the same step by hand, at equal precision, in one interleaved run.

The model is a small GPT. "by hand" is what one would write for this device without `portable`: torch.compile (or eager),
torch.autocast with the same dtype, the same optimizer options, plain ``.to(device)``. Goal: a ratio of at most 1.01.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from common import interleaved, spread, statement, table
from torch import nn
from torch.nn import functional as F

import portable as pt


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(options: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(256, (options.batch, options.length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def model(options: argparse.Namespace) -> Gpt:
    torch.manual_seed(0)
    return Gpt(256, options.width, options.layers, options.length)


def through_portable(options: argparse.Namespace) -> Callable[[], float]:
    network: nn.Module = model(options).to(pt.device())
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, **pt.optimizer_options("AdamW"))
    scaler = pt.GradScaler()
    loader = iter(pt.prefetch(batches(options)))
    step_model = pt.compile(network) if options.compile else network

    def step() -> float:
        started = time.perf_counter()
        x, y = next(loader)
        optimizer.zero_grad()
        with pt.autocast():
            loss = F.cross_entropy(step_model(x).flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        pt.synchronize()
        step.loss = loss.item()  # type: ignore[attr-defined]
        return time.perf_counter() - started

    return step


def by_hand(options: argparse.Namespace) -> Callable[[], float]:
    device = pt.device()
    dtype = pt.precision_policy().autocast
    network: nn.Module = model(options).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    loader = batches(options)
    step_model = torch.compile(network) if options.compile else network
    accelerated = device.type != "cpu"

    def step() -> float:
        started = time.perf_counter()
        x, y = (tensor.to(device) for tensor in next(loader))
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=getattr(torch, dtype or "bfloat16"), enabled=dtype is not None):
            loss = F.cross_entropy(step_model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        if accelerated:
            torch.accelerator.synchronize()
        step.loss = loss.item()  # type: ignore[attr-defined]
        return time.perf_counter() - started

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="compile both models (default: eager for both)")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of an operator (default: 1, steadier on a shared machine)"
    )
    for name, value in (("batch", 8), ("length", 64), ("width", 128), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    statement()
    mine, plain = through_portable(options), by_hand(options)
    found = interleaved({"by hand": plain, "portable": mine}, options.rounds, warmup=5)
    policy = pt.precision_policy().autocast or "float32"
    mode = "compiled" if options.compile else "eager"
    print(f"backend {pt.active().spec.name} (execution: {pt.execution()}), {policy}, {mode}, {options.threads} thread(s)\n")
    table(("step", "median ms", "p20", "p80"), [(name, *spread(sample, 1e-3, 2)) for name, sample in found.items()])
    print(f"ratio of medians: {found['portable'].median / found['by hand'].median:.4f}")
    print(f"last loss: portable {mine.loss:.6f}, by hand {plain.loss:.6f}")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
