"""Attention with the statistics of its softmax, forward and backward, block of queries by block of queries.

Formulas: Dao et al. 2022, "FlashAttention", sections 3.1 and B.4. Sixteen-bit inputs are computed in float32 and rounded once,
as the vendor's kernels accumulate; float32 and float64 stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 512  # queries: at most 512 x Skv scores of one head are held for each head


@dataclass(frozen=True)
class Problem:
    """One call of attention, in the order (batch, heads, length, head_dim).

    Attributes:
        query, key, value: (B, N, Sq, D), (B, Nkv, Skv, D), (B, Nkv, Skv, Dv); N a multiple of Nkv.
        scale: factor of the scores.
        masked: (sequence, start, stop) to the mask of these rows, True for masked out, or None.
        bias: added to the scores ("pse"), broadcastable to (B, N, Sq, Skv), or None.
        bias_scaled: whether it is added before the scale, which then multiplies it too.
        keep_prob: probability that a weight survives dropout.
        keep: the weights that survive, bool (B, N, Sq, Skv), or None for all.
        sink: (N,) scores of a key without a value, or None.
        zero_rows: rows in which everything is masked give zeros; otherwise the mean of the values.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    masked: Callable[[int, int, int], Tensor | None]
    bias: Tensor | None = None
    bias_scaled: bool = False
    keep_prob: float = 1.0
    keep: Tensor | None = None
    sink: Tensor | None = None
    zero_rows: bool = False

    @property
    def repeats(self) -> int:
        """Query heads for each key head."""
        return self.query.shape[1] // max(self.key.shape[1], 1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _blocks(problem: Problem) -> Iterator[tuple[int, slice]]:
    for sequence in range(problem.query.shape[0]):
        for start in range(0, problem.query.shape[2], _BLOCK):
            yield sequence, slice(start, min(start + _BLOCK, problem.query.shape[2]))


def _part(tensor: Tensor | None, problem: Problem, sequence: int, rows: slice) -> Tensor | None:
    """The rows of one sequence of something that broadcasts to (B, N, Sq, Skv)."""
    if tensor is None:
        return None
    sizes = (*problem.query.shape[:3], problem.key.shape[2])
    return tensor.expand(sizes)[sequence, :, rows]


def _scores(problem: Problem, query: Tensor, key: Tensor, sequence: int, rows: slice) -> tuple[Tensor, Tensor | None]:
    """Scores (N, rows, Skv), -inf where masked, and which rows are masked throughout (None if no mask)."""
    scores = torch.matmul(query, key.transpose(-1, -2))
    bias = _part(problem.bias, problem, sequence, rows)
    if bias is not None and problem.bias_scaled:
        scores = (scores + bias) * problem.scale
    else:
        scores = scores * problem.scale
        if bias is not None:
            scores = scores + bias
    mask = problem.masked(sequence, rows.start, rows.stop)
    if mask is None:
        return scores, None
    mask = mask.expand(scores.shape)
    empty = mask.all(-1, keepdim=True)
    if not problem.zero_rows:
        # Without the mode for such rows the mask is a large negative number: equal scores, the mean of the values (assumed).
        scores = scores.masked_fill(empty, 0.0)
        mask = mask & ~empty
        empty = torch.zeros_like(empty)
    return scores.masked_fill(mask, float("-inf")), empty


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output (B, N, Sq, Dv) in the inputs' dtype; row maxima and sums of the softmax, (B, N, Sq), float32."""
    query, value = problem.query, problem.value
    batch, heads, length = query.shape[:3]
    out = torch.zeros(batch, heads, length, value.shape[3], dtype=query.dtype)
    wide = _wide(query[:0]).dtype
    maxima = torch.zeros(batch, heads, length, dtype=wide)
    sums = torch.ones_like(maxima)
    for sequence, rows in _blocks(problem):
        key = _wide(problem.key[sequence]).repeat_interleave(problem.repeats, 0)
        scores, empty = _scores(problem, _wide(query[sequence, :, rows]), key, sequence, rows)
        if scores.shape[-1] == 0:
            continue
        top = scores.amax(-1, keepdim=True)
        if problem.sink is not None:
            top = torch.maximum(top, _wide(problem.sink).view(-1, 1, 1))
        if empty is not None:
            top = top.masked_fill(empty, 0.0)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if problem.sink is not None:
            total = total + torch.exp(_wide(problem.sink).view(-1, 1, 1) - top)
        if empty is not None:
            total = total.masked_fill(empty, 1.0)
        weights = _dropped(problem, weights, sequence, rows)
        part = torch.matmul(weights, _wide(value[sequence]).repeat_interleave(problem.repeats, 0)) / total
        out[sequence, :, rows] = part.to(out.dtype)
        maxima[sequence, :, rows] = top.squeeze(-1)
        sums[sequence, :, rows] = total.squeeze(-1)
    return out, maxima, sums


