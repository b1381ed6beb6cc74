"""Root-mean-square and layer normalisation, alone or fused with the addition before it.

Sources: the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py) and on hiascend.com; shapes and dtypes of
the answers from the wheel's meta kernels. ``rstd`` and ``mean`` are float32, with a 1 for each dimension normalised over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_ascend.host_acl.derivatives import derivative
from portable_ascend.host_acl.vendor.refusals import check_floats, refuse, wide


def _check(operator: str, input: Tensor, gamma: Tensor) -> tuple[int, ...]:
    """The dimensions to normalise over: those of gamma, which are the last ones of the input."""
    check_floats(operator, input=input, gamma=gamma)
    if not 0 < gamma.dim() <= input.dim() or input.shape[input.dim() - gamma.dim() :] != gamma.shape:
        refuse(
            operator, f"gamma of shape {tuple(gamma.shape)} and input of shape {tuple(input.shape)}", "the input's last sizes"
        )
    return tuple(range(input.dim() - gamma.dim(), input.dim()))


def _rstd(input: Tensor, dims: Sequence[int], epsilon: float) -> Tensor:
    return torch.rsqrt(wide(input).square().mean(tuple(dims), keepdim=True) + epsilon)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """``input * rstd * gamma`` with rstd = 1 / sqrt(mean(input^2) + epsilon) (Zhang, Sennrich 2019)."""
    rstd = _rstd(input, _check("npu_rms_norm", input, gamma), epsilon)
    return (wide(input) * rstd * wide(gamma)).to(input.dtype), rstd


def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of input, and of gamma in float32, by the rstd of the forward pass."""
    dims = _check("npu_rms_norm_backward", input, gamma)
    normed, grad = wide(input) * rstd, wide(dy) * wide(gamma)
    of_input = rstd * (grad - normed * (grad * normed).mean(dims, keepdim=True))
    leading = tuple(range(input.dim() - gamma.dim()))
    products = wide(dy) * normed
    of_gamma = products.sum(leading) if leading else products
    return of_input.to(input.dtype), of_gamma.float()


def npu_gemma_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`npu_rms_norm` with ``1 + gamma``, as the Gemma models have it."""
    rstd = _rstd(input, _check("npu_gemma_rms_norm", input, gamma), epsilon)
    return (wide(input) * rstd * (1 + wide(gamma))).to(input.dtype), rstd


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """`npu_rms_norm` of ``x1 + x2``; answers it, rstd, and the sum rounded to the inputs' dtype, of which the norm is taken."""
    total = x1 + x2
    out, rstd = npu_rms_norm(total, gamma, epsilon)
    return out, rstd, total


