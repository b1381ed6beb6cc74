"""`pt.optimizer_options` against PyTorch's default implementation, for the optimizers that have options declared."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from common import interleaved, spread, statement, table
from torch import nn

import portable as pt

SHAPES = {
    "many small (200 x 1,000)": [(1_000,)] * 200,
    "mixed (GPT-like, 3.2 M)": [(256, 256), (256,), (1024, 256), (1024,), (256, 1024), (256,), (768, 256), (768,)] * 4,
    "few large (2 x 4 M)": [(2_000, 2_000)] * 2,
}


def stepper(name: str, shapes: list[tuple[int, ...]], options: dict[str, Any]) -> Callable[[], float]:
    weights = [nn.Parameter(torch.randn(shape, device=pt.device())) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    extra = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(weights, lr=1e-3, **extra, **options)

    def step() -> float:
        started = time.perf_counter()
        optimizer.step()
        pt.synchronize()
        return time.perf_counter() - started

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1, help="threads of an operator")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    statement()
    print(f"backend {pt.active().spec.name} (execution: {pt.execution()})\n")
    print(f"backend {pt.active().spec.name}, {options.threads} thread(s)\n")
    rows = []
    for name in pt.active().spec.optimizers:
        for title, shapes in SHAPES.items():
            variants = {"default": stepper(name, shapes, {}), "portable": stepper(name, shapes, pt.optimizer_options(name))}
            found = interleaved(variants, options.rounds, warmup=3)
            ratio = found["portable"].median / found["default"].median
            rows.append(
                (name, title, spread(found["default"], 1e-3, 2)[0], *spread(found["portable"], 1e-3, 2), f"{ratio:.2f}")
            )
    table(("optimizer", "parameters", "default ms", "portable ms", "p20", "p80", "ratio"), rows)


if __name__ == "__main__":
    main()
