"""npu_grouped_matmul and npu_grouped_matmul_add: one product of matrices for each group of rows (or of columns).

Source: "torch_npu.npu_grouped_matmul" (Ascend/op-plugin, docs/zh/custom_APIs, and in the wheel torch_npu/_op_plugin_docs.py,
which has npu_grouped_matmul_add too); the numbers of tensors that go together and the
shapes of the answers also from the wheel's meta kernel (torch_npu/op_plugin/meta/_meta_registrations.py). Sixteen-bit products
are summed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor.refusals import refuse, wide

_NAME = "npu_grouped_matmul"
_NONE, _ROWS, _COLUMNS = -1, 0, 2
_SEPARATE, _ONE = (0, 1), (2, 3)
_BIAS = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.float32: torch.float32}
# output_dtype arrives as PyTorch's number of the dtype (c10/core/ScalarType.h).
_NUMBERS = {3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
_TENSORS, _GROUPS = 128, 1024


def _refuse(found: str, allowed: str) -> NoReturn:
    refuse(_NAME, found, allowed)


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: int | None = None,
    **others: Any,
) -> list[Tensor]:
    """Products x_i @ weight_i + bias_i.

    Args:
        x: matrices (M_i, K_i), or one, whose rows (group_type 0) or columns (2) are in groups.
        weight: matrices (K_i, N_i), or one tensor (groups, K, N); (K, N) with group_type 2.
        bias: (N_i,) for each weight.
        group_list: int64, ends of the groups, or their sizes with group_list_type 1.
        split_item: 0 and 1 answer one tensor for each weight; 2 and 3 one in all.
        group_type: -1 without groups, 0 rows, 2 columns of x with rows of weight.
        group_list_type: see group_list.
        act_type: an activation, for quantised products only.
        output_dtype: that of x.
        others: arguments of quantised products.

    Raises:
        ValueError: what the page does not allow.
        NotImplementedError: quantised products.
    """
    _refuse_quantised(x, weight, {"act_type": act_type or None, **others})
    if group_type not in (_NONE, _ROWS, _COLUMNS):
        _refuse(f"group_type={group_type}", "-1 (no groups), 0 (rows), 2 (columns)")
    sizes = None if group_list is None else _sizes(group_list, group_list_type or 0)
    return _products(x, weight, bias, sizes, split_item or 0, int(group_type or 0), _NUMBERS.get(output_dtype or -1))


def npu_grouped_matmul_list(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Sequence[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: torch.dtype | None = None,
    **others: Any,
) -> list[Tensor]:
    """The older form: ends of groups of rows as a list of numbers, and no group_type."""
    _refuse_quantised(x, weight, {"act_type": act_type or None, **others})
    if group_type is not None or group_list_type:
        _refuse(f"group_type={group_type}, group_list_type={group_list_type} with a group_list of numbers", "neither with it")
    if not group_list:
        return _products(
            x, weight, bias, None, split_item or 0, _NONE if split_item in (None, *_SEPARATE) else _ROWS, output_dtype
        )
    ends = [int(end) for end in group_list]
    if len(ends) == 1 or ends != sorted(ends) or ends[0] < 0:
        _refuse(f"group_list={ends}", "at least two numbers that do not fall")
    return _products(x, weight, bias, _differences(ends), split_item or 0, _ROWS, output_dtype)


def _refuse_quantised(x: Sequence[Tensor], weight: Sequence[Tensor], others: dict[str, Any]) -> None:
    given = sorted(name for name, value in others.items() if value is not None and value != [])
    dtypes = {t.dtype for t in (*x, *weight)}
    if given or not dtypes <= _BIAS.keys():
        raise NotImplementedError(
            f"{_NAME} was given {', '.join(given) or 'tensors'} with {', '.join(sorted(map(str, dtypes)))}: quantised products "
            "are not computed here. Use float16, bfloat16 or float32 tensors without these arguments, or an Ascend device."
        )
    if not x or not weight or max(len(x), len(weight)) > _TENSORS:
        _refuse(f"{len(x)} and {len(weight)} tensors", f"1 to {_TENSORS} of each")
    if len(dtypes) > 1:
        _refuse(f"dtypes {', '.join(sorted(map(str, dtypes)))}", "one dtype for x and weight")


def _differences(ends: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _sizes(group_list: Tensor, kind: int) -> list[int]:
    if group_list.dtype != torch.int64 or group_list.dim() != 1 or not 0 < group_list.numel() <= _GROUPS:
        _refuse(
            f"a group_list of {group_list.dtype} and shape {tuple(group_list.shape)} with group_list_type={kind}",
            f"int64 of one dimension, up to {_GROUPS} groups (pairs, type 2, are for int8 products)",
        )
    if kind not in (0, 1):
        _refuse(f"group_list_type={kind}", "0 (ends), 1 (sizes); 2 (pairs) is for int8 products")
    numbers = [int(n) for n in group_list.tolist()]
    found = numbers if kind else _differences(numbers)
    if min(found) < 0:
        _refuse(f"group_list={numbers} with group_list_type={kind}", "ends that do not fall (0), sizes from 0 up (1)")
    return found


def _products(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None,
    sizes: list[int] | None,
    split_item: int,
    group_type: int,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    if split_item not in (*_SEPARATE, *_ONE):
        _refuse(f"split_item={split_item}", "0 to 3")
    if dtype not in (None, x[0].dtype):
        _refuse(f"output_dtype={dtype} with tensors of {x[0].dtype}", "the dtype of x, or None")
    if group_type == _COLUMNS:
        return _of_columns(x, weight, bias, sizes, split_item)
    stacked = len(weight) == 1 and weight[0].dim() == 3
    weights = list(weight[0]) if stacked else list(weight)
    if any(w.dim() != 2 for w in weights):
        _refuse(f"weights of shape {[tuple(w.shape) for w in weight]}", "matrices, or one tensor of three dimensions")
    biases = _biases(bias, weights, stacked, x[0].dtype)
    if group_type == _NONE:
        if sizes is not None or split_item not in _SEPARATE or stacked:
            _refuse(
                f"group_type=-1 with {'a' if sizes is not None else 'no'} group_list, split_item={split_item} and weights of "
                f"shape {[tuple(w.shape) for w in weight]}",
                "no group_list, split_item 0 or 1 and matrices with it",
            )
        return [_product(*each) for each in _matched(x, weights, biases)]
    rows = _rows(x, sizes, len(weights))
    parts = [_product(*each) for each in _matched(rows, weights, biases)]
    if split_item in _SEPARATE:
        return parts
    if len({w.shape[1] for w in weights}) > 1:
        _refuse(
            f"split_item={split_item} with weights of {[w.shape[1] for w in weights]} columns", "one number of columns with it"
        )
    total = sum(t.shape[0] for t in x)
    out = x[0].new_zeros(total, weights[0].shape[1])  # rows behind the last group are not written by the device
    out[: sum(p.shape[0] for p in parts)] = torch.cat(parts)
    return [out]


def _rows(x: Sequence[Tensor], sizes: list[int] | None, groups: int) -> list[Tensor]:
    if any(t.dim() != 2 for t in x):
        _refuse(f"tensors of shape {[tuple(t.shape) for t in x]} in groups", "matrices")
    if len(x) > 1:
        mine = [t.shape[0] for t in x]
        if sizes is not None and sizes != mine:
            _refuse(f"groups of {sizes} rows and matrices of {mine} rows", "the same numbers")
        return list(x)
    if sizes is None:
        _refuse("one x and no group_list", "a group_list with it")
    if len(sizes) != groups or sum(sizes) > x[0].shape[0]:
        _refuse(
            f"groups of {sizes} rows, {groups} weights and an x of shape {tuple(x[0].shape)}",
            "a group for each weight, and no more rows than x has",
        )
    return list(x[0][: sum(sizes)].split(sizes))


def _matched(
    x: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    if len(x) != len(weights):
        _refuse(f"{len(x)} matrices and {len(weights)} weights", "as many of the one as of the other")
    for left, right in zip(x, weights, strict=True):
        if not 2 <= left.dim() <= 6 or left.shape[-1] != right.shape[0]:
            _refuse(f"x of shape {tuple(left.shape)} with a weight of shape {tuple(right.shape)}", "(..., K) and (K, N)")
    return list(zip(x, weights, biases, strict=True))


def _biases(bias: Sequence[Tensor] | None, weights: Sequence[Tensor], stacked: bool, dtype: torch.dtype) -> list[Tensor | None]:
    if not bias:
        return [None] * len(weights)
    rows = list(bias[0]) if stacked and len(bias) == 1 and bias[0].dim() == 2 else list(bias)
    if [tuple(b.shape) for b in rows] != [(w.shape[1],) for w in weights] or any(b.dtype != _BIAS[dtype] for b in rows):
        _refuse(
            f"biases of {[(b.dtype, tuple(b.shape)) for b in bias]} for {len(weights)} weights and x of {dtype}",
            f"{_BIAS[dtype]}, one of the weight's columns for each weight",
        )
    return [*rows]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.matmul(wide(x), wide(weight))
    return (out if bias is None else out + wide(bias)).to(x.dtype)


def _of_columns(
    x: Sequence[Tensor], weight: Sequence[Tensor], bias: Sequence[Tensor] | None, sizes: list[int] | None, split_item: int
) -> list[Tensor]:
    """(groups, M, N) from x (M, K) and weight (K, N), whose K is in groups: gradients of weights."""
    matrices = len(x) == len(weight) == 1 and x[0].dim() == weight[0].dim() == 2
    if not matrices or sizes is None or split_item not in _ONE or bias:
        _refuse(
            f"group_type=2 with {len(x)} x, {len(weight)} weights, {'no' if sizes is None else 'a'} group_list, "
            f"{'a' if bias else 'no'} bias and split_item={split_item}",
            "one matrix each, a group_list, no bias, and split_item 2 or 3 with it",
        )
    left, right = x[0], weight[0]
    if left.shape[1] != right.shape[0] or sum(sizes) > left.shape[1]:
        _refuse(
            f"group_type=2 with x and weight of shape {tuple(left.shape)}, {tuple(right.shape)} and groups of {sizes}",
            "(M, K) and (K, N), and no more than K in the groups",
        )
    parts = zip(left[:, : sum(sizes)].split(sizes, 1), right[: sum(sizes)].split(sizes), strict=True)
    return [torch.stack([_product(a, b) for a, b in parts])]


def npu_grouped_matmul_add_(
    self: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    """Add x_g^T @ weight_g to a float32 tensor of (groups * M, N) or (groups, M, N), from x (K, M) and weight (K, N).

    Raises:
        ValueError: another group_type, other transpositions, sizes that do not fit.
    """
    if self.dtype != torch.float32 or x.dtype != weight.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"{_NAME}_add was given a sum of {self.dtype}, x of {x.dtype} and weight of {weight.dtype}. It takes a "
            "sum of float32, and float16 or bfloat16 for both others."
        )
    if group_type != _COLUMNS or not transpose_x or transpose_weight:
        raise ValueError(
            f"{_NAME}_add was given group_type={group_type}, transpose_x={transpose_x}, transpose_weight={transpose_weight}. "
            "It takes 2, True and False."
        )
    sizes = _sizes(group_list, group_list_type or 0)
    ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    parts = [torch.matmul(wide(x[a:b]).t(), wide(weight[a:b])) for a, b in pairwise(ends)]
    total = torch.stack(parts)
    if total.numel() != self.numel() or self.shape[-1] != weight.shape[1] or ends[-1] > x.shape[0]:
        raise ValueError(
            f"{_NAME}_add was given a sum of shape {tuple(self.shape)}, x {tuple(x.shape)}, weight {tuple(weight.shape)} and "
            f"groups of {sizes}. It takes (groups * M, N), (K, M), (K, N) and groups of K rows in all."
        )
    return self.add_(total.view(self.shape).to(self.dtype))


def npu_grouped_matmul_add(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A copy of the sum; the wheel's operator writes it into the first argument too."""
    return npu_grouped_matmul_add_(self, *args, **kwargs).clone()


OPERATORS: dict[str, Callable[..., Any]] = {
    "npu::npu_grouped_matmul": npu_grouped_matmul,
    "npu::npu_grouped_matmul.List": npu_grouped_matmul_list,
    "npu::npu_grouped_matmul_add": npu_grouped_matmul_add,
    "npu::npu_grouped_matmul_add_": npu_grouped_matmul_add_,
}
