"""A specification for given lengths, in the few forms that all of them come down to.

Rules on the distance ``column - row`` become one band; what depends on the sequence stays a small tensor. Whatever a path
cannot take as it is, it gets as a boolean or additive tensor from here, built once per shape and kept in a bounded cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from portable.attn.kept import kept

ANY = 2**31 - 1


@dataclass(frozen=True, eq=False)
class Canonical:
    """What a query attends to: everything that each of these allows.

    Attributes:
        queries, keys: Lq and Lk.
        low, high: least and greatest ``column - row``; -ANY and ANY for no limit.
        lengths: (B,) keys of each sequence, or None.
        ids, query_ids: (B or 1, Lk) and (B or 1, Lq) documents, or None.
        prefix: (B or 1,) columns that every row attends to beside those up to ``column - row`` = ``prefix_high``, or None.
        prefix_high: see prefix.
        slopes: (B or 1, H) of ALiBi, or None; its distance is ``abs(column - row - shift)`` with shift = Lk - Lq.
        dense: a boolean tensor (True: attend) that broadcasts to (B, H, Lq, Lk), or None.
        additive: a tensor of numbers that does, or None.
    """

    queries: int
    keys: int
    low: int = -ANY
    high: int = ANY
    lengths: Tensor | None = None
    ids: Tensor | None = None
    query_ids: Tensor | None = None
    prefix: Tensor | None = None
    prefix_high: int = 0
    slopes: Tensor | None = None
    dense: Tensor | None = None
    additive: Tensor | None = None

    @property
    def banded(self) -> bool:
        """Whether the band leaves anything out."""
        return self.low > -self.queries or self.high < self.keys - 1

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What is not the band."""
        return self.lengths, self.ids, self.prefix, self.slopes, self.dense, self.additive

    @property
    def only_band(self) -> bool:
        """Whether the band says everything."""
        return all(tensor is None for tensor in self.tensors)

    @property
    def trivial(self) -> bool:
        """Whether every query attends to every key, without a bias."""
        return self.only_band and not self.banded

    @property
    def causal(self) -> bool:
        """Whether it is PyTorch's ``is_causal`` and nothing more."""
        return self.only_band and self.high == 0 and self.low <= 1 - self.queries

    @property
    def kind(self) -> str:
        """In words, for explanations."""
        words = [_band_words(self)] if self.banded else []
        names = ("padding", "document", "prefix", "ALiBi", "boolean tensor", "additive tensor")
        words += [name for name, tensor in zip(names, self.tensors, strict=True) if tensor is not None]
        return " & ".join(words) or "none"

    def to(self, device: torch.device) -> Canonical:
        """With its tensors on a device."""
        moved: dict[str, Any] = {
            name: _moved(tensor, device)
            for name in ("lengths", "ids", "query_ids", "prefix", "slopes")
            if (tensor := getattr(self, name)) is not None and tensor.device != device
        }
        return replace(self, **moved) if moved else self

    @property
    def signature(self) -> tuple[Any, ...]:
        """What `portable.attn.api.traits` depends on beside the call's sizes: hashable, and cheap."""
        dense, additive = self.dense, self.additive
        return (
            self.low,
            self.high,
            self.lengths is None,
            self.ids is None,
            self.prefix is None,
            self.slopes is None,
            None if dense is None else (dense.shape, dense.device),
            None if additive is None else (additive.shape, additive.device, additive.requires_grad),
        )

    def columns(self, start: int, stop: int) -> tuple[int, int]:
        """The range of columns that rows start to stop (not included) can reach by the band and the prefix."""
        first, last = max(0, start + self.low), min(self.keys, stop - 1 + self.high + 1)
        return (0 if self.prefix is not None else min(first, self.keys)), max(last, 0)

    def allowed(self, start: int, stop: int, first: int, last: int) -> Tensor | None:
        """Which of the columns first to last the rows start to stop attend to; None for all.

        Returns:
            bool, broadcastable to (B, H, stop - start, last - first).
        """
        device = next((t.device for t in (*self.tensors, self.query_ids) if t is not None), torch.device("cpu"))
        rows = torch.arange(start, stop, device=device).view(-1, 1)
        columns = torch.arange(first, last, device=device).view(1, -1)
        found: Tensor | None = None
        if (start + self.low > first - 0 and self.low > -ANY) or stop - 1 + self.low > first:
            found = columns - rows >= self.low
        if start + self.high < last - 1:
            found = _both(found, columns - rows <= self.high)
        if self.prefix is not None:
            n = self.prefix.view(-1, 1, 1, 1)
            found = _both(found, (columns - rows <= self.prefix_high) | (columns < n))
        if self.lengths is not None:
            found = _both(found, columns < self.lengths.view(-1, 1, 1, 1))
        if self.ids is not None and self.query_ids is not None:
            mine, theirs = self.query_ids[:, start:stop], self.ids[:, first:last]
            found = _both(found, (mine.unsqueeze(2) == theirs.unsqueeze(1)).unsqueeze(1))
        if self.dense is not None:
            found = _both(found, block(self.dense, start, stop, first, last))
        return found

    def bias(self, start: int, stop: int, first: int, last: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of these rows and columns, broadcastable to (B, H, rows, columns); None for nothing."""
        found: Tensor | None = None
        if self.slopes is not None:
            device = self.slopes.device
            rows = torch.arange(start, stop, device=device).view(-1, 1) + (self.keys - self.queries)
            distance = (torch.arange(first, last, device=device).view(1, -1) - rows).abs()
            found = -self.slopes.to(dtype)[:, :, None, None] * distance
        if self.additive is not None:
            part = block(self.additive, start, stop, first, last).to(dtype)
            found = part if found is None else found + part
        return found


def block(tensor: Tensor, start: int, stop: int, first: int, last: int) -> Tensor:
    """Rows and columns of a tensor that broadcasts to (..., Lq, Lk)."""
    rows = slice(None) if tensor.dim() < 2 or tensor.shape[-2] == 1 else slice(start, stop)
    columns = slice(None) if tensor.shape[-1] == 1 else slice(first, last)
    return tensor[..., columns] if tensor.dim() < 2 else tensor[..., rows, columns]


def _both(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first & second


def _band_words(mask: Canonical) -> str:
    shift = mask.keys - mask.queries
    if mask.low <= 1 - mask.queries:
        if mask.high == 0:
            return "causal"
        if mask.high == shift:
            return "causal (bottom right)"
    return (
        f"window of column - row from {'any' if mask.low == -ANY else mask.low} to {'any' if mask.high == ANY else mask.high}"
    )


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return kept(("moved", device), (tensor,), lambda: tensor.to(device))


# -- tensors of a specification ------------------------------------------------------------------------------------------------


def _owners(mask: Canonical) -> tuple[Tensor, ...]:
    return tuple(t for t in (*mask.tensors, mask.query_ids) if t is not None)


def _key(name: str, mask: Canonical, *more: Any) -> tuple[Any, ...]:
    return (name, mask.queries, mask.keys, mask.low, mask.high, mask.prefix_high, mask.signature[2:6], *more)


def boolean(mask: Canonical, device: torch.device) -> Tensor | None:
    """The whole specification without its bias as one boolean tensor (True: attend), kept for the next call; None for all."""
    if mask.trivial:
        return None
    if mask.only_band:
        return kept(_key("band", mask, device), (), lambda: _band(mask, device))
    if mask.dense is not None and sum(t is not None for t in mask.tensors) == 1 and not mask.banded:
        return mask.dense
    mask = mask.to(device)
    return kept(_key("boolean", mask, device), _owners(mask), lambda: mask.allowed(0, mask.queries, 0, mask.keys))


def numbers(mask: Canonical, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The whole specification as one tensor that is added to the scores (-inf: masked), kept for the next call."""
    mask = mask.to(device)
    return kept(_key("numbers", mask, device, dtype), _owners(mask), lambda: _numbers(mask, device, dtype))


def _numbers(mask: Canonical, device: torch.device, dtype: torch.dtype) -> Tensor:
    bias = mask.bias(0, mask.queries, 0, mask.keys, dtype)
    allowed = boolean(replace(mask, slopes=None, additive=None), device)
    if bias is None:
        bias = torch.zeros((), dtype=dtype, device=device)
    return (bias if allowed is None else torch.where(allowed, bias, float("-inf"))).to(dtype)


def blind_rows(mask: Canonical) -> Tensor:
    """Which rows of a mask that is one tensor see no key, (B or 1, H or 1, Lq or 1, 1)."""
    tensor = mask.dense if mask.dense is not None else mask.additive
    assert tensor is not None
    return kept(("blind",), (tensor,), lambda: _blind_rows(tensor))


def _blind_rows(tensor: Tensor) -> Tensor:
    found = (~tensor if tensor.dtype == torch.bool else tensor == float("-inf")).all(-1, keepdim=True)
    while found.dim() < 4:
        found = found.unsqueeze(0)
    return found


def guarded(mask: Canonical) -> Canonical:
    """A mask that is one tensor, with rows that see no key let see all."""
    if mask.dense is not None:
        dense = mask.dense
        return replace(mask, dense=kept(("guarded",), (dense,), lambda: dense | blind_rows(mask)))
    additive = mask.additive
    assert additive is not None
    return replace(mask, additive=kept(("guarded",), (additive,), lambda: additive.masked_fill(blind_rows(mask), 0.0)))


def _band(mask: Canonical, device: torch.device) -> Tensor:
    whole = torch.ones(mask.queries, mask.keys, dtype=torch.bool, device=device)
    if mask.high < mask.keys - 1:
        whole = whole.tril_(max(mask.high, -mask.queries))
    return whole.triu_(min(mask.low, mask.keys)) if mask.low > -mask.queries else whole
