"""ATen operators that torch_npu has kernels for and the CPU has not, or computes in another way.

Each function takes and answers CPU tensors, by the operator's schema (native_functions.yaml).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from portable.rehearsal import special
from portable_ascend.host_acl import derivatives
from portable_ascend.host_acl.device import HostDevice

_aten = torch.ops.aten


def conv_depthwise2d(
    self: Tensor,
    weight: Tensor,
    kernel_size: Sequence[int],
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """A convolution in which each input channel has filters of its own."""
    return torch.nn.functional.conv2d(self, weight, bias, stride, padding, dilation, self.shape[1])


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def mm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Products of 16-bit matrices with a 32-bit result."""
    return torch.mm(_wide(self), _wide(mat2)).to(out_dtype)


def bmm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Batched `mm`."""
    return torch.bmm(_wide(self), _wide(mat2)).to(out_dtype)


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """`mm` plus a matrix."""
    return torch.addmm(_wide(self), _wide(mat1), _wide(mat2), beta=beta, alpha=alpha).to(out_dtype)


def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """`bmm` plus matrices."""
    return torch.baddbmm(_wide(self), _wide(batch1), _wide(batch2), beta=beta, alpha=alpha).to(out_dtype)


def masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Backward of the fused dropout."""
    return self * mask.to(self.dtype) * scale


# The parts of SyncBatchNorm (torch/nn/modules/_functions.py). Statistics are float32 where the input has 16 bits, as on CUDA.


def _over_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _per_channel(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.view(1, -1, *[1] * (like.dim() - 2))


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse standard deviation of each channel."""
    wide = _wide(input)
    mean = wide.mean(_over_channels(input))
    variance = wide.var(_over_channels(input), unbiased=False)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """Normalise with given statistics."""
    out = (_wide(input) - _per_channel(mean, input)) * _per_channel(invstd, input)
    if weight is not None:
        out = out * _per_channel(_wide(weight), input)
    if bias is not None:
        out = out + _per_channel(_wide(bias), input)
    return out.to(input.dtype)


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Join the statistics of several processes, each row one process, and update the running ones."""
    counts = counts.to(mean.dtype).view(-1, 1)
    total = counts.sum()
    joined = (mean * counts).sum(0) / total
    variances = invstd.pow(-2) - eps
    variance = ((variances + (mean - joined).square()) * counts).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(joined.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = variance * (total / (total - 1))
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return joined, torch.rsqrt(variance + eps)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums over the batch that the backward pass exchanges: sum_dy, sum_dy_xmu, gradients of weight and bias."""
    dims = _over_channels(input)
    grad = _wide(grad_out)
    total = grad.sum(dims)
    weighted = (grad * (_wide(input) - _per_channel(mean, input))).sum(dims)
    dtype = mean.dtype if weight is None else weight.dtype
    return total, weighted, (weighted * invstd).to(dtype), total.to(dtype)


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Gradient of the input from the exchanged sums."""
    total = count.sum().to(mean.dtype)
    factor = invstd if weight is None else invstd * _wide(weight)
    centred = _wide(input) - _per_channel(mean, input)
    slope = _per_channel(sum_dy_xmu / total * invstd.square(), input)
    out = (_wide(grad_out) - _per_channel(sum_dy / total, input) - centred * slope) * _per_channel(factor, input)
    return out.to(grad_out.dtype)


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Any convolution."""
    return torch.convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Gradients of any convolution."""
    bias_sizes = [weight.shape[1] * groups if transposed else weight.shape[0]]
    return _aten.convolution_backward(
        grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, list(output_mask)
    )


def pdist_forward(self: Tensor, p: float = 2.0) -> Tensor:
    """Distances between rows. The CPU's kernel leaves it to its caller to make the input contiguous."""
    return _aten._pdist_forward(self.contiguous(), p)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_conv_depthwise2d": conv_depthwise2d,
    "mm.dtype": mm,
    "bmm.dtype": bmm,
    "addmm.dtype": addmm,
    "baddbmm.dtype": baddbmm,
    "_masked_scale": masked_scale,
    "_pdist_forward": pdist_forward,
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
    "convolution_overrideable": convolution,
    "convolution_backward_overrideable": convolution_backward,
}


def install(device: HostDevice) -> None:
    """Let the device compute these operators so."""
    special.install(device)
    device.override(_aten.matmul_backward.default, _adapted(derivatives.matmul_backward))
    for name, function in FUNCTIONS.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(_aten, packet), overload or "default")
        device.override(operator, _adapted(function))


def _adapted(function: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda operator, args, kwargs: function(*args, **kwargs)
