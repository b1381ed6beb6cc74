"""Sorting tokens by expert, and adding up what the experts answered.

Sources: the pages of ``torch_npu.npu_moe_init_routing``, ``..._v2``, ``npu_moe_compute_expert_tokens``, ``npu_moe_re_routing``
and ``npu_moe_finalize_routing`` (Ascend/op-plugin, docs/zh/custom_APIs), most of which give the operator in numpy; shapes and
dtypes: the wheel's meta kernels. Sums are taken in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor.refusals import FLOATS, refuse, wide


def npu_moe_init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x by expert, where each pair of row and choice went (int32), and the sorted experts (int32).

    Args:
        x: (rows, H).
        row_idx: int32 (rows, K), numbers of the pairs, counted down the columns.
        expert_idx: int32 (rows, K).
        active_num: how many rows' pairs are answered at most.

    Raises:
        ValueError: what the page does not allow.
    """
    name = "npu_moe_init_routing"
    if x.dim() != 2 or x.dtype not in FLOATS or expert_idx.dim() != 2 or expert_idx.shape[0] != x.shape[0]:
        refuse(
            name, f"x {x.dtype}, {tuple(x.shape)} and expert_idx {tuple(expert_idx.shape)}", "floats (rows, H) and (rows, K)"
        )
    if row_idx.shape != expert_idx.shape or {row_idx.dtype, expert_idx.dtype} != {torch.int32} or active_num < 0:
        refuse(
            name, f"row_idx {row_idx.dtype}, {tuple(row_idx.shape)}, expert_idx {expert_idx.dtype}, active_num={active_num}",
            f"int32 of shape {tuple(expert_idx.shape)} for both, and a number from 0 up",
        )  # fmt: skip
    rows, k = expert_idx.shape
    experts, order = torch.sort(expert_idx.flatten(), stable=True)
    sources = row_idx.flatten()[order].long()
    places = torch.zeros(rows * k, dtype=torch.int32)
    places[sources] = torch.arange(rows * k, dtype=torch.int32)
    return x[sources[: min(active_num, rows) * k] % max(rows, 1)], places, experts


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
    """(rows of x by expert, where each pair went or came from, tokens of each expert, scales by expert).

    Only experts in active_expert_range count. drop_pad_mode 0 answers the rows one behind another ((pairs, H); those behind the
    pairs that count are zero here, unwritten on the device); 1 gives each expert expert_capacity rows, with zeros behind its
    tokens, and drops tokens beyond them. Places of pairs left out are -1. row_idx_type 0 answers where a pair went, 1 which
    pair came to a place. Types of counts: 0 summed up, 1 counts, 2 pairs of expert and count.

    Raises:
        ValueError: what the page does not allow.
        NotImplementedError: a quantised answer.
    """
    name = "npu_moe_init_routing_v2"
    if quant_mode != -1 or offset is not None or x_dtype is not None:
        raise NotImplementedError(
            f"{name} was given quant_mode={quant_mode}, x_dtype={x_dtype}: quantised answers are not computed here. Leave "
            "them at -1 and None."
        )
    if x.dim() != 2 or expert_idx.dim() != 2 or expert_idx.shape[0] != x.shape[0] or expert_idx.dtype != torch.int32:
        refuse(
            name,
            f"x {tuple(x.shape)} and expert_idx {expert_idx.dtype}, {tuple(expert_idx.shape)}",
            "(rows, H), int32 (rows, K)",
        )
    if scale is not None and (scale.dtype != torch.float32 or scale.shape != x.shape[:1]):
        refuse(name, f"a scale of {scale.dtype} and shape {tuple(scale.shape)}", f"float32 of shape ({x.shape[0]},)")
    modes = (drop_pad_mode, row_idx_type, expert_tokens_num_type)
    if drop_pad_mode not in (0, 1) or row_idx_type not in (0, 1) or expert_tokens_num_type not in (0, 1, 2):
        refuse(name, f"drop_pad_mode, row_idx_type, expert_tokens_num_type={modes}", "0 or 1, 0 or 1, 0 to 2")
    start, end = active_expert_range or (0, expert_num)
    if not 0 <= start < end <= expert_num or active_num < -1:
        refuse(
            name, f"experts {start} to {end} of expert_num={expert_num}, active_num={active_num}",
            "a range within the experts, and -1 or more",
        )  # fmt: skip
    if drop_pad_mode and ((start, end) != (0, expert_num) or not 0 < expert_capacity <= x.shape[0]):
        refuse(
            name, f"drop_pad_mode=1 with experts {start} to {end} of {expert_num} and expert_capacity={expert_capacity}",
            f"all experts and 1 to {x.shape[0]} with it",
        )  # fmt: skip
    experts = expert_idx.flatten()
    counted = (experts >= start) & (experts < end)
    # Experts below the range go to the end, as those above do.
    order = torch.sort(experts.masked_fill(experts < start, 2**31 - 1), stable=True).indices
    order = order[: int(counted.sum())]
    counts = torch.bincount(experts[counted].long() - start, minlength=end - start)
    tokens = (
        _counts(counts, start, expert_num, expert_tokens_num_type)
        if expert_tokens_num_flag
        else torch.zeros((), dtype=torch.int64)
    )
    if drop_pad_mode:
        placed = _capacity(x, scale, order, counts, expert_capacity, expert_idx)
    else:
        placed = _one_behind_another(x, scale, order, active_num, expert_idx, row_idx_type)
    return placed[0], placed[1], tokens, placed[2]


