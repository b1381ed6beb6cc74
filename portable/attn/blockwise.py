"""Attention block of queries by block of queries, in plain PyTorch: memory O(L), for whatever no kernel takes.

Each block of rows sees all its keys at once, so the softmax is exact and needs no second pass; the backward pass computes the
weights again (Dao et al. 2022, arXiv:2205.14135, appendix B.4, without the tiles of keys). Sixteen-bit inputs are computed in
float32 and rounded once. A row that sees no key gives zeros, and zero gradients.

The operators are opaque to torch.compile (`torch.library.custom_op`), so that a graph stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from portable.attn.canonical import Canonical

SCORES = 2**17  # scores of one block: 512 KiB in float32, about a core's second-level cache
ROWS = 128  # rows of a block: more of them waste work under a causal mask, fewer make matrix products slow
_DECISIONS = 2**16  # dropout decides by 16 random bits


@dataclass(frozen=True)
class Call:
    """What is computed: the mask, the factor of the scores, dropout's rate, and the seed of its generator."""

    mask: Canonical
    scale: float
    dropout: float
    seed: int

    @property
    def threshold(self) -> int:
        """Of 65,536 numbers, those below it drop a weight: the rate is exact to 2^-17."""
        return round(self.dropout * _DECISIONS)

    @property
    def kept(self) -> float:
        """The share of weights that survive, by which they are divided."""
        return 1 - self.threshold / _DECISIONS


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _blocks(query: Tensor, key: Tensor, mask: Canonical) -> Iterator[tuple[slice, slice, slice, slice]]:
    """(batch, key heads, rows, columns) of each block."""
    batch, heads, length, _ = query.shape
    key_heads = key.shape[1]
    groups = heads // max(key_heads, 1)
    rows = max(min(length, max(SCORES // max(mask.keys * groups, 1), ROWS // 4), ROWS), 1)
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        first, last = mask.columns(start, stop)
        one = max(last - first, 1) * (stop - start) * groups  # scores of one key head
        together = max(1, min(key_heads, SCORES // one))
        sequences = max(1, min(batch, SCORES // (one * key_heads))) if together == key_heads else 1
        for sequence in range(0, batch, sequences):
            for head in range(0, key_heads, together):
                yield (
                    slice(sequence, min(sequence + sequences, batch)),
                    slice(head, min(head + together, key_heads)),
                    slice(start, stop),
                    slice(first, max(last, first)),
                )


class _Block:
    """One block: its scores as (sequences, key heads, groups, rows, columns), and what is done to them."""

    def __init__(self, call: Call, query: Tensor, key: Tensor, place: tuple[slice, slice, slice, slice], number: int) -> None:
        self.call, self.number = call, number
        self.batch, self.heads, self.rows, self.columns = place
        self.groups = query.shape[1] // key.shape[1]
        self.dtype = _compute_dtype(query)
        self.query_heads = slice(self.heads.start * self.groups, self.heads.stop * self.groups)
        self.shape = (
            self.batch.stop - self.batch.start,
            self.heads.stop - self.heads.start,
            self.groups,
            self.rows.stop - self.rows.start,
            self.columns.stop - self.columns.start,
        )

    @property
    def empty(self) -> bool:
        """Whether it has no scores."""
        return 0 in self.shape

    def rows_of(self, tensor: Tensor) -> Tensor:
        """This block's rows of (B, H, L, D) as (sequences * key heads, groups * rows, D), in the dtype of the computation."""
        part = tensor[self.batch, self.query_heads, self.rows].to(self.dtype)
        return part.reshape(self.shape[0] * self.shape[1], -1, tensor.shape[-1])

    def columns_of(self, tensor: Tensor) -> Tensor:
        """This block's keys of (B, H, L, D) as (sequences * key heads, columns, D), in the dtype of the computation."""
        return tensor[self.batch, self.heads, self.columns].to(self.dtype).flatten(0, 1)

    def statistics_of(self, tensor: Tensor) -> Tensor:
        """This block's rows of (B, H, L), beside its scores."""
        return tensor[self.batch, self.query_heads, self.rows].reshape(*self.shape[:4], 1)

    def put(self, target: Tensor, value: Tensor) -> None:
        """Write this block's rows of (B, H, L, ...)."""
        rows = self.shape[3]
        shape = (self.shape[0], self.shape[1] * self.groups, rows, *target.shape[3:])
        target[self.batch, self.query_heads, self.rows] = value.reshape(shape).to(target.dtype)

    def add(self, target: Tensor, value: Tensor) -> None:
        """Add to this block's keys of (B, H, L, D)."""
        target[self.batch, self.heads, self.columns] += value.unflatten(0, self.shape[:2])

    def part(self, tensor: Tensor | None) -> Tensor | None:
        """The part of something that broadcasts to (B, H, rows, columns), beside the scores."""
        if tensor is None:
            return None
        while tensor.dim() < 4:
            tensor = tensor.unsqueeze(0)
        tensor = tensor if tensor.shape[0] == 1 else tensor[self.batch]
        if tensor.shape[1] == 1:
            return tensor.unsqueeze(2)
        return tensor[:, self.query_heads].unflatten(1, (-1, self.groups))

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores with bias, -inf where masked."""
        found = torch.bmm(query * self.call.scale, key.transpose(1, 2)).view(self.shape)
        mask = self.call.mask
        limits = (self.rows.start, self.rows.stop, self.columns.start, self.columns.stop)
        bias = self.part(mask.bias(*limits, self.dtype))
        if bias is not None:
            found += bias
        if mask.only_band:
            self._cut(found)
            return found
        allowed = self.part(mask.allowed(*limits))
        if allowed is not None:
            found.masked_fill_(~allowed.to(found.device), float("-inf"))
        return found

    def _cut(self, scores: Tensor) -> None:
        """Mask what a band leaves out: only columns at its edges can be."""
        mask, first, last = self.call.mask, self.columns.start, self.columns.stop
        rows = torch.arange(self.rows.start, self.rows.stop, device=scores.device).unsqueeze(1)
        edge = max(first, self.rows.start + mask.high + 1)  # the first column that some row does not reach
        if edge < last:
            beyond = torch.arange(edge, last, device=scores.device) - rows > mask.high
            scores[..., edge - first :].masked_fill_(beyond, float("-inf"))
        edge = min(last, self.rows.stop - 1 + mask.low)
        if edge > first:
            before = torch.arange(first, edge, device=scores.device) - rows < mask.low
            scores[..., : edge - first].masked_fill_(before, float("-inf"))

    def weights(self, scores: Tensor) -> Tensor:
        """The softmax of the scores; zeros in rows that see nothing."""
        found = torch.softmax(scores, -1)
        if not self.call.mask.only_band or self.rows.start + self.call.mask.high < 0 or self._past_the_end:
            found.masked_fill_((scores.amax(-1, keepdim=True) == float("-inf")), 0.0)
        return found

    @property
    def _past_the_end(self) -> bool:
        return self.rows.stop - 1 + self.call.mask.low >= self.call.mask.keys

    def sums(self, scores: Tensor) -> Tensor:
        """The log-sum-exp of the scores, -inf where nothing is seen."""
        return torch.logsumexp(scores, -1)

    def dropped(self, device: torch.device) -> Tensor | None:
        """Which weights are dropped, by the seed and the block's number; None without dropout."""
        if not self.call.threshold:
            return None
        generator = torch.Generator().manual_seed(self.call.seed + self.number)
        count = prod(self.shape)
        words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
        numbers = words.view(torch.int16)[:count].view(self.shape)
        return (numbers < self.call.threshold - _DECISIONS // 2).to(device)


def forward(query: Tensor, key: Tensor, value: Tensor, call: Call, with_sums: bool) -> tuple[Tensor, Tensor | None]:
    """Attention (B, H, Lq, Dv) in the query's dtype, and if asked for the log-sum-exp of the scores (B, H, Lq).

    Args:
        query, key, value: (B, H, Lq, D), (B, Hk, Lk, D), (B, Hk, Lk, Dv); H a multiple of Hk.
        with_sums: whether the log-sum-exp is wanted; it is -inf where nothing is seen.
    """
    batch, heads, length, _ = query.shape
    out = query.new_zeros(batch, heads, length, value.shape[-1])
    dtype = _compute_dtype(query)
    sums = torch.full((batch, heads, length), float("-inf"), dtype=dtype, device=query.device) if with_sums else None
    key, value = key.to(dtype), value.to(dtype)
    for number, place in enumerate(_blocks(query, key, call.mask)):
        block = _Block(call, query, key, place, number)
        if block.empty:
            continue
        scores = block.scores(block.rows_of(query), block.columns_of(key))
        if sums is not None:
            block.put(sums, block.sums(scores))
        weights = block.weights(scores)
        dropped = block.dropped(weights.device)
        if dropped is not None:
            weights.masked_fill_(dropped, 0.0)
        product = torch.bmm(weights.view(-1, block.groups * block.shape[3], block.shape[4]), block.columns_of(value))
        block.put(out, product if dropped is None else product.div_(call.kept))
    return out, sums


def backward(
    grad: Tensor,
    grad_sums: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    call: Call,
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value, and of the additive mask if it is wanted.

    Args:
        grad, grad_sums: gradients of what `forward` answered.
        out: what it answered.
    """
    dtype = _compute_dtype(query)
    dtypes = query.dtype, key.dtype, value.dtype
    key, value = key.to(dtype), value.to(dtype)
    of_query, of_key, of_value = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (query, key, value))
    additive = call.mask.additive
    of_mask = torch.zeros(additive.shape, dtype=dtype, device=additive.device) if wants_mask and additive is not None else None
    for number, place in enumerate(_blocks(query, key, call.mask)):
        block = _Block(call, query, key, place, number)
        if block.empty:
            continue
        rows, keys, mine = block.rows_of(query), block.columns_of(key), block.rows_of(grad)
        weights = block.weights(block.scores(rows, keys))
        delta = (mine * block.rows_of(out)).sum(-1).view(*block.shape[:4], 1)
        if grad_sums is not None:
            delta = delta - block.statistics_of(grad_sums).to(dtype)
        of_weights = torch.bmm(mine, block.columns_of(value).transpose(1, 2)).view(block.shape)
        dropped = block.dropped(weights.device)
        survived = weights
        if dropped is not None:
            of_weights.masked_fill_(dropped, 0.0).div_(call.kept)
            survived = weights.masked_fill(dropped, 0.0).div_(call.kept)
        flat = (-1, block.groups * block.shape[3], block.shape[4])
        block.add(of_value, torch.bmm(survived.view(flat).transpose(1, 2), mine))
        of_scores = of_weights.sub_(delta).mul_(weights)
        if of_mask is not None:
            _add_to_mask(of_mask, of_scores, block)
        of_scores = of_scores.view(flat)
        block.put(of_query, torch.bmm(of_scores, keys).mul_(call.scale))
        block.add(of_key, torch.bmm(of_scores.transpose(1, 2), rows).mul_(call.scale))
    of_query, of_key, of_value = (g.to(d) for g, d in zip((of_query, of_key, of_value), dtypes, strict=True))
    return of_query, of_key, of_value, None if of_mask is None or additive is None else of_mask.to(additive.dtype)


def _add_to_mask(of_mask: Tensor, of_scores: Tensor, block: _Block) -> None:
    """Add a block's gradient where the mask's elements were broadcast from."""
    whole = of_mask
    while whole.dim() < 4:
        whole = whole.unsqueeze(0)
    places = (block.batch, block.query_heads, block.rows, block.columns)
    target = whole[tuple(slice(None) if size == 1 else place for size, place in zip(whole.shape, places, strict=True))]
    target += of_scores.flatten(1, 2).sum_to_size(target.shape)
