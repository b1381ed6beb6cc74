"""Dropout with the mask as bits, eight decisions a byte, in multiples of 128 decisions; and with the mask as bytes.

Sizes of the masks: the wheel's meta kernels. Which bit belongs to which element is not documented; assumed: in order, the
lowest bit of a byte first. Programs pass a mask from one of these operators to the other and do not look inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor import draws
from portable_ascend.host_acl.vendor.refusals import check_floats, refuse, wide

_ALIGNED = 128
_BITS = 2 ** torch.arange(8, dtype=torch.int64)


def _check(operator: str, input: Tensor, p: float) -> None:
    check_floats(operator, input=input)
    if not 0 <= p <= 1:
        refuse(operator, f"p={p}", "a probability from 0 to 1")


def _kept(count: int, p: float, seed: int, offset: int) -> Tensor:
    return torch.rand(count, generator=draws.generator(seed, offset)) >= p


def packed(kept: Tensor) -> Tensor:
    """Decisions (bool, one dimension) as bits: uint8, a multiple of 16 bytes."""
    whole = torch.zeros(-(-kept.numel() // _ALIGNED) * _ALIGNED, dtype=torch.int64)
    whole[: kept.numel()] = kept
    return (whole.view(-1, 8) * _BITS).sum(1).to(torch.uint8)


def unpacked(mask: Tensor, like: Tensor) -> Tensor:
    """The decisions of the bits, in a tensor's shape.

    Raises:
        ValueError: there are fewer than elements.
    """
    if mask.dtype != torch.uint8 or mask.numel() * 8 < like.numel():
        refuse("dropout", f"a mask of {mask.numel()} elements of {mask.dtype} for {like.numel()} numbers", "one bit for each")
    return (mask.view(-1, 1).long() & _BITS).bool().flatten()[: like.numel()].view(like.shape)


def _scaled(input: Tensor, kept: Tensor, p: float) -> Tensor:
    return (wide(input) * kept / (1 - p)).to(input.dtype) if p < 1 else torch.zeros_like(input)


def _npu_dropout(input: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropout, and its mask."""
    _check("_npu_dropout", input, p)
    kept = _kept(input.numel(), p, *draws.draw())
    return _scaled(input, kept.view(input.shape), p), packed(kept)


def _npu_dropout_gen_mask(
    input: Tensor,
    size: Sequence[int],
    p: float,
    seed: int,
    offset: int,
    *,
    parallel: bool | None = True,
    sync: bool | None = None,
) -> Tensor:
    """The mask for a tensor of a size, by a seed and an offset."""
    return packed(_kept(prod(size), p, seed, offset))


def npu_dropout_backward(grad_output: Tensor, mask: Tensor, p: float) -> Tensor:
    """Gradient of the input, by the mask of the forward pass."""
    return _scaled(grad_output, unpacked(mask, grad_output), p)


def npu_dropout_do_mask(input: Tensor, mask: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropout by a mask that is there; answers the mask too."""
    _check("npu_dropout_do_mask", input, p)
    return _scaled(input, unpacked(mask, input), p), mask.clone()


def _dropout_with_byte_mask(input: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropout with a mask of one byte for each number."""
    _check("_dropout_with_byte_mask", input, p)
    kept = _kept(input.numel(), p, *draws.draw())
    return _scaled(input, kept.view(input.shape), p), kept.to(torch.uint8)


def _dropout_with_byte_mask_backward(grad_output: Tensor, mask: Tensor, p: float) -> Tensor:
    """Gradient of the input, by the mask of the forward pass."""
    return _scaled(grad_output, mask.bool().view(grad_output.shape), p)


def npu_dropout_with_add_softmax(
    input: Tensor, x1: Tensor, alpha: float, prob: float, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Dropout of ``softmax(input * alpha + x1)``: the mask (bits), the softmax, its dropout."""
    _check("npu_dropout_with_add_softmax", input, prob)
    softmax = torch.softmax(wide(input) * alpha + wide(x1), dim).to(input.dtype)
    kept = _kept(input.numel(), prob, *draws.draw())
    return packed(kept), softmax, _scaled(softmax, kept.view(input.shape), prob)


def npu_dropout_with_add_softmax_backward(
    grad: Tensor, mask: Tensor, softmax_out: Tensor, alpha: float, prob: float, dim: int
) -> tuple[Tensor, Tensor]:
    """Gradients of input and x1."""
    through = wide(_scaled(grad, unpacked(mask, grad), prob))
    y = wide(softmax_out)
    of_sum = y * (through - (through * y).sum(dim, keepdim=True))
    return (of_sum * alpha).to(grad.dtype), of_sum.to(grad.dtype)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "npu::_npu_dropout_gen_mask.Tensor": _npu_dropout_gen_mask,
    **{
        f"npu::{function.__name__}": function
        for function in (
            _npu_dropout,
            npu_dropout_backward,
            npu_dropout_do_mask,
            _dropout_with_byte_mask,
            _dropout_with_byte_mask_backward,
            npu_dropout_with_add_softmax,
            npu_dropout_with_add_softmax_backward,
        )
    },
}
