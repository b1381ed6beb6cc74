"""npu_fusion_attention_v2 and its backward pass: the first form with other names and more ways to add a bias.

Source: the operator's documentation in the wheel (torch_npu/_op_plugin_docs.py, npu_fusion_attention_v2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor import fusion_attention
from portable_ascend.host_acl.vendor.refusals import check_absent, refuse

_NAME = "npu_fusion_attention_v2"
_EVERYTHING = 2**31 - 1
_SCALE_THEN_ADD, _ADD_THEN_SCALE = 1, 0


def _arguments(pse_type: int, query_rope: Tensor | None, key_rope: Tensor | None, q_start_idx: Any, kv_start_idx: Any) -> None:
    check_absent(_NAME, "the parts of MLA are not computed", query_rope=query_rope, key_rope=key_rope)
    if pse_type in (2, 3):
        raise NotImplementedError(
            f"{_NAME} was given pse_type={pse_type}, by which the device makes the bias itself. Pass the bias with pse_type 1."
        )
    if pse_type not in (_SCALE_THEN_ADD, _ADD_THEN_SCALE):
        refuse(_NAME, f"pse_type={pse_type}", "0 to 3")


def _bias(pse: Tensor | None, pse_type: int, scale: float) -> Tensor | None:
    """The bias as the first form adds it: after the scale."""
    return pse if pse is None or pse_type == _SCALE_THEN_ADD else pse * scale


def npu_fusion_attention_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    scale: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    pse_type: int = _SCALE_THEN_ADD,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """As `npu_fusion_attention`. pse_type 1: the bias is added after the scale; 0: before it."""
    _arguments(pse_type, query_rope, key_rope, q_start_idx, kv_start_idx)
    return fusion_attention.npu_fusion_attention(
        query,
        key,
        value,
        head_num,
        input_layout,
        pse=_bias(pse, pse_type, scale),
        scale=scale,
        pre_tockens=pre_tokens,
        next_tockens=next_tokens,
        **options,
    )


def npu_fusion_attention_grad_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    scale_value: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    pse_type: int = _SCALE_THEN_ADD,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, pse, query_rope, key_rope (both empty) and sink."""
    _arguments(pse_type, query_rope, key_rope, q_start_idx, kv_start_idx)
    of_query, of_key, of_value, of_pse, of_sink = fusion_attention.npu_fusion_attention_grad(
        query,
        key,
        value,
        dy,
        head_num,
        input_layout,
        pse=_bias(pse, pse_type, scale_value),
        scale_value=scale_value,
        pre_tockens=pre_tokens,
        next_tockens=next_tokens,
        **options,
    )
    if of_pse is not None and pse_type == _ADD_THEN_SCALE:
        of_pse = of_pse * scale_value
    empty = torch.empty(0, dtype=query.dtype)
    return of_query, of_key, of_value, of_pse, empty, empty.clone(), of_sink


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "npu::npu_fusion_attention_v2": npu_fusion_attention_v2,
    "npu::npu_fusion_attention_grad_v2": npu_fusion_attention_grad_v2,
}
