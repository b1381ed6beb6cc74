"""pt.attention against F.scaled_dot_product_attention on this CPU, call by call in one interleaved run.

    python benchmarks/attention.py --length 1024 --threads 2

The calls are those that PyTorch's flash kernel does not take, and plain ones. The ratio is PyTorch's median over ours.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import interleaved, statement, table

import portable as pt


def calls(length: int, dtype: torch.dtype) -> dict[str, tuple[Callable[[], Any], Callable[[], Any], list[torch.Tensor]]]:
    """Name to (PyTorch's call, ours, inputs)."""
    query, key, value = (torch.randn(1, 8, length, 64).to(dtype).requires_grad_() for _ in range(3))
    half = value.detach()[..., :32].clone().requires_grad_()
    strided = query.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    flat = [t.detach()[0].clone().requires_grad_() for t in (query, key, value)]
    triangle = torch.ones(length, length, dtype=torch.bool).tril()
    learned = torch.zeros(length, length, dtype=dtype, requires_grad=True)
    stock, ours, causal = F.scaled_dot_product_attention, pt.attention, pt.Causal()
    plain = [query, key, value]
    return {
        "plain": (lambda: stock(*plain), lambda: ours(*plain), plain),
        "causal": (lambda: stock(*plain, is_causal=True), lambda: ours(*plain, mask=causal), plain),
        "causal, dropout 0.1": (
            lambda: stock(*plain, is_causal=True, dropout_p=0.1),
            lambda: ours(*plain, mask=causal, dropout_p=0.1),
            plain,
        ),
        "causal, value head_dim 32": (
            lambda: stock(query, key, half, is_causal=True),
            lambda: ours(query, key, half, mask=causal),
            [query, key, half],
        ),
        "causal, 3-D": (lambda: stock(*flat, is_causal=True), lambda: ours(*flat, mask=causal), flat),
        "causal, strided query": (
            lambda: stock(strided, key, value, is_causal=True),
            lambda: ours(strided, key, value, mask=causal),
            [strided, key, value],
        ),
        "mask that requires grad": (lambda: stock(*plain, learned), lambda: ours(*plain, mask=learned), [*plain, learned]),
        "causal as a boolean tensor": (lambda: stock(*plain, triangle), lambda: ours(*plain, mask=triangle), plain),
    }


def timed(call: Callable[[], Any], inputs: list[torch.Tensor], backward: bool) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        with torch.set_grad_enabled(backward):
            out = call()
        if backward:
            torch.autograd.grad(out.sum(), inputs)
        return time.perf_counter() - started

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pt.use("cpu")
    statement()
    for dtype in (torch.bfloat16, torch.float32):
        rows = []
        for name, (stock, ours, inputs) in calls(options.length, dtype).items():
            row: list[Any] = [name]
            for backward in (False, True):
                if not backward and name.startswith("mask that"):
                    row += ["-", "-", "-"]  # without gradients PyTorch takes its flash kernel
                    continue
                variants = {"stock": timed(stock, inputs, backward), "ours": timed(ours, inputs, backward)}
                found = interleaved(variants, options.rounds, warmup=2)
                first, second = found["stock"].median, found["ours"].median
                row += [f"{first * 1e3:.1f}", f"{second * 1e3:.1f}", f"{first / second:.2f}"]
            rows.append(tuple(row))
        print(f"\n{str(dtype)[6:]}, B1 H8 L{options.length} D64, {options.threads} threads\n")
        table(("call", "stock ms", "ours ms", "ratio", "stock fwd+bwd ms", "ours", "ratio "), rows)
    query = torch.randn(1, 1, 1, 8)
    mask, loops = pt.Causal(), 3000
    variants = {
        "stock": lambda: _loop(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True), loops),
        "ours": lambda: _loop(lambda: pt.attention(query, query, query, mask=mask), loops),
    }
    found = interleaved(variants, 7, warmup=1)
    print(f"\noverhead of a call: {(found['ours'].median - found['stock'].median) / loops * 1e6:.1f} microseconds")


def _loop(call: Callable[[], Any], times: int) -> float:
    started = time.perf_counter()
    with torch.no_grad():
        for _ in range(times):
            call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
