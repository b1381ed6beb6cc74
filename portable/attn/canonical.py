"""A specification for given lengths, in the few forms that all of them come down to.

Rules on the distance ``column - row`` become one band; what depends on the sequence stays a small tensor. Whatever a path
cannot take as it is, it gets as a boolean or additive tensor from here, built once per shape and kept in a bounded cache.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from portable.attn.masks import (
    ALiBi,
    Causal,
    CausalBottomRight,
    Dense,
    Document,
    Mask,
    Padding,
    PrefixLM,
    SlidingWindow,
    as_mask,
)
from portable.errors import ConfigurationError

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
        names = ("lengths", "ids", "query_ids", "prefix", "slopes")
        moved = {name: getattr(self, name).to(device) for name in names if getattr(self, name) is not None}
        return replace(self, **moved) if any(t is not getattr(self, n) for n, t in moved.items()) else self

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


@dataclass
class _Builder:
    found: Canonical
    batch: int
    heads: int
    dense: list[Tensor] = field(default_factory=list)

    def add(self, mask: Mask) -> None:
        shift = self.found.keys - self.found.queries
        if isinstance(mask, Causal):
            self._band(-ANY, 0)
        elif isinstance(mask, CausalBottomRight):
            self._band(-ANY, shift)
        elif isinstance(mask, SlidingWindow):
            self._band(-ANY if mask.left is None else shift - mask.left, ANY if mask.right is None else shift + mask.right)
        elif isinstance(mask, Padding):
            lengths = mask.lengths if self.found.lengths is None else torch.minimum(self.found.lengths, mask.lengths)
            self._check("Padding", "lengths", lengths, (self.batch,))
            self.found = replace(self.found, lengths=lengths)
        elif isinstance(mask, Document):
            self._documents(mask)
        elif isinstance(mask, PrefixLM):
            self._once("prefix", "PrefixLM")
            n = mask.n if isinstance(mask.n, Tensor) else torch.tensor([mask.n])
            if n.numel() not in (1, self.batch):
                self._check("PrefixLM", "n", n, (self.batch,))
            self.found = replace(self.found, prefix=n, prefix_high=shift)
        elif isinstance(mask, ALiBi):
            self._once("slopes", "ALiBi")
            slopes = mask.slopes if mask.slopes.dim() == 2 else mask.slopes.unsqueeze(0)
            if slopes.shape[1] != self.heads or slopes.shape[0] not in (1, self.batch):
                self._check("ALiBi", "slopes", mask.slopes, (self.heads,))
            self.found = replace(self.found, slopes=slopes)
        elif isinstance(mask, Dense):
            self._tensor(mask.tensor)
        else:
            raise ConfigurationError(f"a mask of {type(mask).__name__} was given, which is none of portable's. Pass a tensor.")

    def _band(self, low: int, high: int) -> None:
        self.found = replace(self.found, low=max(self.found.low, low), high=min(self.found.high, high))

    def _once(self, name: str, shown: str) -> None:
        if getattr(self.found, name) is not None:
            raise ConfigurationError(f"{shown} was given twice in one mask. Join them in one tensor, or leave one out.")

    def _check(self, name: str, argument: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise ConfigurationError(
                f"{name} was given {argument} of shape {tuple(tensor.shape)} with a batch of {self.batch} and {self.heads} "
                f"heads. Give shape {shape}."
            )

    def _documents(self, mask: Document) -> None:
        self._once("ids", "Document")
        ids = mask.ids if mask.ids.dim() == 2 else mask.ids.unsqueeze(0)
        given = mask.query_ids
        queries = ids if given is None else given if given.dim() == 2 else given.unsqueeze(0)
        if given is None and self.found.queries != self.found.keys:
            raise ConfigurationError(
                f"Document was given one list of ids with {self.found.queries} queries and {self.found.keys} keys. Give "
                "query_ids too."
            )
        for name, tensor, length in (("ids", ids, self.found.keys), ("query_ids", queries, self.found.queries)):
            if tensor.shape[1] != length or tensor.shape[0] not in (1, self.batch):
                self._check("Document", name, tensor, (self.batch, length))
        self.found = replace(self.found, ids=ids, query_ids=queries)

    def _tensor(self, tensor: Tensor) -> None:
        target = (self.batch, self.heads, self.found.queries, self.found.keys)
        try:
            fits = tuple(torch.broadcast_shapes(tuple(tensor.shape), target)) == target and tensor.dim() <= 4
        except RuntimeError:
            fits = False
        if not fits:
            raise ConfigurationError(
                f"a mask of shape {tuple(tensor.shape)} was given, which does not broadcast to (batch, heads, queries, keys) = "
                f"{target}. Reshape it."
            )
        if tensor.dtype == torch.bool:
            dense = tensor if self.found.dense is None else self.found.dense & tensor
            self.found = replace(self.found, dense=dense)
        elif tensor.is_floating_point():
            additive = tensor if self.found.additive is None else self.found.additive + tensor
            self.found = replace(self.found, additive=additive)
        else:
            raise ConfigurationError(
                f"a mask of dtype {str(tensor.dtype)[6:]} was given. Pass bool (True: attend) or numbers to add to the scores."
            )


def canonical(mask: Mask | Tensor | None, batch: int, heads: int, queries: int, keys: int) -> Canonical:
    """The forms of a specification for a call's sizes.

    Raises:
        ConfigurationError: it does not fit the sizes.
    """
    builder = _Builder(Canonical(queries, keys), batch, heads)
    if mask is not None:
        for part in as_mask(mask).parts():
            builder.add(recognised(part) if isinstance(part, Dense) else part)
    return builder.found


# -- tensors that are a specification ------------------------------------------------------------------------------------------

_SEEN_LIMIT = 64
_seen: OrderedDict[int, tuple[Any, int, Mask | None]] = OrderedDict()


def recognised(mask: Dense) -> Mask:
    """A causal specification in place of a boolean tensor that says the same, found once per tensor and version of it."""
    tensor = mask.tensor
    if tensor.dtype != torch.bool or tensor.dim() < 2 or tensor.shape[:-2].numel() != 1 or torch.compiler.is_compiling():
        return mask
    version = tensor._version
    known = _seen.get(id(tensor))
    if known is not None and known[0]() is tensor and known[1] == version:
        return known[2] or mask
    found: Mask | None = None
    if min(tensor.shape[-2:]) > 1:
        square = tensor.reshape(tensor.shape[-2:])
        # One row tells most of them apart before the whole is compared.
        if not bool(square[0, 1]) and bool(square[0, 0]) and torch.equal(square, torch.ones_like(square).tril_()):
            found = Causal()
    _seen[id(tensor)] = (weakref.ref(tensor), version, found)
    while len(_seen) > _SEEN_LIMIT:
        _seen.popitem(last=False)
    return found or mask


# -- tensors of a specification ------------------------------------------------------------------------------------------------

_BUILT_BYTES = 256 * 2**20
_built: OrderedDict[tuple[Any, ...], tuple[Any, Tensor]] = OrderedDict()


def boolean(mask: Canonical, device: torch.device) -> Tensor | None:
    """The whole specification without its bias as one boolean tensor (True: attend), kept for the next call; None for all."""
    if mask.only_band:
        if not mask.banded:
            return None
        key = ("band", mask.queries, mask.keys, mask.low, mask.high, device)
        if key in _built:
            _built.move_to_end(key)
            return _built[key][1]
        return _keep(key, None, _band(mask, device))
    return mask.to(device).allowed(0, mask.queries, 0, mask.keys)


def _band(mask: Canonical, device: torch.device) -> Tensor:
    whole = torch.ones(mask.queries, mask.keys, dtype=torch.bool, device=device)
    if mask.high < mask.keys - 1:
        whole = whole.tril_(mask.high)
    return whole.triu_(mask.low) if mask.low > -mask.queries else whole


def _keep(key: tuple[Any, ...], owner: Any, tensor: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return tensor
    _built[key] = (owner, tensor)
    while sum(t.nbytes for _, t in _built.values()) > _BUILT_BYTES and len(_built) > 1:
        _built.popitem(last=False)
    return tensor
