"""Operators of the vendor that its autograd rules and kernels call in place of ATen's.

torch_npu differentiates some ATen operators by rules of its own, whose backward passes are operators in its namespace. Each is
computed here as the derivative that PyTorch itself takes of the ATen operator on the CPU, and so with the CPU's bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.ADInplaceOrView
)


@contextlib.contextmanager
def differentiable() -> Iterator[None]:
    """Let autograd record inside a kernel, where PyTorch's dispatcher has switched it off."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD), torch.enable_grad():
        yield


def derivative(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of ``function(*inputs)`` with respect to each input that asks for one.

    Args:
        function: computes one tensor from CPU tensors.
        inputs: those to differentiate by.
        grad: gradient of the function's answer.
    """
    with differentiable():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        return torch.autograd.grad(out, leaves, grad.to(out.dtype))


_REDUCTIONS = ("none", "mean", "sum")


def _first(function: Callable[[Tensor], Tensor], input: Tensor, grad: Tensor) -> Tensor:
    return derivative(function, [input], grad)[0]


def matmul_backward(grad: Tensor, self: Tensor, other: Tensor, mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """aten::matmul_backward, which the CPU has for nested tensors only."""
    wanted = [tensor for tensor, needed in zip((self, other), mask, strict=True) if needed]

    def product(*leaves: Tensor) -> Tensor:
        rest = iter(leaves)
        return torch.matmul(*(next(rest) if needed else fixed for fixed, needed in zip((self, other), mask, strict=True)))

    grads = iter(derivative(product, wanted, grad) if wanted else ())
    return tuple(next(grads) if needed else None for needed in mask)


def matmul_double_backward(
    grad_self: Tensor | None, grad_other: Tensor | None, grad_out: Tensor, self: Tensor, other: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Derivative of `matmul_backward` by grad_out, self and other."""
    with differentiable():
        leaves = [tensor.detach().requires_grad_() for tensor in (grad_out, self, other)]
        firsts = torch.autograd.grad(torch.matmul(leaves[1], leaves[2]), leaves[1:], leaves[0], create_graph=True)
        pairs = [(first, grad) for first, grad in zip(firsts, (grad_self, grad_other), strict=True) if grad is not None]
        if not pairs:
            return None, None, None
        seconds = torch.autograd.grad([first for first, _ in pairs], leaves, [grad for _, grad in pairs], allow_unused=True)
    return tuple(second if needed else None for second, needed in zip(seconds, mask, strict=True))


def l1_loss_backward(grad_output: Tensor, input: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Of F.l1_loss by its input."""
    return _first(lambda x: F.l1_loss(x, target, reduction=_REDUCTIONS[reduction]), input, grad_output)


def kl_div_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> Tensor:
    """Of torch.kl_div by its input."""
    return _first(lambda x: torch.kl_div(x, target, reduction, log_target=log_target), input, grad_output)


def kl_div_target_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> Tensor:
    """Of torch.kl_div by its target."""
    return _first(lambda x: torch.kl_div(input, x, reduction, log_target=log_target), target, grad_output)


def binary_cross_entropy_with_logits_backward(
    grad_output: Tensor,
    input: Tensor,
    target: Tensor,
    weight_opt: Tensor | None,
    pos_weight_opt: Tensor | None,
    reduction: int,
) -> Tensor:
    """Of torch.binary_cross_entropy_with_logits by its input."""
    return _first(
        lambda x: torch.binary_cross_entropy_with_logits(x, target, weight_opt, pos_weight_opt, reduction), input, grad_output
    )


def renorm_backward(grad: Tensor, input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Of torch.renorm."""
    return _first(lambda x: torch.renorm(x, p, dim, maxnorm), input, grad)


def repeat_interleave_backward(grad: Tensor, input: Tensor, repeats: Any, dim: int | None = None) -> Tensor:
    """Of torch.repeat_interleave, for a number or a tensor of repeats."""
    return _first(lambda x: torch.repeat_interleave(x, repeats, dim), input, grad)


def gather_backward(grad: Tensor, self_size: Sequence[int], dim: int, index: Tensor, sparse_grad: bool) -> Tensor:
    """Of torch.gather: the gradients are added up where they came from."""
    return torch.zeros(self_size, dtype=grad.dtype).scatter_add_(dim, index, grad)


def fft_r2c_backward(grad: Tensor, dim: Sequence[int], normalization: int, onesided: bool, last_dim_size: int) -> Tensor:
    """Of the Fourier transform of real numbers (torch/csrc/autograd/FunctionsManual.cpp, fft_r2c_backward)."""
    if not onesided:
        return torch._fft_c2c(grad, dim, normalization, False).real
    half = list(grad.shape)
    half[dim[-1]] = last_dim_size
    whole = grad.new_zeros(half)
    whole.narrow(dim[-1], 0, grad.shape[dim[-1]]).copy_(grad)
    return torch._fft_c2c(whole, dim, normalization, False).real


def fft_c2r_backward(grad: Tensor, dim: Sequence[int], normalization: int) -> Tensor:
    """Of the inverse transform to real numbers (FunctionsManual.cpp, fft_c2r_backward)."""
    spectrum = torch._fft_r2c(grad, list(dim), normalization, True)
    doubled = spectrum.shape[dim[-1]] - 1 - (grad.shape[dim[-1]] % 2 == 0)
    if doubled > 0:
        spectrum.narrow(dim[-1], 1, doubled).mul_(2)
    return spectrum


def broadcast(input: Tensor, size: Sequence[int]) -> Tensor:
    """npu_broadcast: expand, with memory of its own."""
    return input.expand(list(size)).contiguous()


def cast(input: Tensor, dtype: Any, *rest: Any, **kwargs: Any) -> Tensor:
    """npu_dtype_cast and its backward. The vendor passes dtypes by their number in c10::ScalarType."""
    return input.to(_scalar_type(dtype), copy=True)


def _scalar_type(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = _BY_NUMBER.get(int(dtype))
    if found is None:
        raise ValueError(f"the dtype number {dtype} was asked for, which the host runtime does not know: {_BY_NUMBER}")
    return found


# c10/core/ScalarType.h, AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS.
_BY_NUMBER = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 8: torch.complex32, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
    23: torch.float8_e5m2, 24: torch.float8_e4m3fn,
}  # fmt: skip


def same_values(input: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """npu_format_cast: the memory formats of CANN's matrix unit do not exist on the CPU: a copy."""
    return input.clone()


def sort(input: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
    """npu_sort_v2: values only."""
    return torch.sort(input, dim, descending).values


def slice_(input: Tensor, offsets: Sequence[int], size: Sequence[int]) -> Tensor:
    """npu_slice: a block of a tensor."""
    index = tuple(slice(start, start + length) for start, length in zip(offsets, size, strict=True))
    return input[index].clone()


def one_hot(input: Tensor, num_classes: int = -1, depth: int = 1, on_value: Any = 1, off_value: Any = 0) -> Tensor:
    """npu_one_hot: float32, with the two values given."""
    hot = F.one_hot(input.long(), num_classes if num_classes != -1 else depth).bool()
    return torch.where(hot, float(on_value), float(off_value)).float()


def one_(input: Tensor) -> Tensor:
    """Fill with ones."""
    return input.fill_(1)


def conv_backward(
    input: Tensor,
    grad: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    """npu_conv2d_backward, npu_conv3d_backward."""
    zeros = [0] * len(stride)
    return torch.ops.aten.convolution_backward(
        grad, input, weight, [weight.shape[0]], stride, padding, dilation, False, zeros, groups, list(output_mask)
    )


def conv_transpose_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    padding: Sequence[int],
    output_padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    """npu_conv_transpose2d_backward, npu_conv_transpose3d_backward."""
    return torch.ops.aten.convolution_backward(
        grad_output, input, weight, [weight.shape[1] * groups], stride, padding, dilation, True, output_padding, groups,
        list(output_mask),
    )  # fmt: skip


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """npu_linear."""
    return F.linear(input, weight, bias)


def linear_backward(grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """npu_linear_backward: gradients of input and weight."""
    return derivative(F.linear, [input, weight], grad)


OPERATORS: dict[str, Callable[..., Any]] = {
    "npu::matmul_double_backward": matmul_double_backward,
    "npu::l1_loss_backward": l1_loss_backward,
    "npu::kl_div_backward": kl_div_backward,
    "npu::kl_div_target_backward": kl_div_target_backward,
    "npu::npu_binary_cross_entropy_with_logits_backward": binary_cross_entropy_with_logits_backward,
    "npu::npu_renorm_backward": renorm_backward,
    "npu::repeat_interleave_backward_int": repeat_interleave_backward,
    "npu::repeat_interleave_backward_tensor": repeat_interleave_backward,
    "npu::npu_gather_backward": gather_backward,
    "npu::fft_r2c_backward": fft_r2c_backward,
    "npu::fft_c2r_backward": fft_c2r_backward,
    "npu::npu_broadcast": broadcast,
    "npu::npu_dtype_cast": cast,
    "npu::npu_dtype_cast_backward": cast,
    "npu::_npu_dtype_cast": cast,
    "npu::_npu_dtype_cast_backward": cast,
    "npu::npu_format_cast": same_values,
    "npu::npu_format_cast.Tensor": same_values,
    "npu::_npu_format_cast": same_values,
    "npu::_npu_format_cast.aclnn": same_values,
    "npu::_npu_format_cast.input_dtype": same_values,
    "npu::npu_sort_v2": sort,
    "npu::npu_slice": slice_,
    "npu::npu_one_hot": one_hot,
    "npu::one_": one_,
    "npu::npu_conv2d_backward": conv_backward,
    "npu::npu_conv3d_backward": conv_backward,
    "npu::npu_conv_transpose2d_backward": conv_transpose_backward,
    "npu::npu_conv_transpose3d_backward": conv_transpose_backward,
    "npu::npu_linear": linear,
    "npu::npu_linear_backward": linear_backward,
}