def npu_add_rms_norm_cast(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`npu_add_rms_norm`, with the norm in float32 before it in the inputs' dtype."""
    total = x1 + x2
    rstd = _rstd(total, _check("npu_add_rms_norm_cast", total, gamma), epsilon)
    out = wide(total) * rstd * wide(gamma)
    return out.float(), out.to(x1.dtype), rstd, total


def npu_add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Layer norm of ``x1 + x2``: the norm, mean, rstd, and the sum (zeros unless it is asked for)."""
    total = wide(x1) + wide(x2)
    dims = _check("npu_add_layer_norm", total, gamma)
    mean = total.mean(dims, keepdim=True)
    rstd = torch.rsqrt((total - mean).square().mean(dims, keepdim=True) + epsilon)
    out = (total - mean) * rstd * wide(gamma) + wide(beta)
    rest = total if additional_output else torch.zeros_like(total)
    return out.to(x1.dtype), mean, rstd, rest.to(x1.dtype)


def npu_add_layer_norm_backward(
    dy_opt: Tensor | None, x1: Tensor, x2: Tensor, rstd: Tensor, mean: Tensor, gamma: Tensor, dsum_opt: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x1, x2, gamma and beta (the last two in float32)."""
    dy = torch.zeros_like(x1) if dy_opt is None else dy_opt
    total = wide(x1) + wide(x2)
    dims = tuple(range(x1.dim() - gamma.dim(), x1.dim()))
    normed, grad = (total - mean) * rstd, wide(dy) * wide(gamma)
    of_total = rstd * (grad - grad.mean(dims, keepdim=True) - normed * (grad * normed).mean(dims, keepdim=True))
    if dsum_opt is not None:
        of_total = of_total + wide(dsum_opt)
    leading = list(range(x1.dim() - gamma.dim()))
    of_gamma, of_beta = (t.sum(leading) if leading else t for t in (wide(dy) * normed, wide(dy)))
    return of_total.to(x1.dtype), of_total.to(x2.dtype), of_gamma.float(), of_beta.float()


def npu_layer_norm_eval(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer norm without what a backward pass needs."""
    return F.layer_norm(input, list(normalized_shape), weight, bias, eps)


def npu_deep_norm(
    x: Tensor, gx: Tensor, beta: Tensor, gamma: Tensor, alpha: float = 0.3, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm of ``alpha * x + gx`` (Wang et al. 2022, "DeepNet"): mean, rstd, the norm."""
    total = alpha * wide(x) + wide(gx)
    dims = _check("npu_deep_norm", total, gamma)
    mean = total.mean(dims, keepdim=True)
    rstd = torch.rsqrt((total - mean).square().mean(dims, keepdim=True) + epsilon)
    return mean, rstd, ((total - mean) * rstd * wide(gamma) + wide(beta)).to(x.dtype)


def npu_deep_norm_backward(
    dy: Tensor, x: Tensor, gx: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, alpha: float = 0.3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, gx, beta and gamma (the last two in float32)."""
    of_total, _, of_gamma, of_beta = npu_add_layer_norm_backward(wide(dy), alpha * wide(x), wide(gx), rstd, mean, gamma, None)
    return (alpha * of_total).to(x.dtype), of_total.to(gx.dtype), of_beta, of_gamma


def npu_group_norm_silu(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """SiLU of the group norm; with mean and rstd of each group."""
    out, mean, rstd = _group_norm(input, weight, bias, group, eps)
    return F.silu(out).to(input.dtype), mean.to(input.dtype), rstd.to(input.dtype)


def _group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    parts = wide(input).reshape(input.shape[0], groups, -1)
    mean = parts.mean(-1)
    rstd = torch.rsqrt(parts.var(-1, unbiased=False) + eps)
    scale, shift = (None if t is None else wide(t) for t in (weight, bias))
    return F.group_norm(wide(input), groups, scale, shift, eps), mean, rstd


def npu_group_norm_swish(
    input: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float | None = 1e-5, swish_scale: float | None = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``y * sigmoid(swish_scale * y)`` of the group norm y; with mean and rstd of each group."""
    out, mean, rstd = _group_norm(input, weight, bias, num_groups, 1e-5 if eps is None else eps)
    swish = out * torch.sigmoid((1.0 if swish_scale is None else swish_scale) * out)
    return swish.to(input.dtype), mean.to(input.dtype), rstd.to(input.dtype)


def npu_group_norm_swish_grad(
    grad: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    grad_input_mask: Sequence[bool],
    swish_scale: float | None = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias, by the statistics of the forward pass."""
    shape = (input.shape[0], num_groups, *[1] * (input.dim() - 1))
    scale = 1.0 if swish_scale is None else swish_scale
    channel = (1, -1, *[1] * (input.dim() - 2))
    # eps is not passed back; the group's variance and rstd give it.
    variance = wide(input).reshape(input.shape[0], num_groups, -1).var(-1, unbiased=False)
    eps = (wide(rstd).pow(-2) - variance).clamp_min(0)

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        parts = x.unflatten(1, (num_groups, -1))
        dims = tuple(range(2, parts.dim()))
        centred = parts - parts.mean(dims, keepdim=True)
        root = torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps.view(shape))
        y = (centred * root).flatten(1, 2) * w.view(channel) + b.view(channel)
        return y * torch.sigmoid(scale * y)

    of_input, of_weight, of_bias = derivative(forward, [wide(input), wide(weight), wide(bias)], wide(grad))
    return of_input.to(input.dtype), of_weight.to(weight.dtype), of_bias.to(bias.dtype)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    f"npu::{function.__name__}": function
    for function in (
        npu_rms_norm,
        npu_rms_norm_backward,
        npu_gemma_rms_norm,
        npu_add_rms_norm,
        npu_add_rms_norm_cast,
        npu_add_layer_norm,
        npu_add_layer_norm_backward,
        npu_layer_norm_eval,
        npu_deep_norm,
        npu_deep_norm_backward,
        npu_group_norm_silu,
        npu_group_norm_swish,
        npu_group_norm_swish_grad,
    )
}
