"""From a specification or tensor to its canonical forms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from portable.attn.canonical import ANY, Canonical
from portable.attn.masks import (
    ALiBi,
    Band,
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
from portable.attn.recognition import recognised
from portable.errors import ConfigurationError


@dataclass
class _Builder:
    queries: int
    keys: int
    batch: int
    heads: int
    fields: dict[str, Any] = field(default_factory=dict)

    def add(self, mask: Mask) -> None:
        shift = self.keys - self.queries
        if isinstance(mask, Causal):
            self._band(-ANY, 0)
        elif isinstance(mask, CausalBottomRight):
            self._band(-ANY, shift)
        elif isinstance(mask, SlidingWindow):
            self._band(-ANY if mask.left is None else shift - mask.left, ANY if mask.right is None else shift + mask.right)
        elif isinstance(mask, Band):
            self._band(mask.low, mask.high)
        elif isinstance(mask, Padding):
            known = self.fields.get("lengths")
            lengths = mask.lengths if known is None else torch.minimum(known, mask.lengths)
            self._check("Padding", "lengths", lengths, (self.batch,))
            self.fields["lengths"] = lengths
        elif isinstance(mask, Document):
            self._documents(mask)
        elif isinstance(mask, PrefixLM):
            self._once("prefix", "PrefixLM")
            n = mask.n if isinstance(mask.n, Tensor) else torch.tensor([mask.n])
            if n.numel() not in (1, self.batch):
                self._check("PrefixLM", "n", n, (self.batch,))
            self.fields |= {"prefix": n, "prefix_high": shift}
        elif isinstance(mask, ALiBi):
            self._once("slopes", "ALiBi")
            slopes = mask.slopes if mask.slopes.dim() == 2 else mask.slopes.unsqueeze(0)
            if slopes.shape[1] != self.heads or slopes.shape[0] not in (1, self.batch):
                self._check("ALiBi", "slopes", mask.slopes, (self.heads,))
            if slopes.requires_grad and torch.is_grad_enabled():
                self._tensor(_learned_bias(slopes, self.queries, self.keys))
            else:
                self.fields["slopes"] = slopes
        elif isinstance(mask, Dense):
            self._tensor(mask.tensor)
        else:
            raise ConfigurationError(f"a mask of {type(mask).__name__} was given, which is none of portable's. Pass a tensor.")

    def _band(self, low: int, high: int) -> None:
        self.fields["low"] = max(self.fields.get("low", -ANY), low)
        self.fields["high"] = min(self.fields.get("high", ANY), high)

    def _once(self, name: str, shown: str) -> None:
        if name in self.fields:
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
        if given is None and self.queries != self.keys:
            raise ConfigurationError(
                f"Document was given one list of ids with {self.queries} queries and {self.keys} keys. Give query_ids too."
            )
        for name, tensor, length in (("ids", ids, self.keys), ("query_ids", queries, self.queries)):
            if tensor.shape[1] != length or tensor.shape[0] not in (1, self.batch):
                self._check("Document", name, tensor, (self.batch, length))
        self.fields |= {"ids": ids, "query_ids": queries}

    def check(self, tensor: Tensor) -> None:
        """A mask tensor must be of a known kind and broadcast to the scores."""
        target = (self.batch, self.heads, self.queries, self.keys)
        if not _broadcasts(tuple(tensor.shape), target):
            raise ConfigurationError(
                f"a mask of shape {tuple(tensor.shape)} was given, which does not broadcast to (batch, heads, queries, keys) = "
                f"{target}. Reshape it."
            )
        if tensor.dtype != torch.bool and not tensor.is_floating_point():
            raise ConfigurationError(
                f"a mask of dtype {str(tensor.dtype)[6:]} was given. Pass bool (True: attend) or numbers to add to the scores."
            )

    def _tensor(self, tensor: Tensor) -> None:
        if tensor.dtype == torch.bool:
            known = self.fields.get("dense")
            self.fields["dense"] = tensor if known is None else known & tensor
        else:
            known = self.fields.get("additive")
            self.fields["additive"] = tensor if known is None else known + tensor


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(shape) <= 4 and all(a in (1, b) for a, b in zip(shape[::-1], target[::-1], strict=False))


def _learned_bias(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """ALiBi as an additive tensor, through which gradients reach the slopes."""
    alone = Canonical(queries, keys, slopes=slopes)
    bias = alone.bias(0, queries, 0, keys, slopes.dtype)
    assert bias is not None
    return bias


def canonical(mask: Mask | Tensor | None, batch: int, heads: int, queries: int, keys: int) -> Canonical:
    """The forms of a specification for a call's sizes.

    Raises:
        ConfigurationError: it does not fit the sizes.
    """
    builder = _Builder(queries, keys, batch, heads)
    if mask is not None:
        for part in as_mask(mask).parts():
            if isinstance(part, Dense):
                builder.check(part.tensor)
                part = recognised(part)
            builder.add(part)
    return Canonical(queries, keys, **builder.fields)
