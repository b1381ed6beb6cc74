"""Activations and gated linear units, by the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_ascend.host_acl.derivatives import derivative
from portable_ascend.host_acl.vendor.refusals import check_floats, refuse, wide


def _halves(operator: str, input: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    check_floats(operator, input=input)
    if input.shape[dim] % 2:
        refuse(operator, f"size {input.shape[dim]} in dimension {dim}", "an even one, of which it takes the two halves")
    first, second = wide(input).chunk(2, dim)
    return first, second


def _backward(function: Callable[[Tensor], Tensor], input: Tensor, grad: Tensor) -> Tensor:
    return derivative(function, [wide(input)], wide(grad))[0].to(input.dtype)


def _fast_gelu(x: Tensor) -> Tensor:
    # The vendor's formula, x / (1 + exp(-1.702 |x|)) exp(0.851 (x - |x|)), is this one written without overflow.
    return x * torch.sigmoid(1.702 * x)


def _swiglu(x: Tensor, dim: int) -> Tensor:
    first, second = x.chunk(2, dim)
    return F.silu(first) * second


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """``silu(a) * b`` of the two halves of a dimension (Shazeer 2020)."""
    _halves("npu_swiglu", input, dim)
    return _swiglu(wide(input), dim).to(input.dtype)


def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """Gradient of the input."""
    return _backward(lambda x: _swiglu(x, dim), input, grad_output)


_APPROXIMATIONS = ("none", "tanh")


def _geglu(x: Tensor, dim: int, approximate: int, activate_left: bool) -> tuple[Tensor, Tensor]:
    left, right = x.chunk(2, dim)
    active, other = (left, right) if activate_left else (right, left)
    gelu = F.gelu(active, approximate=_APPROXIMATIONS[approximate])
    return other * gelu, gelu


def npu_geglu(input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    """One half of a dimension times GELU of the other (the right one unless told otherwise); with that GELU.

    Args:
        approximate: 0 for the error function, 1 for tanh.
    """
    _halves("npu_geglu", input, dim)
    if approximate not in (0, 1):
        refuse("npu_geglu", f"approximate={approximate}", "0 (none) or 1 (tanh)")
    out, gelu = _geglu(wide(input), dim, approximate, activate_left)
    return out.to(input.dtype), gelu.to(input.dtype)


def npu_geglu_grad(
    grad_output: Tensor, input: Tensor, gelu: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> Tensor:
    """Gradient of the input."""
    return _backward(lambda x: _geglu(x, dim, approximate, activate_left)[0], input, grad_output)


def npu_gelu_mul(input: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU of the first half of the last dimension, times the second."""
    first, second = _halves("npu_gelu_mul", input, -1)
    return (F.gelu(first, approximate=approximate) * second).to(input.dtype)


def npu_silu(input: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return F.silu(input)


def npu_silu_(input: Tensor) -> Tensor:
    """`npu_silu` in place."""
    return F.silu(input, inplace=True)


def npu_silu_backward(grad_output: Tensor, x0: Tensor, x1: Tensor) -> Tensor:
    """Gradient of the input x0; x1 is the forward pass's answer."""
    return _backward(F.silu, x0, grad_output)


def npu_fast_gelu(input: Tensor) -> Tensor:
    """``x * sigmoid(1.702 x)``, the approximation of GELU by a logistic function (Hendrycks, Gimpel 2016)."""
    check_floats("npu_fast_gelu", input=input)
    return _fast_gelu(wide(input)).to(input.dtype)


def npu_fast_gelu_backward(grad: Tensor, input: Tensor) -> Tensor:
    """Gradient of the input."""
    return _backward(_fast_gelu, input, grad)


def npu_gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """GELU, by the error function or by tanh."""
    if approximate not in _APPROXIMATIONS:
        refuse("npu_gelu", f"approximate={approximate!r}", '"none" or "tanh"')
    return F.gelu(input, approximate=approximate)


def npu_gelu_backward(grad_output: Tensor, input: Tensor, *, approximate: str = "none") -> Tensor:
    """Gradient of the input."""
    return _backward(lambda x: F.gelu(x, approximate=approximate), input, grad_output)


def npu_mish(input: Tensor) -> Tensor:
    """``x * tanh(softplus(x))`` (Misra 2019)."""
    return F.mish(input)


def npu_mish_backward(grad: Tensor, input: Tensor) -> Tensor:
    """Gradient of the input."""
    return _backward(F.mish, input, grad)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "npu::fast_gelu": npu_fast_gelu,
    **{
        f"npu::{function.__name__}": function
        for function in (
            npu_swiglu,
            npu_swiglu_backward,
            npu_geglu,
            npu_geglu_grad,
            npu_gelu_mul,
            npu_silu,
            npu_silu_,
            npu_silu_backward,
            npu_fast_gelu,
            npu_fast_gelu_backward,
            npu_gelu,
            npu_gelu_backward,
            npu_mish,
            npu_mish_backward,
        )
    },
}
