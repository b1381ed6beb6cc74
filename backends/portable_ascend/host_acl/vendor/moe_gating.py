"""Choosing experts: npu_moe_gating_top_k and its relatives.

Sources: the pages of ``torch_npu.npu_moe_gating_top_k*`` (Ascend/op-plugin, docs/zh/custom_APIs), which give each operator in
numpy; for ``npu_moe_gating_top_k_softmax_v2`` and ``npu_moe_gating_top_k_backward``, which have no page, op-plugin's tests;
shapes and dtypes: the wheel's meta kernels. Numbers are computed in float32 and rounded once. Ties go to the lower index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor.refusals import FLOATS, refuse, wide

_SOFTMAX, _SIGMOID = 0, 1


def _largest(scores: Tensor, k: int) -> Tensor:
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = _SOFTMAX,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights (rows, k), experts int32 (rows, k), all scores float32 (rows, experts)).

    The bias takes part in the choice only. Scores that were not asked for (out_flag) are NaN here, on the device whatever the
    memory held: the backward pass needs them.

    Raises:
        ValueError: what the page does not allow.
    """
    name = "npu_moe_gating_top_k"
    if x.dim() != 2 or x.dtype not in FLOATS or not 0 < x.shape[1] <= 2048:
        refuse(name, f"x of {x.dtype} and shape {tuple(x.shape)}", "float16, bfloat16 or float32 (rows, up to 2048 experts)")
    rows, experts = x.shape
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (experts,)):
        refuse(name, f"a bias of {bias.dtype} and shape {tuple(bias.shape)}", f"{x.dtype} of shape ({experts},)")
    if group_count < 1 or experts % group_count or (group_count > 1 and experts // group_count <= 2):
        refuse(name, f"group_count={group_count} for {experts} experts", "a divisor that leaves more than two in each group")
    if not 1 <= k_group <= group_count or not 1 <= k <= experts // group_count * k_group:
        refuse(name, f"k={k}, k_group={k_group} of {group_count} groups, {experts} experts", "k within the groups chosen")
    if renorm or group_select_mode not in (0, 1) or norm_type not in (_SOFTMAX, _SIGMOID):
        refuse(
            name,
            f"renorm={renorm}, group_select_mode={group_select_mode}, norm_type={norm_type}",
            "renorm 0, the others 0 or 1",
        )
    if (input_ids is None) != (tid2eid is None):
        refuse(name, "one of input_ids and tid2eid", "both or neither")
    scores = torch.softmax(wide(x), -1) if norm_type == _SOFTMAX else torch.sigmoid(wide(x))
    if input_ids is not None and tid2eid is not None:
        if input_ids.shape != (rows,) or tid2eid.dim() != 2 or tid2eid.shape[1] != k:
            refuse(name, f"input_ids {tuple(input_ids.shape)}, tid2eid {tuple(tid2eid.shape)}", f"({rows},) and (tokens, {k})")
        chosen = tid2eid[input_ids.long()].long()
    else:
        chosen = _largest(
            _in_groups(scores if bias is None else scores + wide(bias), group_count, k_group, group_select_mode), k
        )
    weights = torch.gather(scores, 1, chosen)
    if norm_type == _SIGMOID:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    out = scores if out_flag else torch.full_like(scores, torch.nan)
    return (weights * routed_scaling_factor).to(x.dtype), chosen.int(), out


def _in_groups(scores: Tensor, count: int, chosen: int, by_two: int) -> Tensor:
    """-inf outside the best groups, by their best expert or the sum of their two best."""
    if count == 1:
        return scores
    groups = scores.unflatten(-1, (count, -1))
    ranks = groups.topk(2, -1).values.sum(-1) if by_two else groups.amax(-1)
    outside = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, _largest(ranks, chosen), False)
    return groups.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)