def _counts(counts: Tensor, start: int, expert_num: int, kind: int) -> Tensor:
    if kind == 0:
        return counts.cumsum(0)
    if kind == 1:
        return counts
    pairs = torch.zeros(expert_num, 2, dtype=torch.int64)
    (used,) = counts.nonzero(as_tuple=True)
    pairs[: used.numel()] = torch.stack((used + start, counts[used]), 1)
    return pairs


def _one_behind_another(
    x: Tensor, scale: Tensor | None, order: Tensor, active_num: int, expert_idx: Tensor, row_idx_type: int
) -> tuple[Tensor, Tensor, Tensor]:
    pairs, k = expert_idx.numel(), max(expert_idx.shape[1], 1)
    length = pairs if active_num <= 0 else min(active_num, pairs)
    kept = order[:length]
    out = x.new_zeros(length, x.shape[1])
    out[: kept.numel()] = x[kept // k]
    scales = torch.zeros(length)
    if scale is not None:
        scales[: kept.numel()] = scale[kept // k]
    places = torch.full((pairs,), -1, dtype=torch.int32)
    if row_idx_type:
        places[: order.numel()] = order.int()
    else:
        places[order] = torch.arange(order.numel(), dtype=torch.int32)
    return out, places, scales


def _capacity(
    x: Tensor, scale: Tensor | None, order: Tensor, counts: Tensor, capacity: int, expert_idx: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    k, experts = max(expert_idx.shape[1], 1), expert_idx.flatten()
    starts = counts.cumsum(0) - counts
    rank = torch.arange(order.numel()) - starts[experts[order].long()]
    fits = rank < capacity
    kept = order[fits]
    slots = experts[kept].long() * capacity + rank[fits]
    out = x.new_zeros(counts.numel() * capacity, x.shape[1])
    out[slots] = x[kept // k]
    scales = torch.zeros(counts.numel() * capacity)
    if scale is not None:
        scales[slots] = scale[kept // k]
    places = torch.full((expert_idx.numel(),), -1, dtype=torch.int32)
    places[kept] = slots.int()
    return out.view(counts.numel(), capacity, -1), places, scales


def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """Where the rows of each expert end, (experts,), from sorted experts of rows."""
    if (
        sorted_expert_for_source_row.dim() != 1
        or sorted_expert_for_source_row.dtype != torch.int32
        or not 0 < num_expert <= 2048
    ):
        refuse(
            "npu_moe_compute_expert_tokens",
            f"{sorted_expert_for_source_row.dtype}, {tuple(sorted_expert_for_source_row.shape)} and num_expert={num_expert}",
            "int32 of one dimension, 1 to 2048 experts",
        )
    experts = torch.arange(num_expert, dtype=torch.int32)
    return torch.searchsorted(sorted_expert_for_source_row, experts, right=True).int()


def npu_moe_re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens that came by rank, by expert instead: (tokens, their scales, where each came from int32, tokens of each expert).

    Raises:
        ValueError: what the page does not allow.
    """
    name = "npu_moe_re_routing"
    if expert_token_num_type != 1 or idx_type != 0 or tokens_dtype is not None:
        refuse(
            name,
            f"expert_token_num_type={expert_token_num_type}, idx_type={idx_type}, tokens_dtype={tokens_dtype}",
            "1, 0 and None",
        )
    counts = expert_token_num_per_rank
    if tokens.dim() != 2 or counts.dim() != 2 or counts.dtype not in (torch.int32, torch.int64):
        refuse(
            name,
            f"tokens {tuple(tokens.shape)}, counts {counts.dtype}, {tuple(counts.shape)}",
            "(A, H), integers (ranks, experts)",
        )
    if int(counts.sum()) != tokens.shape[0] or (counts.numel() and int(counts.min()) < 0):
        refuse(name, f"counts {counts.tolist()} for {tokens.shape[0]} tokens", "counts that add up to the tokens")
    ranks, experts = counts.shape
    owner = torch.arange(experts).repeat(ranks).repeat_interleave(counts.flatten().long())
    order = torch.sort(owner, stable=True).indices
    scales = torch.zeros(tokens.shape[0]) if per_token_scales is None else per_token_scales[order]
    return tokens[order], scales, order.int(), counts.sum(0, dtype=counts.dtype)


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
    """skip1 + skip2 + the sum over a row's choices of scale * (expert's row + expert's bias), (rows, H).

    Raises:
        ValueError: what the page does not allow.
    """
    name = "npu_moe_finalize_routing"
    mode = drop_pad_mode or 0
    answers = expanded_permuted_rows
    if mode not in (0, 1, 2, 3) or answers.dim() != (3 if mode in (1, 3) else 2):
        refuse(
            name,
            f"rows of shape {tuple(answers.shape)} with drop_pad_mode={mode}",
            "(pairs, H) with 0 and 2, (E, C, H) with 1 and 3",
        )
    if skip1 is None and skip2 is not None:
        refuse(name, "skip2 without skip1", "skip2 beside it only")
    if bias is not None and export_for_source_row is None:
        refuse(name, "a bias without the experts of the rows", "both")
    choices = scales.shape[1] if scales is not None else max(k or 1, 1)
    places = expanded_src_to_dst_row.long()
    if places.dim() != 1 or places.numel() % choices:
        refuse(name, f"{places.numel()} pairs and {choices} choices of each row", "a multiple of the choices")
    rows = places.numel() // choices
    # By columns (all rows' first choices, then all second ones), or by rows.
    places = places.view(rows, choices) if mode in (2, 3) else places.view(choices, rows).t()
    flat = wide(answers.reshape(-1, answers.shape[-1]))
    out = torch.zeros(rows, flat.shape[1], dtype=flat.dtype)
    for skip in (skip1, skip2):
        if skip is not None:
            out = out + wide(skip)
    for choice in range(choices):
        place = places[:, choice]
        picked = flat[place.clamp(min=0)] * (place >= 0).unsqueeze(1)
        if bias is not None and export_for_source_row is not None:
            picked = picked + wide(bias)[export_for_source_row[:, choice].long()]
        out = out + (picked if scales is None else picked * wide(scales)[:, choice : choice + 1])
    return out.to(answers.dtype)


OPERATORS: dict[str, Callable[..., Any]] = {
    "npu::npu_moe_init_routing": npu_moe_init_routing,
    "npu::npu_moe_init_routing_v2": npu_moe_init_routing_v2,
    "npu::npu_moe_compute_expert_tokens": npu_moe_compute_expert_tokens,
    "npu::npu_moe_re_routing": npu_moe_re_routing,
    "npu::npu_moe_finalize_routing": npu_moe_finalize_routing,
}
