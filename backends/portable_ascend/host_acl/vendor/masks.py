"""Masks of the vendor's attention operators: True means masked out, the opposite of PyTorch's.

Source: the API page of ``torch_npu.npu_fusion_attention``, sparse_mode; CANN's documentation of its attention kernels for the
point from which the tokens of a band count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

DEFAULT, ALL, LEFT_UP, RIGHT_DOWN, BAND, PREFIX, PREFIX_COMPRESSED, SPLIT_RIGHT_DOWN, SPLIT_LEFT_UP = range(9)
COMPRESSED = 2048
_PREFIX_ROWS = 3072
_SPLIT_MODES = (SPLIT_RIGHT_DOWN, SPLIT_LEFT_UP)
_COMPRESSED_MODES = (LEFT_UP, RIGHT_DOWN, BAND, *_SPLIT_MODES)


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

    def of_sequence(self, sequence: int, count: int) -> Sparsity:
        """What holds for one of ``count`` packed sequences.

        Modes 7 and 8 are for packed sequences of which one was split between devices: the last sequence of a device that had
        mode 3 before (7), the first of one that had mode 2 (8). That one is a band, the others are as before.
        """
        if self.mode not in _SPLIT_MODES:
            return self
        if self.mode == SPLIT_RIGHT_DOWN:
            return replace(self, mode=BAND if sequence == count - 1 else RIGHT_DOWN)
        return replace(self, mode=BAND if sequence == 0 else LEFT_UP)

    def zeroes_rows(self, queries: int, keys: int) -> bool:
        """Whether the kernel itself turns on the handling of rows in which everything is masked.

        The vendor's page: where it can tell that there are such rows, "for instance" mode 3 with more queries than keys. Taken
        to hold for the other modes whose mask follows from numbers too.
        """
        if self.mask is None:
            return False
        return self.mode in (BAND, PREFIX_COMPRESSED) or (self.mode == RIGHT_DOWN and queries > keys)


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
    if mode in _SPLIT_MODES and not packed:
        raise ValueError(
            f"{operator} was given sparse_mode={mode} without packed sequences. It is for input_layout='TND' only."
        )
    if mask is None:
        return
    if mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"{operator} was given an atten_mask of dtype {mask.dtype}. It takes bool or uint8 (1: masked out).")
    shape = tuple(mask.shape)
    if mode in _COMPRESSED_MODES:
        if shape[-2:] != (COMPRESSED, COMPRESSED) or len(shape) > 4 or any(size != 1 for size in shape[:-2]):
            raise ValueError(
                f"{operator} was given an atten_mask of shape {shape} with sparse_mode={mode}, which takes the mask of shape "
                f"({COMPRESSED}, {COMPRESSED}): torch.triu(torch.ones(2048, 2048), diagonal=1).bool()."
            )
        return
    if mode == PREFIX_COMPRESSED:
        if shape[-2:] != (_PREFIX_ROWS, COMPRESSED) or len(shape) > 4 or any(size != 1 for size in shape[:-2]):
            raise ValueError(
                f"{operator} was given an atten_mask of shape {shape} with sparse_mode=6, which takes the mask of shape "
                f"({_PREFIX_ROWS}, {COMPRESSED})."
            )
        return
    if mode == PREFIX and packed:
        raise ValueError(f"{operator} was given sparse_mode=5 with packed sequences (TND), which it does not take. Use mode 6.")
    if packed:
        allowed: tuple[tuple[int, ...], ...] = ((queries, keys),)
    elif mode == PREFIX:
        allowed = ((batch, 1, queries, keys), (batch, heads, queries, keys))
    else:
        allowed = ((queries, keys), (1, 1, queries, keys), (batch, 1, queries, keys), (batch, heads, queries, keys))
    if shape not in allowed:
        raise ValueError(
            f"{operator} was given an atten_mask of shape {shape}. With these inputs and sparse_mode={mode} it takes one of "
            f"{', '.join(map(str, allowed))}."
        )


def check_prefix(operator: str, sparsity: Sparsity, lengths: Sequence[tuple[int, int]]) -> None:
    """Refuse a prefix that does not fit its mode.

    Args:
        operator: for messages.
        sparsity: the mask.
        lengths: numbers of queries and keys of each sequence.

    Raises:
        ValueError: no prefix where one is needed, of another length than the batch, one out of range, or a batch above 32.
    """
    if sparsity.mode not in (PREFIX, PREFIX_COMPRESSED) or sparsity.mask is None:
        return
    batch = len(lengths)
    if len(sparsity.prefix) != batch:
        raise ValueError(
            f"{operator} was given sparse_mode={sparsity.mode} and prefix={sparsity.prefix} and a batch of {batch}. Give one "
            "length for each sequence."
        )
    if batch > 32:
        raise ValueError(f"{operator} was given sparse_mode={sparsity.mode} and a batch of {batch}. The modes take up to 32.")
    for length, (queries, keys) in zip(sparsity.prefix, lengths, strict=True):
        if not max(keys - queries, 0) <= length <= keys:
            raise ValueError(
                f"{operator} was given a prefix of {length} for {queries} queries and {keys} keys. It takes "
                f"{max(keys - queries, 0)} to {keys}."
            )


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
    if mode in (LEFT_UP, RIGHT_DOWN, BAND):  # the modes for split sequences are one of these: `Sparsity.of_sequence`
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