def npu_moe_gating_top_k_backward(
    x_norm: Tensor,
    grad_y: Tensor,
    expertIdx: Tensor,
    *,
    renorm: int = 0,
    norm_type: int = _SOFTMAX,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Tensor:
    """Gradient of x from that of the weights, (rows, experts) in grad_y's dtype; the choice itself has none."""
    chosen, grad = expertIdx.long(), wide(grad_y) * routed_scaling_factor
    if norm_type == _SIGMOID:
        picked = torch.gather(x_norm, 1, chosen)
        total = picked.sum(-1, keepdim=True) + eps
        grad = grad / total - (grad * picked).sum(-1, keepdim=True) / total.square()
    of_scores = torch.zeros_like(x_norm).scatter_add_(1, chosen, grad)
    if norm_type == _SIGMOID:
        return (of_scores * x_norm * (1 - x_norm)).to(grad_y.dtype)
    return (x_norm * (of_scores - (of_scores * x_norm).sum(-1, keepdim=True))).to(grad_y.dtype)


def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, experts int32, rows int32), each (..., k); rows count down the columns. Finished rows choose no expert.

    Raises:
        ValueError: what the page does not allow.
    """
    _check_softmax("npu_moe_gating_top_k_softmax", x, finished, k)
    scores = torch.softmax(wide(x), -1)
    chosen = _largest(scores, k)
    count = chosen[..., 0].numel() if k else 0
    rows = torch.arange(count * k, dtype=torch.int32).view(k, count).t().contiguous()
    return torch.gather(scores, -1, chosen).to(x.dtype), _unless(finished, chosen, x.shape[-1]), rows.view(chosen.shape)


def npu_moe_gating_top_k_softmax_v2(
    x: Tensor, *, k: int = 1, finished: Tensor | None = None, renorm: int | None = 0, output_softmax: bool | None = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, experts int32, all scores float32: empty unless asked for with renorm 0); renorm 1 chooses before the softmax.

    Raises:
        ValueError: what the wheel's operator does not allow.
    """
    _check_softmax("npu_moe_gating_top_k_softmax_v2", x, finished, k)
    if renorm not in (None, 0, 1):
        refuse("npu_moe_gating_top_k_softmax_v2", f"renorm={renorm}", "0 or 1")
    scores = wide(x) if renorm else torch.softmax(wide(x), -1)
    chosen = _largest(scores, k)
    weights = torch.gather(scores, -1, chosen)
    weights = torch.softmax(weights, -1) if renorm else weights
    whole = scores.clone() if output_softmax and not renorm else torch.empty(0)
    return weights.to(x.dtype), _unless(finished, chosen, x.shape[-1]), whole


def _check_softmax(name: str, x: Tensor, finished: Tensor | None, k: int) -> None:
    if x.dim() not in (2, 3) or x.dtype not in FLOATS:
        refuse(name, f"x of {x.dtype} and shape {tuple(x.shape)}", "float16, bfloat16 or float32 of two or three dimensions")
    if not 0 <= k <= min(x.shape[-1], 1024):
        refuse(name, f"k={k} for {x.shape[-1]} experts", "up to as many, and 1024")
    if finished is not None and (finished.dtype != torch.bool or finished.shape != x.shape[:-1]):
        refuse(name, f"finished of {finished.dtype} and shape {tuple(finished.shape)}", f"bool of shape {tuple(x.shape[:-1])}")


def _unless(finished: Tensor | None, chosen: Tensor, nobody: int) -> Tensor:
    return (chosen if finished is None else chosen.masked_fill(finished.unsqueeze(-1), nobody)).int()


OPERATORS: dict[str, Callable[..., Any]] = {
    "npu::npu_moe_gating_top_k": npu_moe_gating_top_k,
    "npu::npu_moe_gating_top_k_backward": npu_moe_gating_top_k_backward,
    "npu::npu_moe_gating_top_k_softmax": npu_moe_gating_top_k_softmax,
    "npu::npu_moe_gating_top_k_softmax_v2": npu_moe_gating_top_k_softmax_v2,
}
