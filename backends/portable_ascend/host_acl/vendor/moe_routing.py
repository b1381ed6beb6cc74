"""Routing of a mixture of experts: tokens sorted by expert, and brought back.

Source: the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py) and its meta kernels. Sorting is stable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.derivatives import derivative
from portable_ascend.host_acl.vendor.refusals import check_absent, check_floats, refuse, wide

# -- inference: to the experts and back ----------------------------------------------------------------------------------------


def npu_moe_init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by expert; where each row number went; the experts in order.

    Args:
        x: (rows, H). row_idx, expert_idx: (rows, k) int32, as `npu_moe_gating_top_k_softmax` answers them.
        active_num: rows that are kept, for each of the k.
    """
    operator = "npu_moe_init_routing"
    check_floats(operator, x=x)
    rows, k = x.shape[0], row_idx.shape[1]
    if row_idx.shape != expert_idx.shape or expert_idx.shape[0] != rows:
        refuse(
            operator, f"row_idx {tuple(row_idx.shape)}, expert_idx {tuple(expert_idx.shape)}, {rows} rows", "one row for each"
        )
    experts, order = torch.sort(expert_idx.flatten(), stable=True)
    numbers = row_idx.flatten()[order].long()
    places = torch.empty_like(numbers)
    places[numbers] = torch.arange(numbers.numel())
    return x[numbers % rows][: min(rows, active_num) * k], places.int(), experts.int()


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows sorted by expert; the map between places; tokens of each expert (int64); scales in the rows' order.

    Args:
        active_expert_range: experts from the first number up to, not including, the second; others' rows are left out.
        expert_tokens_num_type: 1, the number of tokens of each; 2, pairs of expert and number for those that have any.
        row_idx_type: 0, the place of each token's choice (-1: left out); 1, the choice at each place.
    """
    operator = "npu_moe_init_routing_v2"
    if quant_mode != -1 or offset is not None:
        raise NotImplementedError(
            f"{operator} was given quant_mode={quant_mode}; the host runtime computes no quantisation. Use -1."
        )
    check_absent(operator, "it is not documented for this case", drop_pad_mode=drop_pad_mode or None, x_dtype=x_dtype)
    check_floats(operator, x=x)
    if expert_num < 1 or expert_tokens_num_type not in (0, 1, 2) or row_idx_type not in (0, 1):
        refuse(
            operator,
            f"expert_num={expert_num}, expert_tokens_num_type={expert_tokens_num_type}, row_idx_type={row_idx_type}",
            "at least one expert, 0 to 2 and 0 or 1",
        )
    first, last = tuple(active_expert_range) or (0, expert_num)
    choices = expert_idx.flatten().long()
    total, k = choices.numel(), expert_idx.shape[1]
    mine = (choices >= first) & (choices < last)
    order = torch.sort(torch.where(mine, choices, expert_num + 1), stable=True).indices
    count = int(mine.sum())
    kept = min(count, active_num) if active_num > 0 else count
    order = order[:kept]
    size = min(total, active_num) if active_num > 0 else total
    out = torch.zeros(size, x.shape[1], dtype=x.dtype)
    out[:kept] = x[order // k]
    places = torch.full((total,), -1, dtype=torch.int32)
    if row_idx_type == 0:
        places[order] = torch.arange(kept, dtype=torch.int32)
    else:
        places[:kept] = order.int()
    counts = torch.bincount(choices[mine] - first, minlength=last - first)
    scales = torch.zeros(size)
    if scale is not None:
        scales[:kept] = scale.flatten()[order // k]
    return out, places, _tokens(counts, first, expert_num, expert_tokens_num_type), scales


def _tokens(counts: Tensor, first: int, experts: int, kind: int) -> Tensor:
    if kind == 0:
        return counts.cumsum(0)
    if kind == 1:
        return counts
    pairs = torch.zeros(experts, 2, dtype=torch.int64)
    used = counts.nonzero().flatten()
    pairs[: used.numel()] = torch.stack([used + first, counts[used]], 1)
    return pairs


def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """Where each expert's rows end, among rows sorted by expert."""
    wanted = torch.arange(num_expert, dtype=sorted_expert_for_source_row.dtype)
    found = torch.searchsorted(sorted_expert_for_source_row, wanted, right=True)
    return found.to(sorted_expert_for_source_row.dtype)


def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """``skip1 + skip2 + sum over j of scales[i, j] * (rows[map[i + j * rows]] + bias[expert[i, j]])`` for each row i."""
    operator = "npu_moe_finalize_routing"
    if drop_pad_mode:
        refuse(operator, f"drop_pad_mode={drop_pad_mode}", "0")
    if bias is not None and export_for_source_row is None:
        refuse(operator, "a bias without export_for_source_row", "both, or neither")
    each = scales.shape[1] if scales is not None else int(k or 1)
    places = expanded_src_to_dst_row.long().view(each, -1).t()
    parts = wide(expanded_permuted_rows)[places]
    if bias is not None and export_for_source_row is not None:
        parts = parts + wide(bias)[export_for_source_row.long()]
    if scales is not None:
        parts = parts * wide(scales).unsqueeze(-1)
    out = parts.sum(1)
    for skip in (skip1, skip2):
        out = out if skip is None else out + wide(skip)
    return out.to(expanded_permuted_rows.dtype)


