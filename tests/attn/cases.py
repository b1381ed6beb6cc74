"""Calls of attention, and their reference: a dense softmax in float64 whose mask is written out element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import portable as pt

Sizes = tuple[int, int, int, int, int, int, int]
SIZES: Sizes = (2, 4, 2, 21, 33, 16, 16)
"""Batch, query heads, key heads, queries, keys, head_dim, value head_dim."""


@dataclass(frozen=True)
class Case:
    """A mask: how it is made for sizes, and its rule (batch, head, row, column) to attended or not, and to a bias."""

    name: str
    make: Callable[[Sizes], Any]
    allowed: Callable[[int, int, int, int, Sizes], bool] = lambda b, h, r, c, s: True
    bias: Callable[[int, int, int, int, Sizes], float] = lambda b, h, r, c, s: 0.0


def _dense(s: Sizes) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(s[0], 1, s[3], s[4], generator=generator) > 0.4
    mask[:, :, 2] = False
    return mask


def _additive(s: Sizes) -> Tensor:
    return torch.randn(1, s[1], s[3], s[4], generator=torch.Generator().manual_seed(4))


def _slope(heads: int, head: int) -> float:
    return 2.0 ** (-8 * (head + 1) / heads)


CASES = [
    Case("none", lambda s: None),
    Case("causal", lambda s: pt.Causal(), lambda b, h, r, c, s: c <= r),
    Case("bottom right", lambda s: pt.CausalBottomRight(), lambda b, h, r, c, s: c <= r + s[4] - s[3]),
    Case("window", lambda s: pt.SlidingWindow(4, 2), lambda b, h, r, c, s: -4 <= c - (r + s[4] - s[3]) <= 2),
    Case("causal window", lambda s: pt.SlidingWindow(5), lambda b, h, r, c, s: -5 <= c - (r + s[4] - s[3]) <= 0),
    Case("padding", lambda s: pt.Padding([s[4], 0][: s[0]]), lambda b, h, r, c, s: c < (s[4], 0)[b]),
    Case(
        "padding and causal",
        lambda s: pt.Padding([7, s[4]][: s[0]]) & pt.Causal(),
        lambda b, h, r, c, s: c < (7, s[4])[b] and c <= r,
    ),
    Case(
        "documents",
        lambda s: pt.Document(torch.arange(s[4]) // 5, torch.arange(s[3]) // 7) & pt.Causal(),
        lambda b, h, r, c, s: c // 5 == r // 7 and c <= r,
    ),
    Case("prefix", lambda s: pt.PrefixLM(6), lambda b, h, r, c, s: c < 6 or c <= r + s[4] - s[3]),
    Case(
        "prefix of each",
        lambda s: pt.PrefixLM(torch.tensor([3, 9])[: s[0]]),
        lambda b, h, r, c, s: c < (3, 9)[b] or c <= r + s[4] - s[3],
    ),
    Case(
        "alibi",
        lambda s: pt.ALiBi(pt.alibi_slopes(s[1])),
        bias=lambda b, h, r, c, s: -_slope(s[1], h) * abs(c - (r + s[4] - s[3])),
    ),
    Case(
        "causal alibi",
        lambda s: pt.ALiBi(pt.alibi_slopes(s[1])) & pt.Causal(),
        lambda b, h, r, c, s: c <= r,
        lambda b, h, r, c, s: -_slope(s[1], h) * abs(c - (r + s[4] - s[3])),
    ),
    Case("boolean", _dense, lambda b, h, r, c, s: bool(_dense(s)[b, 0, r, c])),
    Case("additive", _additive, bias=lambda b, h, r, c, s: float(_additive(s)[0, h, r, c])),
    Case("boolean causal", lambda s: torch.ones(s[3], s[4]).tril().bool(), lambda b, h, r, c, s: c <= r),
]


def inputs(sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value."""
    torch.manual_seed(0)
    b, h, hk, q, k, d, dv = sizes
    return [torch.randn(shape).to(dtype) for shape in ((b, h, q, d), (b, hk, k, d), (b, hk, k, dv))]


def reference(case: Case, sizes: Sizes, tensors: list[Tensor], scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp; float64, and differentiable."""
    b, h, hk, q, k, d, _ = sizes
    query, key, value = tensors
    key, value = (t.repeat_interleave(h // hk, 1) for t in (key, value))
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * (1 / math.sqrt(d) if scale is None else scale)
    places = [(i, j, r, c) for i in range(b) for j in range(h) for r in range(q) for c in range(k)]
    if case.name in ("boolean", "additive"):
        given = case.make(sizes)
        allowed = given.expand(b, h, q, k) if given.dtype == torch.bool else torch.ones(b, h, q, k, dtype=torch.bool)
        bias = given.double().expand(b, h, q, k) if given.dtype != torch.bool else torch.zeros(b, h, q, k, dtype=torch.float64)
    else:
        allowed = torch.tensor([case.allowed(*place, sizes) for place in places]).view(b, h, q, k)
        bias = torch.tensor([case.bias(*place, sizes) for place in places], dtype=torch.float64).view(b, h, q, k)
    scores = (scores + bias).masked_fill(~allowed, -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value), torch.logsumexp(scores, -1)
