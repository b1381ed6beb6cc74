"""Mask tensors that say what a specification says: found once per tensor and version, and replaced by it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from portable.attn.canonical import ANY, Canonical, boolean
from portable.attn.kept import kept, watched
from portable.attn.masks import Band, Dense, Mask

# Looking at a tensor makes the host wait for an accelerator. Where masks are made anew at each step that would cost more than
# it brings, so after this many tensors of one shape the others are taken as they come.
_TENSORS_LOOKED_AT = 16
_looked_at: Counter[tuple[Any, ...]] = Counter()


@dataclass(frozen=True)
class _Found:
    mask: Mask | None

    @property
    def nbytes(self) -> int:
        return self.mask.tensor.nbytes if isinstance(self.mask, Dense) else 0


def recognised(mask: Dense) -> Mask:
    """A specification in place of a tensor that says the same.

    Booleans: a band (causal with either alignment, sliding windows, everything). Numbers: -inf and 0 are a boolean mask.
    """
    tensor = mask.tensor
    if (
        tensor.dim() < 2
        or min(tensor.shape[-2:]) < 2
        or tensor.requires_grad
        or not (tensor.dtype == torch.bool or tensor.is_floating_point())
        or tensor.is_meta
        or watched()
        or tensor.is_inference()  # its changes cannot be seen
    ):
        return mask
    return kept(("recognised",), (tensor,), lambda: _Found(_looked(tensor))).mask or mask


def _looked(tensor: Tensor) -> Mask | None:
    if tensor.device.type != "cpu":
        place = (tensor.device, tensor.shape)
        _looked_at[place] += 1
        if _looked_at[place] > _TENSORS_LOOKED_AT:
            return None
    while tensor.dim() > 2 and (tensor.shape[0] == 1 or tensor.stride(0) == 0) and tensor.shape[0]:
        tensor = tensor[0]
    if tensor.dim() == 4 and (tensor.shape[1] == 1 or tensor.stride(1) == 0) and tensor.shape[1]:
        tensor = tensor[:, :1]
    if tensor.dtype == torch.bool:
        return _band(tensor) if tensor.dim() == 2 else _everything(tensor)
    if not _on_or_off(tensor[..., 0, :]) or not _on_or_off(tensor):  # one row tells most of them apart
        return None
    allowed = tensor == 0
    return (_band(allowed) if allowed.dim() == 2 else _everything(allowed)) or Dense(allowed)


def _on_or_off(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == float("-inf"))).all())


def _everything(tensor: Tensor) -> Mask | None:
    return Band(-ANY, ANY) if bool(tensor[..., 0, :].all()) and bool(tensor.all()) else None


def _band(square: Tensor) -> Mask | None:
    queries, keys = square.shape
    high, low = _high(square), _low(square)
    if high is None or low is None:
        return None
    expected = boolean(Canonical(queries, keys, low=low, high=high), square.device)
    same = bool(square.all()) if expected is None else torch.equal(square, expected)
    return Band(low, high) if same else None


def _extent(line: Tensor) -> tuple[int, int] | None:
    """The first and the last True of a line; (0, -1) where it has gaps, None where there is none."""
    places = line.nonzero().flatten()
    if not places.numel():
        return None
    first, last = int(places[0]), int(places[-1])
    return (first, last) if places.numel() == last - first + 1 else (0, -1)


def _high(square: Tensor) -> int | None:
    """The greatest ``column - row`` if it is a band: from the first row, or where that is empty, the first column."""
    row = _extent(square[0])
    if row is not None:
        return None if row == (0, -1) else ANY if row[1] == square.shape[1] - 1 else row[1]
    column = _extent(square[:, 0])
    return None if column is None or column == (0, -1) else -column[0]


def _low(square: Tensor) -> int | None:
    """The least ``column - row`` if it is a band: from the last row, or where that is empty, the last column."""
    queries, keys = square.shape
    row = _extent(square[-1])
    if row is not None:
        return None if row == (0, -1) else -ANY if row[0] == 0 else row[0] - (queries - 1)
    column = _extent(square[:, -1])
    return None if column is None or column == (0, -1) else keys - 1 - column[1]