# -- training: permute and unpermute -------------------------------------------------------------------------------------------


def _check_padded(operator: str, padded_mode: bool, restore_shape: Any = None) -> None:
    if padded_mode or restore_shape:
        refuse(operator, f"padded_mode={padded_mode}, restore_shape={restore_shape}", "False and None, all that is documented")


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens sorted by expert, and the place of each token's choice among them (int32).

    Args:
        tokens: (T, H). indices: (T, k) or (T,) experts.
        num_out_tokens: rows that are kept; None or 0 for all, below 0 counted from the end.
    """
    operator = "npu_moe_token_permute"
    _check_padded(operator, padded_mode)
    check_floats(operator, tokens=tokens)
    if tokens.dim() != 2 or indices.dim() not in (1, 2) or indices.shape[0] != tokens.shape[0]:
        refuse(operator, f"tokens {tuple(tokens.shape)} and indices {tuple(indices.shape)}", "(T, H) and (T, k) or (T,)")
    k = indices.shape[1] if indices.dim() == 2 else 1
    order = torch.sort(indices.flatten(), stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel())
    return tokens[order // k][: num_out_tokens or None], places.int()


def npu_moe_token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    """Gradient of the tokens."""
    k = indices.shape[1] if indices.dim() == 2 else 1
    return npu_moe_token_permute_grad_v2(grad_permuted_tokens, sorted_indices, tokens.shape[0], tokens.dtype, k, padded_mode)


def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: Any,
    num_topK: int,
    padded_mode: bool = False,
) -> Tensor:
    """`npu_moe_token_permute_grad` by sizes: the sum of what came of each token."""
    places = sorted_indices.long()
    kept = places < grad_permuted_tokens.shape[0]
    parts = wide(grad_permuted_tokens)[places.clamp_max(max(grad_permuted_tokens.shape[0] - 1, 0))]
    parts = parts * kept.unsqueeze(-1)
    return parts.view(tokens_size_0, num_topK, -1).sum(1).to(grad_permuted_tokens.dtype)


def _unpermuted(permuted: Tensor, places: Tensor, probs: Tensor | None) -> Tensor:
    k = 1 if probs is None else probs.shape[1]
    kept = places < permuted.shape[0]
    parts = permuted[places.clamp_max(permuted.shape[0] - 1)] * kept.unsqueeze(-1)
    parts = parts.view(-1, k, permuted.shape[1])
    return (parts if probs is None else parts * probs.unsqueeze(-1)).sum(1)


def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Tokens in their first order: the sum over a token's choices, weighted by probs (T, k) if they are given."""
    operator = "npu_moe_token_unpermute"
    _check_padded(operator, padded_mode, restore_shape)
    check_floats(operator, permuted_tokens=permuted_tokens, probs=probs)
    weights = None if probs is None else wide(probs)
    return _unpermuted(wide(permuted_tokens), sorted_indices.long(), weights).to(permuted_tokens.dtype)


def _npu_moe_token_unpermute(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`npu_moe_token_unpermute`, and the permuted tokens for the backward pass."""
    permuted = args[0] if args else kwargs["permuted_tokens"]
    return npu_moe_token_unpermute(*args, **kwargs), permuted.clone()


def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the permuted tokens and of probs (empty without them)."""
    places, grad = sorted_indices.long(), wide(grad_unpermuted_tokens)
    inputs = [wide(permuted_tokens)] if probs is None else [wide(permuted_tokens), wide(probs)]
    found = derivative(lambda tokens, weights=None: _unpermuted(tokens, places, weights), inputs, grad)
    of_probs = torch.empty(0, dtype=permuted_tokens.dtype) if probs is None else found[1].to(probs.dtype)
    return found[0].to(permuted_tokens.dtype), of_probs


def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: Any,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`npu_moe_token_unpermute_grad` by sizes; the permuted tokens are needed for the gradient of probs only."""
    if permuted_tokens is None:
        if probs is not None:
            refuse("npu_moe_token_unpermute_grad_v2", "probs without permuted_tokens", "both, for the gradient of probs")
        permuted_tokens = torch.zeros(
            permuted_tokens_size_0, grad_unpermuted_tokens.shape[1], dtype=grad_unpermuted_tokens.dtype
        )
    return npu_moe_token_unpermute_grad(permuted_tokens, grad_unpermuted_tokens, sorted_indices, probs)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    f"npu::{function.__name__}": function
    for function in (
        npu_moe_init_routing,
        npu_moe_init_routing_v2,
        npu_moe_compute_expert_tokens,
        npu_moe_finalize_routing,
        npu_moe_token_permute,
        npu_moe_token_permute_grad,
        npu_moe_token_permute_grad_v2,
        npu_moe_token_unpermute,
        _npu_moe_token_unpermute,
        npu_moe_token_unpermute_grad,
        npu_moe_token_unpermute_grad_v2,
    )
}
