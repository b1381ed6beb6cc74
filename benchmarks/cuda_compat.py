"""What pt.cuda_compat costs a call, and what it costs a call that names no device.

    python benchmarks/cuda_compat.py [--rounds N]

Each figure is the same call with the same effect, in plain PyTorch with device "cpu" and in the mode with device "cuda" (on the
CPU backend), in turns in one process: a change of the machine's load meets both. The mode is entered and left for each sample,
outside of the time. Units: microseconds of processor time a call, to which other programs on the machine do not add; the
ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from common import interleaved, statement
from torch import nn

import portable as pt

CALLS = 2000
X = torch.ones(4)
SMALL, ROW, LARGE = nn.Linear(8, 8), torch.ones(1, 8), torch.ones(256, 256)


def plain(call: Callable[[], object]) -> float:
    start = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - start) / CALLS


def compatible(call: Callable[[], object]) -> float:
    with pt.cuda_compat("cpu"):
        return plain(call)


# What is called in plain PyTorch, and what the program for CUDA says. Functions are looked up at each call, as in a program.
PAIRS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "torch.zeros(4, device=)": (lambda: torch.zeros(4, device="cpu"), lambda: torch.zeros(4, device="cuda")),
    "torch.zeros(4)": (lambda: torch.zeros(4), lambda: torch.zeros(4)),
    "Tensor.to(device)": (lambda: X.to("cpu"), lambda: X.to("cuda")),
    "Tensor.to(device), a real copy": (
        lambda: LARGE.to("cpu", torch.float64, copy=True),
        lambda: LARGE.to("cuda", torch.float64, copy=True),
    ),
    "Tensor.to(dtype)": (lambda: X.to(torch.float32), lambda: X.to(torch.float32)),
    "an operator (add)": (lambda: X + X, lambda: X + X),
    "Tensor.new_ones(4)": (lambda: X.new_ones(4), lambda: X.new_ones(4)),
    "Linear forward": (lambda: SMALL(ROW), lambda: SMALL(ROW)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="samples of each variant")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    statement()
    print(f"{'':<32}{'plain':>10}{'p20-p80':>16}{'mode':>10}{'p20-p80':>16}{'ratio':>8}{'added':>9}")
    for name, (before, inside) in PAIRS.items():
        samples = interleaved({"plain": lambda: plain(before), "mode": lambda: compatible(inside)}, rounds)  # noqa: B023
        cells = []
        for variant in ("plain", "mode"):
            sample = samples[variant]
            spread = f"{sample.quantile(0.2) * 1e6:.2f}-{sample.quantile(0.8) * 1e6:.2f}"
            cells.append(f"{sample.median * 1e6:>10.2f}{spread:>16}")
        ratio = samples["mode"].median / samples["plain"].median
        added = (samples["mode"].median - samples["plain"].median) * 1e6
        print(f"{name:<32}{cells[0]}{cells[1]}{ratio:>8.2f}{added:>9.2f}")

    start = time.process_time()
    entries = 20
    for _ in range(entries):
        with pt.cuda_compat("cpu"):
            pass
    print(f"\nentering and leaving: {(time.process_time() - start) / entries * 1e3:.1f} ms (after the first time)")


if __name__ == "__main__":
    main()
