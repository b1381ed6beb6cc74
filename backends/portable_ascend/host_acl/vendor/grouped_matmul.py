"""Products of matrices in groups, as the experts of a mixture need them.

Source: the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py, npu_grouped_matmul). Quantised operands are
refused. Sixteen-bit inputs are multiplied in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_ascend.host_acl.vendor.refusals import check_absent, check_floats, refuse, wide

_NAME = "npu_grouped_matmul"
_QUANTISED = "quantised products need the device's own rounding"
_ACTIVATIONS: Mapping[int, Callable[[Tensor], Tensor]] = {
    0: lambda x: x,
    1: F.relu,
    2: lambda x: F.gelu(x, approximate="tanh"),
    4: lambda x: x * torch.sigmoid(1.702 * x),
    5: F.silu,
}


def ends(group_list: Sequence[int] | Tensor, kind: int) -> list[int]:
    """Where each group ends.

    Args:
        group_list: the ends (kind 0), or the sizes (kind 1).

    Raises:
        ValueError: sizes below 0, ends that go down, an unknown kind.
    """
    numbers = [int(n) for n in (group_list.tolist() if isinstance(group_list, Tensor) else group_list)]
    if kind not in (0, 1):
        refuse(_NAME, f"group_list_type={kind}", "0 (ends) or 1 (sizes)")
    found = numbers if kind == 0 else list(accumulate(numbers))
    if any(b < a for a, b in pairwise([0, *found])):
        refuse(_NAME, f"group_list={numbers} of type {kind}", "ends that do not go down" if kind == 0 else "sizes of 0 or more")
    return found


def _matrices(weight: Sequence[Tensor]) -> list[Tensor]:
    """One matrix for each group: a list of them, or one tensor with a dimension of groups."""
    if len(weight) == 1 and weight[0].dim() == 3:
        return list(weight[0].unbind(0))
    return list(weight)


def _groups(x: Sequence[Tensor], count: int, limits: list[int] | None) -> list[Tensor]:
    if len(x) == count and (count > 1 or limits is None):
        if limits is not None and [b - a for a, b in pairwise([0, *limits])] != [t.shape[0] for t in x]:
            refuse(_NAME, f"groups that end at {limits} and x of {[t.shape[0] for t in x]} rows", "groups of as many rows as x")
        return list(x)
    if len(x) != 1:
        refuse(_NAME, f"{len(x)} tensors in x and {count} weights", "one x, or as many as weights")
    if limits is None:
        refuse(_NAME, "one x, several weights and no group_list", "a group_list that says which rows go with which weight")
    if len(limits) != count or limits[-1] > x[0].shape[0]:
        refuse(
            _NAME,
            f"groups that end at {limits}, {count} weights and {x[0].shape[0]} rows",
            "one group for each weight, within x",
        )
    return [x[0][start:stop] for start, stop in pairwise([0, *limits])]


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor | Sequence[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: Any = None,
    tuning_config: Sequence[int] | None = None,
    **quantised: Any,
) -> list[Tensor]:
    """``x[i] @ weight[i] + bias[i]`` for each group i.

    Args:
        x: one (M, K) of which group_list gives each group's rows, or one for each group.
        weight: (K, N) for each group, or one (groups, K, N).
        bias: (N,) for each group, or one (groups, N).
        split_item: 0 or 1 for one answer a group, 2 or 3 for one answer in all.
        group_type: -1 or None: not grouped; 0: the rows are. 2, the columns of x (gradients of weights), is computed too.

    Raises:
        ValueError: what the documentation does not allow.
        NotImplementedError: quantised operands.
    """
    check_absent(_NAME, _QUANTISED, **quantised)
    for tensors, name in ((x, "x"), (weight, "weight")):
        for tensor in tensors:
            check_floats(_NAME, **{name: tensor})
    if (act_type or 0) not in _ACTIVATIONS:
        refuse(_NAME, f"act_type={act_type}", "0, 1, 2, 4 or 5")
    if (split_item or 0) not in (0, 1, 2, 3):
        refuse(_NAME, f"split_item={split_item}", "0 to 3")
    if group_type not in (None, -1, 0, 2):
        refuse(_NAME, f"group_type={group_type}", "-1, 0 or 2")
    limits = None if group_list is None else ends(group_list, group_list_type or 0)
    if group_type == 2:
        return [_by_columns(x, weight, limits)]
    matrices = _matrices(weight)
    biases = [None] * len(matrices) if not bias else list(bias[0].unbind(0) if bias[0].dim() == 2 else bias)
    parts = []
    for rows, matrix, shift in zip(_groups(x, len(matrices), limits), matrices, biases, strict=True):
        if rows.shape[-1] != matrix.shape[0]:
            refuse(
                _NAME,
                f"x of {rows.shape[-1]} columns and a weight of {matrix.shape[0]} rows",
                "as many of the one as of the other",
            )
        out = torch.matmul(wide(rows), wide(matrix))
        out = out if shift is None else out + wide(shift)
        parts.append(_ACTIVATIONS[act_type or 0](out).to(rows.dtype))
    if (split_item or 0) < 2:
        return parts
    whole = torch.cat(parts)
    if len(x) == 1 and whole.shape[0] < x[0].shape[0]:
        # Rows behind the last group belong to none; the device leaves them as they were in its memory (assumed), here 0.
        whole = torch.cat([whole, whole.new_zeros(x[0].shape[0] - whole.shape[0], whole.shape[1])])
    return [whole]


def _by_columns(x: Sequence[Tensor], weight: Sequence[Tensor], limits: list[int] | None) -> Tensor:
    if len(x) != 1 or len(weight) != 1 or limits is None:
        refuse(_NAME, "group_type=2 without one x, one weight and a group_list", "these")
    parts = [wide(x[0][:, a:b]) @ wide(weight[0][a:b]) for a, b in pairwise([0, *limits])]
    return torch.stack(parts).to(x[0].dtype)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "npu::npu_grouped_matmul": npu_grouped_matmul,
    "npu::npu_grouped_matmul.List": npu_grouped_matmul,
}
