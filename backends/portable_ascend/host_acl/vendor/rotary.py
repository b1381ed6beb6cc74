"""Rotary position embedding (Su et al. 2021), by the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.derivatives import derivative
from portable_ascend.host_acl.vendor.refusals import check_floats, refuse, wide

_MODES = ("half", "interleave")


def turned(input: Tensor, mode: str) -> Tensor:
    """The pairs (a, b) of the last dimension as (-b, a): its two halves ("half"), or its neighbours ("interleave")."""
    if mode == "half":
        first, second = input.chunk(2, -1)
        return torch.cat((-second, first), -1)
    first, second = input[..., ::2], input[..., 1::2]
    return torch.stack((-second, first), -1).flatten(-2)


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """``r1 * input + r2 * turned(input)``, with ``input @ rotate`` in place of turned(input) where that is given.

    Args:
        input: (B, N, S, D), (B, S, N, D) or (S, B, N, D).
        r1, r2: cosines and sines, with 1 where they are broadcast.
    """
    _check("npu_rotary_mul", input, r1, r2, rotary_mode)
    x = wide(input)
    other = turned(x, rotary_mode) if rotate is None else x @ wide(rotate)
    return (wide(r1) * x + wide(r2) * other).to(input.dtype)


def _check(operator: str, input: Tensor, r1: Tensor, r2: Tensor, mode: str) -> None:
    check_floats(operator, input=input, r1=r1, r2=r2)
    if mode not in _MODES:
        refuse(operator, f"rotary_mode={mode!r}", f"one of {', '.join(_MODES)}")
    if not input.dim() == r1.dim() == r2.dim() == 4:
        refuse(operator, f"inputs of {input.dim()}, {r1.dim()} and {r2.dim()} dimensions", "inputs of 4")
    if input.shape[-1] % 2 or input.shape[-1] >= 896:
        refuse(operator, f"head_dim {input.shape[-1]}", "an even one below 896")
    if r1.shape != r2.shape or any(a not in (1, b) for a, b in zip(r1.shape, input.shape, strict=True)):
        refuse(
            operator,
            f"r1 and r2 of shape {tuple(r1.shape)} and {tuple(r2.shape)} with input of shape {tuple(input.shape)}",
            "the input's sizes, or 1 where they are broadcast",
        )


def npu_rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, r1 and r2."""
    found = derivative(
        lambda x, cos, sin: cos * x + sin * turned(x, rotary_mode), [wide(input), wide(r1), wide(r2)], wide(grad)
    )
    of_input, of_r1, of_r2 = (part.to(input.dtype) for part in found)
    return of_input, of_r1, of_r2


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Query and key turned by the same angles.

    Args:
        query, key: (B, S, N, D), or (T, N, D) with layout "TND"; key may have fewer heads.
        cos, sin: the same with N = 1.
    """
    operator = "npu_apply_rotary_pos_emb"
    check_floats(operator, query=query, key=key, cos=cos, sin=sin)
    dims = {"BSND": 4, "TND": 3}.get(layout)
    if dims is None or rotary_mode != "half":
        refuse(operator, f"layout={layout!r} and rotary_mode={rotary_mode!r}", 'BSND or TND and "half" on these devices')
    if any(t.dim() != dims for t in (query, key, cos, sin)) or cos.shape[-2] != 1 or cos.shape != sin.shape:
        refuse(
            operator,
            f"shapes {', '.join(str(tuple(t.shape)) for t in (query, key, cos, sin))} in layout {layout}",
            f"{dims} dimensions, and one head in cos and sin",
        )
    # The vendor turns them in place and says so; the tensors that it answers are what programs use.
    return tuple((wide(t) * wide(cos) + turned(wide(t), "half") * wide(sin)).to(t.dtype) for t in (query, key))  # type: ignore[return-value]


OPERATORS: Mapping[str, Callable[..., Any]] = {
    f"npu::{function.__name__}": function for function in (npu_rotary_mul, npu_rotary_mul_backward, npu_apply_rotary_pos_emb)
}
