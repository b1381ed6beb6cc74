"""16-bit against float32 matrix products: does the precision policy of this device hold?

The policy turns autocast on only where 16-bit products are faster, so it is right if the ratio is below 1 exactly for the
dtypes that it names.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from common import interleaved, spread, statement, table

import portable as pt

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def product(size: int, dtype: torch.dtype) -> Callable[[], float]:
    a, b = (torch.randn(size, size, device=pt.device()).to(dtype) for _ in range(2))

    def run() -> float:
        started = time.perf_counter()
        torch.mm(a, b)
        pt.synchronize()
        return time.perf_counter() - started

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--threads", type=int, default=1, help="threads of an operator")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    statement()
    generation = pt.generation()
    title = generation.title if generation else "unknown"
    print(f"backend {pt.active().spec.name} (execution: {pt.execution()}), generation {title}")
    print(f"policy: autocast {pt.precision_policy().autocast}: {pt.precision_policy().reason}\n")
    rows = []
    for size in options.sizes:
        found = interleaved({str(dtype): product(size, dtype) for dtype in DTYPES}, options.rounds)
        base = found[str(torch.float32)].median
        for name, sample in found.items():
            flops = 2 * size**3 / sample.median
            rows.append((size, name, *spread(sample, 1e-3, 2), f"{flops / 1e9:.1f}", f"{sample.median / base:.2f}"))
    table(("size", "dtype", "median ms", "p20", "p80", "GFLOP/s", "time over float32"), rows)


if __name__ == "__main__":
    main()
