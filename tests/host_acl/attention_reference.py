"""Attention in float64, one sequence at a time, with masks made by a rule for each pair of query and key.

Written from the vendor's pages alone, without the code under test: what the checks of the vendor's attention compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EVERYTHING = 2**31 - 1
TRIANGLE = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), diagonal=1)
PREFIX_MASK = torch.cat([TRIANGLE, torch.arange(2048).expand(1024, 2048) >= 1024])
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (4e-3, 2e-3), torch.bfloat16: (3e-2, 2e-2)}


def sees(mode: int, queries: int, keys: int, before: int = EVERYTHING, after: int = EVERYTHING, prefix: int = 0) -> Tensor:
    """Which key a query sees by a mode's own rule, bool (queries, keys)."""
    corner = keys - queries  # modes that count from the right bottom corner let the last query see the last key
    rules: dict[int, Callable[[int, int], bool]] = {
        0: lambda i, j: i - before <= j <= i + after,
        1: lambda i, j: True,
        2: lambda i, j: j <= i,
        3: lambda i, j: j <= i + corner,
        4: lambda i, j: i + corner - before <= j <= i + corner + after,
        5: lambda i, j: j <= i + corner or j < prefix,
        6: lambda i, j: j <= i + corner or j < prefix,
    }
    return torch.tensor([[rules[mode](i, j) for j in range(keys)] for i in range(queries)], dtype=torch.bool).view(
        queries, keys
    )


@dataclass
class Answer:
    """Output (N, Sq, Dv), the softmax's weights (N, Sq, Skv) and the logarithm of its sum (N, Sq)."""

    out: Tensor
    weights: Tensor
    lse: Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None = None,
    scale: float = 1.0,
    first: Tensor | None = None,
    last: Tensor | None = None,
    sink: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] = lambda weights: weights,
) -> Answer:
    """One sequence in float64: (N, Sq, D), (Nkv, Skv, D), (Nkv, Skv, Dv).

    Args:
        query, key, value: see above.
        seen: bool, broadcastable to (N, Sq, Skv); a row that sees nothing is zero.
        scale: factor of the products.
        first, last: added to the products before the scale, and after it.
        sink: (N,) a further score of each row, without a value.
        drop: what is done to the weights before they meet the values.
    """
    groups = query.shape[0] // key.shape[0]
    heads = [h // groups for h in range(query.shape[0])]
    scores = torch.einsum("nqd,nkd->nqk", query.double(), key.double()[heads])
    if first is not None:
        scores = scores + first.double()
    scores = scores * scale
    if last is not None:
        scores = scores + last.double()
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(-1, 1, 1).expand(*scores.shape[:2], 1)], -1)
    empty = torch.isinf(scores).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1) * ~empty
    weights = weights[..., : key.shape[1]]
    return Answer(torch.einsum("nqk,nkd->nqd", drop(weights), value.double()[heads]), weights, torch.logsumexp(scores, -1))


def arrange(tensor: Tensor, layout: str) -> Tensor:
    """From (B, N, S, D) to a layout."""
    batch, heads, length, size = tensor.shape
    return {
        "BNSD": lambda: tensor,
        "BSND": lambda: tensor.permute(0, 2, 1, 3),
        "BSH": lambda: tensor.permute(0, 2, 1, 3).reshape(batch, length, heads * size),
        "SBH": lambda: tensor.permute(2, 0, 1, 3).reshape(length, batch, heads * size),
        "NBSD": lambda: tensor.permute(1, 0, 2, 3),
        "NSD": lambda: tensor[0],
    }[layout]()


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal within the rounding of a dtype, and of that dtype."""
    rtol, atol = TOLERANCE[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), rtol=rtol, atol=atol)
