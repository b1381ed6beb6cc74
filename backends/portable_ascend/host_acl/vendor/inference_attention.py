"""npu_fused_infer_attention_score, its second form, and the two older operators it took over. Sources: see `inference_core`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor import inference_core
from portable_ascend.host_acl.vendor.inference_request import EVERYTHING, Request, refuse_quantised

_NAME = "npu_fused_infer_attention_score"
_Lengths = Sequence[int] | None


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: _Lengths = None,
    actual_seq_lengths_kv: _Lengths = None,
    block_table: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: _Lengths = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = EVERYTHING,
    next_tokens: int = EVERYTHING,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """(output, logarithms of the sums: float32 (B, N, Sq, 1) or (T, N, 1), of shape (0,) if not asked for).

    Raises:
        ValueError: what the API page does not allow.
        NotImplementedError: arguments of quantised attention, padding on the left, tree masks.
    """
    refuse_quantised(_NAME, others)
    request = Request(
        _NAME, query, key, value, num_heads, num_key_value_heads, input_layout, scale, pse_shift, atten_mask, sparse_mode,
        pre_tokens, next_tokens, inner_precise, actual_seq_lengths, actual_seq_lengths_kv, block_table, block_size, query_rope,
        key_rope, key_shared_prefix, value_shared_prefix, actual_shared_prefix_len, lse=softmax_lse_flag,
    )  # fmt: skip
    return inference_core.compute(request)


def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: _Lengths = None,
    actual_seq_kvlen: _Lengths = None,
    block_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = EVERYTHING,
    next_tokens: int = EVERYTHING,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """As `npu_fused_infer_attention_score` by other names, with a learnable sink, bfloat16 (N,), and no shared prefix."""
    refuse_quantised(f"{_NAME}_v2", others)
    request = Request(
        f"{_NAME}_v2", query, key, value, num_query_heads, num_key_value_heads, input_layout, softmax_scale, pse_shift,
        atten_mask, sparse_mode, pre_tokens, next_tokens, inner_precise, actual_seq_qlen, actual_seq_kvlen, block_table,
        block_size, query_rope, key_rope, sink=learnable_sink, lse=return_softmax_lse,
    )  # fmt: skip
    return inference_core.compute(request)


def npu_prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: _Lengths = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = EVERYTHING,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: _Lengths = None,
    sparse_mode: int = 0,
    **others: Any,
) -> Tensor:
    """Attention of whole prompts; next_tokens is 0 unless given."""
    refuse_quantised("npu_prompt_flash_attention", {"padding_mask": padding_mask, **others})
    request = Request(
        "npu_prompt_flash_attention", query, key, value, num_heads, num_key_value_heads, input_layout, scale_value, pse_shift,
        atten_mask, sparse_mode, pre_tokens, next_tokens, 0, actual_seq_lengths, actual_seq_lengths_kv,
    )  # fmt: skip
    allowed = ("BSH", "BSND", "BNSD", "BNSD_BSND", "NSD", "TND")
    if input_layout not in allowed:
        request.refuse(f"input_layout={input_layout!r}", ", ".join(allowed))
    return inference_core.compute(request)[0]


def npu_incre_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: _Lengths = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
    **others: Any,
) -> Tensor:
    """Attention of one new token; actual_seq_lengths are those of keys and values."""
    name = "npu_incre_flash_attention"
    refuse_quantised(name, {"padding_mask": padding_mask, **others})
    request = Request(
        name, query, key, value, num_heads, num_key_value_heads, input_layout, scale_value, pse_shift, atten_mask,
        precision=inner_precise, key_lengths=actual_seq_lengths, block_table=block_table, block_size=block_size,
    )  # fmt: skip
    if input_layout not in ("BSH", "BSND", "BNSD"):
        request.refuse(f"input_layout={input_layout!r}", "BSH, BSND, BNSD")
    if query.dim() > 2 and query.shape[2 if input_layout == "BNSD" else 1] != 1:
        request.refuse(f"a query of shape {tuple(query.shape)} in layout {input_layout}", "queries of length 1")
    return inference_core.compute(request)[0]


def _into(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The form that writes its answers into a list of tensors."""

    def write(*args: Any, out: Sequence[Tensor], workspace: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        answers = function(*args, **kwargs)
        for target, answer in zip(out, answers, strict=True):
            if answer.numel():  # what was not asked for leaves its target as it is
                target.copy_(answer)
        return out[0], out[1]

    return write


def _workspace(*args: Any, **kwargs: Any) -> Tensor:
    """Memory that the device's kernel wants beside its answers: none here."""
    return torch.empty(0, dtype=torch.uint8)


OPERATORS: dict[str, Callable[..., Any]] = {
    "npu::npu_fused_infer_attention_score": npu_fused_infer_attention_score,
    "npu::npu_fused_infer_attention_score.out": _into(npu_fused_infer_attention_score),
    "npu::npu_fused_infer_attention_score_v2": npu_fused_infer_attention_score_v2,
    "npu::npu_fused_infer_attention_score_v2.out": _into(npu_fused_infer_attention_score_v2),
    "npu::_npu_fused_infer_attention_score_get_max_workspace": _workspace,
    "npu::_npu_fused_infer_attention_score_v2_get_max_workspace": _workspace,
    "npu::npu_prompt_flash_attention": npu_prompt_flash_attention,
    "npu::npu_incre_flash_attention": npu_incre_flash_attention,
}
