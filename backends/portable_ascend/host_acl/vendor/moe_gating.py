"""Gating of a mixture of experts: which experts a token goes to, and with what weights.

Source: the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py) and its meta kernels. Experts of equal
probability: assumed to be taken in order, the lowest number first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.derivatives import derivative
from portable_ascend.host_acl.vendor.refusals import check_absent, check_floats, refuse, wide


def _top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest, in order; of equal ones the first."""
    order = torch.sort(values, dim=-1, descending=True, stable=True)
    return order.values[..., :k], order.indices[..., :k]


def _check_gating(operator: str, x: Tensor, k: int, dims: Sequence[int], finished: Tensor | None = None) -> None:
    check_floats(operator, x=x)
    if x.dim() not in dims:
        refuse(operator, f"x of {x.dim()} dimensions", f"{' or '.join(map(str, dims))}")
    if not 0 < k <= min(x.shape[-1], 1024):
        refuse(operator, f"k={k} with {x.shape[-1]} experts", "1 to the number of experts, at most 1024")
    if finished is not None and (finished.dtype != torch.bool or finished.shape != x.shape[:-1]):
        refuse(
            operator, f"finished of {finished.dtype} and shape {tuple(finished.shape)}", f"bool of shape {tuple(x.shape[:-1])}"
        )


def _marked(experts: Tensor, finished: Tensor | None, count: int) -> Tensor:
    """Rows that are finished go to the expert behind the last one (assumed; the documentation says that they are left out)."""
    return experts if finished is None else experts.masked_fill(finished.unsqueeze(-1), count)


def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The k greatest softmax probabilities, their experts, and row numbers ``row + j * rows`` for the j-th expert (int32)."""
    _check_gating("npu_moe_gating_top_k_softmax", x, k, (2, 3), finished)
    values, experts = _top(torch.softmax(wide(x), -1), k)
    rows = x.shape[:-1].numel()
    numbers = (torch.arange(rows).unsqueeze(1) + rows * torch.arange(k)).view(values.shape)
    return values.to(x.dtype), _marked(experts, finished, x.shape[-1]).int(), numbers.int()


def npu_moe_gating_top_k_softmax_v2(
    x: Tensor, *, k: int = 1, finished: Tensor | None = None, renorm: int | None = 0, output_softmax: bool | None = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax before the choice (renorm 0) or of the chosen ones (renorm 1); with experts, and the softmax if asked for."""
    operator = "npu_moe_gating_top_k_softmax_v2"
    _check_gating(operator, x, k, (2, 3), finished)
    if renorm not in (None, 0, 1):
        refuse(operator, f"renorm={renorm}", "0 or 1")
    softmax = torch.softmax(wide(x), -1)
    values, experts = _top(wide(x) if renorm else softmax, k)
    values = torch.softmax(values, -1) if renorm else values
    whole = softmax.float() if output_softmax and not renorm else torch.empty(0)
    return values.to(x.dtype), _marked(experts, finished, x.shape[-1]).int(), whole


def _weights(chosen: Tensor, norm_type: int, renorm: int, factor: float, eps: float) -> Tensor:
    """Weights of the chosen experts. Sigmoid's do not add up to 1, and are divided by their sum."""
    total = chosen.sum(-1, keepdim=True) + eps if norm_type == 1 or renorm == 1 else 1.0
    return chosen / total * factor


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
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gating with groups of experts (DeepSeek-V3, section 2.1.2): weights, experts (int32), the probabilities (float32).

    Args:
        bias: added to the probabilities for the choice only.
        k_group, group_count: experts are chosen from the best k_group of group_count groups.
        group_select_mode: a group's score is its best expert's (0), or the sum of its best two (1).
        norm_type: softmax (0) or sigmoid (1).
    """
    operator = "npu_moe_gating_top_k"
    check_absent(operator, "a table of experts by token is not computed here", input_ids=input_ids, tid2eid=tid2eid)
    _check_gating(operator, x, k, (2,))
    experts = x.shape[1]
    if group_count < 1 or experts % group_count or not 1 <= k_group <= group_count or k > experts // group_count * k_group:
        refuse(
            operator,
            f"k={k}, k_group={k_group}, group_count={group_count} with {experts} experts",
            "groups that hold k experts",
        )
    if norm_type not in (0, 1) or group_select_mode not in (0, 1):
        refuse(operator, f"norm_type={norm_type}, group_select_mode={group_select_mode}", "0 or 1 for each")
    probabilities = torch.softmax(wide(x), -1) if norm_type == 0 else torch.sigmoid(wide(x))
    scores = probabilities if bias is None else probabilities + wide(bias)
    if group_count > 1:
        groups = scores.unflatten(1, (group_count, -1))
        best = groups.amax(-1) if group_select_mode == 0 else groups.topk(2, -1).values.sum(-1)
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _top(best, k_group)[1], True)
        scores = groups.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
    _, found = _top(scores, k)
    weights = _weights(probabilities.gather(1, found), norm_type, renorm, routed_scaling_factor, eps)
    whole = probabilities.float() if out_flag else torch.zeros(x.shape)
    return weights.to(x.dtype), found.int(), whole


def npu_moe_gating_top_k_backward(
    x_norm: Tensor,
    grad_y: Tensor,
    expertIdx: Tensor,
    *,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Tensor:
    """Gradient of the logits, by the probabilities that the forward pass answers with out_flag."""
    index = expertIdx.long()
    (of_norm,) = derivative(
        lambda norm: _weights(norm.gather(1, index), norm_type, renorm, routed_scaling_factor, eps),
        [wide(x_norm)],
        wide(grad_y),
    )
    norm = wide(x_norm)
    if norm_type == 1:
        return (of_norm * norm * (1 - norm)).to(grad_y.dtype)
    return (norm * (of_norm - (of_norm * norm).sum(-1, keepdim=True))).to(grad_y.dtype)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    f"npu::{function.__name__}": function
    for function in (
        npu_moe_gating_top_k_softmax,
        npu_moe_gating_top_k_softmax_v2,
        npu_moe_gating_top_k,
        npu_moe_gating_top_k_backward,
    )
}
