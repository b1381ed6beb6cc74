"""Permutations, selections and status words, by the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def npu_confusion_transpose(input: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """A permutation and a reshape in one, in the order asked for."""
    if transpose_first:
        return input.permute(list(perm)).reshape(list(shape)).clone()
    return input.reshape(list(shape)).permute(list(perm)).contiguous()


def npu_confusion_transpose_backward(grad: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """Gradient of the input, whose shape is passed. transpose_first is this pass's order, the reverse of the forward pass's."""
    back = sorted(range(len(perm)), key=lambda dim: perm[dim])
    if transpose_first:
        return grad.permute(back).reshape(list(shape)).clone()
    return grad.reshape([shape[dim] for dim in perm]).permute(back).contiguous()


def npu_transpose(input: Tensor, perm: Sequence[int], require_contiguous: bool = True) -> Tensor:
    """A permutation with memory of its own."""
    return input.permute(list(perm)).contiguous()


def npu_reshape(input: Tensor, shape: Sequence[int], can_refresh: bool = False) -> Tensor:
    """A reshape with memory of its own."""
    return input.reshape(list(shape)).clone()


def npu_stride_copy(input: Tensor, shape: Sequence[int], stride: Sequence[int], storage_offset: int) -> Tensor:
    """What a view by strides would show, copied."""
    return torch.as_strided(input, list(shape), list(stride), int(storage_offset)).contiguous()


def npu_pad(input: Tensor, paddings: Sequence[int]) -> Tensor:
    """Zeros around: (before, after) of each dimension, the first one first."""
    pairs = [paddings[i : i + 2] for i in range(0, len(paddings), 2)]
    return F.pad(input, [size for pair in reversed(pairs) for size in pair])


def npu_max_dim(input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Greatest values and where they are, as int32."""
    values, indices = torch.max(input, dim, keepdim)
    return values, indices.int()


def npu_min_dim(input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Least values and where they are, as int32."""
    values, indices = torch.min(input, dim, keepdim)
    return values, indices.int()


def npu_extremum_backward(grad: Tensor, dim: int, indices: Tensor, sizes: Sequence[int], keepdim: bool) -> Tensor:
    """Gradient of the input of `npu_max_dim` and `npu_min_dim`."""
    if not keepdim:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return torch.zeros(list(sizes), dtype=grad.dtype).scatter_(dim, indices.long(), grad)


def npu_bmm_v2(input: Tensor, mat2: Tensor, output_sizes: Sequence[int]) -> Tensor:
    """A product of matrices, in the shape asked for if one is."""
    out = torch.matmul(input, mat2)
    return out.reshape(list(output_sizes)) if output_sizes else out


def npu_bmm_v2_mat1_backward(grad: Tensor, mat1: Tensor, mat2: Tensor, size: Sequence[int]) -> Tensor:
    """Gradient of the first matrix, summed to its size."""
    return torch.matmul(grad, mat2.transpose(-1, -2)).sum_to_size(list(size))


def npu_bmm_v2_mat2_backward(grad: Tensor, mat1: Tensor, mat2: Tensor, size: Sequence[int]) -> Tensor:
    """Gradient of the second matrix, summed to its size."""
    return torch.matmul(mat1.transpose(-1, -2), grad).sum_to_size(list(size))


def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """A copy of the input with the slices at the indices replaced (the last dimension of indices is one index)."""
    return npu_scatter_nd_update_(input.clone(), indices, updates)


def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """`npu_scatter_nd_update` in place."""
    input[tuple(indices.long().unbind(-1))] = updates
    return input


# The float status is eight words of the device in which its arithmetic units note an overflow. The host's arithmetic gives inf
# and nan, as the device does in the mode that is its default, in which these words stay 0.


def npu_alloc_float_status(input: Tensor) -> Tensor:
    """The words, cleared."""
    return torch.zeros(8)


def npu_float_status(input: Tensor, mode: int = 0) -> Tensor:
    """Reads or clears the words: 0."""
    return torch.zeros(8)


def amp_foreach_non_finite_check(scaled_grads: Sequence[Tensor]) -> bool:
    """Whether any gradient has an inf or a nan."""
    return any(not bool(torch.isfinite(grad).all()) for grad in scaled_grads)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "npu::npu_confusion_transpose": npu_confusion_transpose,
    "npu::npu_confusion_transpose_backward": npu_confusion_transpose_backward,
    "npu::npu_transpose": npu_transpose,
    "npu::npu_reshape": npu_reshape,
    "npu::npu_stride_copy": npu_stride_copy,
    "npu::npu_pad": npu_pad,
    "npu::npu_max.dim": npu_max_dim,
    "npu::npu_max_backward": npu_extremum_backward,
    "npu::npu_min.dim": npu_min_dim,
    "npu::npu_min_backward": npu_extremum_backward,
    "npu::npu_bmmV2": npu_bmm_v2,
    "npu::npu_bmm_v2_mat1_backward": npu_bmm_v2_mat1_backward,
    "npu::npu_bmm_v2_mat2_backward": npu_bmm_v2_mat2_backward,
    "npu::npu_scatter_nd_update": npu_scatter_nd_update,
    "npu::npu_scatter_nd_update_": npu_scatter_nd_update_,
    "npu::npu_alloc_float_status": npu_alloc_float_status,
    "npu::npu_get_float_status": npu_float_status,
    "npu::npu_clear_float_status": npu_float_status,
    "npu::_amp_foreach_non_finite_check": amp_foreach_non_finite_check,
}