def _dropped(problem: Problem, weights: Tensor, sequence: int, rows: slice) -> Tensor:
    keep = _part(problem.keep, problem, sequence, rows)
    return weights if keep is None else weights * keep / problem.keep_prob


@dataclass
class Gradients:
    """Gradients of the inputs; those of bias and sink only where they were given."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sink: Tensor | None


def backward(problem: Problem, grad: Tensor, out: Tensor, maxima: Tensor, sums: Tensor) -> Gradients:
    """Gradients from that of the output (B, N, Sq, Dv), and the forward pass's output and statistics (B, N, Sq)."""
    query, repeats = problem.query, problem.repeats
    batch, heads, length = query.shape[:3]
    keys = problem.key.shape[2]
    wide = _wide(query[:0]).dtype
    found = Gradients(
        torch.zeros(query.shape, dtype=wide),
        torch.zeros(problem.key.shape, dtype=wide),
        torch.zeros(problem.value.shape, dtype=wide),
        None if problem.bias is None else torch.zeros(batch, heads, length, keys, dtype=wide),
        None if problem.sink is None else torch.zeros(problem.sink.shape, dtype=wide),
    )
    for sequence, rows in _blocks(problem):
        if keys == 0:
            continue
        key = _wide(problem.key[sequence]).repeat_interleave(repeats, 0)
        value = _wide(problem.value[sequence]).repeat_interleave(repeats, 0)
        part = _wide(query[sequence, :, rows])
        scores, empty = _scores(problem, part, key, sequence, rows)
        top, total = maxima[sequence, :, rows].unsqueeze(-1), sums[sequence, :, rows].unsqueeze(-1)
        weights = torch.exp(scores - top) / total
        if empty is not None:
            weights = weights.masked_fill(empty, 0.0)
        mine = _wide(grad[sequence, :, rows])
        dropped = _dropped(problem, weights, sequence, rows)
        found.value[sequence] += _by_key_head(torch.matmul(dropped.transpose(-1, -2), mine), repeats)
        of_weights = _dropped(problem, torch.matmul(mine, value.transpose(-1, -2)), sequence, rows)
        delta = (mine * _wide(out[sequence, :, rows])).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - delta)
        if found.sink is not None and problem.sink is not None:
            sink = torch.exp(_wide(problem.sink).view(-1, 1, 1) - top) / total
            found.sink -= (sink * delta).sum((1, 2))
        if found.bias is not None:
            found.bias[sequence, :, rows] = of_scores * problem.scale if problem.bias_scaled else of_scores
        found.query[sequence, :, rows] = torch.matmul(of_scores, key) * problem.scale
        found.key[sequence] += _by_key_head(torch.matmul(of_scores.transpose(-1, -2), part), repeats) * problem.scale
    if found.bias is not None and problem.bias is not None:
        found.bias = found.bias.sum_to_size(problem.bias.shape).to(problem.bias.dtype)
    if found.sink is not None and problem.sink is not None:
        found.sink = found.sink.to(problem.sink.dtype)
    found.query = found.query.to(query.dtype)
    found.key, found.value = found.key.to(problem.key.dtype), found.value.to(problem.value.dtype)
    return found


def _by_key_head(tensor: Tensor, repeats: int) -> Tensor:
    return tensor if repeats == 1 else tensor.unflatten(0, (-1, repeats)).sum(1)
