"""Masks of the vendor's attention operators: True means masked out, the opposite of PyTorch's.

Source: the API page of ``torch_npu.npu_fusion_attention``, sparse_mode; CANN's documentation of its attention kernels for the
point from which the tokens of a band count.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DEFAULT, ALL, LEFT_UP, RIGHT_DOWN, BAND, PREFIX, PREFIX_COMPRESSED = range(7)
COMPRESSED = 2048
_PREFIX_ROWS = 3072
_COMPRESSED_MODES = (LEFT_UP, RIGHT_DOWN, BAND)


@dataclass(frozen=True)
class Sparsity:
    """What decides which keys a query sees.

    Attributes:
        mode: sparse_mode.
        mask: atten_mask, or None: then everything is seen, whatever the mode says.
        before, after: pre_tockens and next_tockens.
        prefix: for the prefix modes, how many first keys every query of a sequence sees.
    """

    mode: int = DEFAULT
    mask: Tensor | None = None
    before: int = 2**31 - 1
    after: int = 2**31 - 1
    prefix: tuple[int, ...] = ()

    @property
    def is_left_up_causal(self) -> bool:
        """Whether it is PyTorch's ``is_causal``: mode 2 with the mask that belongs to it."""
        return self.mask is not None and self.mode == LEFT_UP and _is_triangular(self.mask)


def check(operator: str, sparsity: Sparsity, batch: int, heads: int, queries: int, keys: int, packed: bool) -> None:
    """Refuse a mask that the vendor's operator refuses.

    Args:
        operator: for messages.
        batch, heads, queries, keys: sizes B, N, Sq, Skv (the largest ones of packed sequences).
        packed: layout TND.

    Raises:
        ValueError: see above.
    """
    mode, mask = sparsity.mode, sparsity.mask
    if not 0 <= mode <= 8:
        raise ValueError(f"{operator} was given sparse_mode={mode}. It takes 0 to 8.")
    if mode > PREFIX_COMPRESSED:
        raise NotImplementedError(
            f"{operator} was given sparse_mode={mode}, whose masks for outer-split sequences are not computed here. Use mode "
            "2, 3 or 4, or an Ascend device."
        )
    if mask is None:
        return
    if mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"{operator} was given an atten_mask of dtype {mask.dtype}. It takes bool or uint8 (1: masked out).")
    shape = tuple(mask.shape)
    if mode in _COMPRESSED_MODES:
        if shape[-2:] != (COMPRESSED, COMPRESSED):
            raise ValueError(
                f"{operator} was given an atten_mask of shape {shape} with sparse_mode={mode}, which takes the mask of shape "
                f"({COMPRESSED}, {COMPRESSED}): torch.triu(torch.ones(2048, 2048), diagonal=1).bool()."
            )
        return
    if mode == PREFIX_COMPRESSED:
        if shape[-2:] != (_PREFIX_ROWS, COMPRESSED):
            raise ValueError(
                f"{operator} was given an atten_mask of shape {shape} with sparse_mode=6, which takes the mask of shape "
                f"({_PREFIX_ROWS}, {COMPRESSED})."
            )
        return
    if mode == PREFIX and packed:
        raise ValueError(f"{operator} was given sparse_mode=5 with packed sequences (TND), which it does not take. Use mode 6.")
    if packed:
        allowed: tuple[tuple[int, ...], ...] = ((queries, keys),)
    else:
        allowed = ((queries, keys), (1, 1, queries, keys), (batch, 1, queries, keys), (batch, heads, queries, keys))
    if shape not in allowed:
        raise ValueError(
            f"{operator} was given an atten_mask of shape {shape}. With these inputs and sparse_mode={mode} it takes one of "
            f"{', '.join(map(str, allowed))}."
        )


def check_prefix(operator: str, sparsity: Sparsity, batch: int) -> None:
    """Refuse a prefix that does not fit its mode.

    Raises:
        ValueError: no prefix where one is needed, of another length than the batch, or a batch above 32.
    """
    if sparsity.mode not in (PREFIX, PREFIX_COMPRESSED):
        return
    if len(sparsity.prefix) != batch:
        raise ValueError(
            f"{operator} was given sparse_mode={sparsity.mode} and prefix={sparsity.prefix} and a batch of {batch}. Give one "
            "length for each sequence."
        )
    if batch > 32:
        raise ValueError(f"{operator} was given sparse_mode={sparsity.mode} and a batch of {batch}. The modes take up to 32.")


def masked(sparsity: Sparsity, sequence: int, start: int, stop: int, queries: int, keys: int) -> Tensor | None:
    """Which scores of the queries start to stop of one sequence are masked out; None if none are.

    Args:
        sparsity: the mask.
        sequence: number of the sequence in the batch.
        start, stop: the rows wanted.
        queries, keys: lengths of the sequence.

    Returns:
        bool, broadcastable to (heads, stop - start, keys).
    """
    mode, mask = sparsity.mode, sparsity.mask
    if mask is None:
        return None
    rows = torch.arange(start, stop).unsqueeze(1)
    columns = torch.arange(keys).unsqueeze(0)
    if mode in (LEFT_UP, RIGHT_DOWN, BAND):
        shift = 0 if mode == LEFT_UP else keys - queries
        distance = columns - rows - shift
        if mode == BAND:
            return _compressed(mask, distance - sparsity.after) | (distance < -sparsity.before)
        return _compressed(mask, distance)
    if mode == PREFIX_COMPRESSED:
        distance = columns - rows - (keys - queries)
        return (distance > 0) & (columns >= sparsity.prefix[sequence])
    given = _of_sequence(mask, sequence)[..., start:stop, :keys].bool()
    if mode == DEFAULT:
        distance = columns - rows
        given = given | (distance > sparsity.after) | (distance < -sparsity.before)
    return given


def _of_sequence(mask: Tensor, sequence: int) -> Tensor:
    if mask.dim() == 4:
        return mask[sequence if mask.shape[0] > 1 else 0]
    return mask


def _along(mask: Tensor) -> Tensor:
    """The elements of a compressed mask by distance from the diagonal (key minus query), -2047 to 2047."""
    square = mask.reshape(mask.shape[-2:])
    return torch.cat([square[1:, 0].flip(0), square[0]]).bool()


def _is_triangular(mask: Tensor) -> bool:
    """Whether a compressed mask is the upper triangle that belongs to modes 2, 3 and 4, as far as it is read."""
    along = _along(mask)
    return bool(along[COMPRESSED:].all()) and not bool(along[:COMPRESSED].any())


def _compressed(mask: Tensor, distance: Tensor) -> Tensor:
    """The compressed mask at a distance from the diagonal (key minus query).

    The kernel lays blocks of the compressed mask along the diagonal and does without it elsewhere: beyond, everything is
    masked; before, nothing. So a wrong mask gives wrong answers, and no error. Which of its elements with the same distance a
    kernel reads is not documented; assumed: those of the first row and column.
    """
    reach = COMPRESSED - 1
    return _along(mask)[distance.clamp(-reach, reach) + reach]
