"""npu_fusion_attention, its second and third forms, and their backward passes. Sources: see `fusion_core`.

The forms differ in this: the second takes positional halves of query and key (rope) and a ``pse_type``; the third answers seed
and offset as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor import fusion_core
from portable_ascend.host_acl.vendor.fusion_core import Call, ends
from portable_ascend.host_acl.vendor.masks import Sparsity

_NAME = "npu_fusion_attention"
_EVERYTHING = 2**31 - 1


def _sparsity(mode: int, mask: Tensor | None, before: int, after: int, prefix: Any) -> Sparsity:
    return Sparsity(mode, mask, before, after, ends(prefix))


def _check_dropout_mask(mask: Tensor | None) -> None:
    if mask is not None:
        raise NotImplementedError(
            f"{_NAME} was given a dropout_mask. The backward pass makes the mask anew from seed and offset, which only the "
            "device's own generator can do. Leave it out: keep_prob, seed and offset alone give a mask that repeats."
        )


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _EVERYTHING,
    next_tockens: int = _EVERYTHING,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """(output, softmax_max, softmax_sum, reserved, seed, offset, number of dropout decisions).

    Raises:
        ValueError: what the API page does not allow.
        NotImplementedError: a dropout mask from outside, or a pse in compressed form.
    """
    _check_dropout_mask(dropout_mask)
    call = Call(
        query, key, value, head_num, input_layout, pse, _sparsity(sparse_mode, atten_mask, pre_tockens, next_tockens, prefix),
        scale, keep_prob, inner_precise, ends(actual_seq_qlen), ends(actual_seq_kvlen), sink, softmax_layout, True,
        seed, offset,
    )  # fmt: skip
    call, out, maxima, sums = fusion_core.forward(call, padding_mask)
    drawn = (call.seed, call.offset, fusion_core.decisions(call)) if keep_prob < 1 else (0, 0, 0)
    return out, maxima, sums, torch.empty(0, dtype=query.dtype), *drawn


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _EVERYTHING,
    next_tockens: int = _EVERYTHING,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of query, key, value, pse and sink."""
    call = Call(
        query, key, value, head_num, input_layout, pse, _sparsity(sparse_mode, atten_mask, pre_tockens, next_tockens, prefix),
        scale_value, keep_prob, inner_precise, ends(actual_seq_qlen), ends(actual_seq_kvlen), sink, softmax_layout, True,
        seed, offset,
    )  # fmt: skip
    return fusion_core.backward(call, dy, attention_in, softmax_max, softmax_sum)


def npu_fusion_attention_v3(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """As `npu_fusion_attention`, with seed and offset answered as tensors of one int64, for the capture of graphs."""
    *tensors, seed, offset, _ = npu_fusion_attention(query, key, value, head_num, input_layout, *args, **kwargs)
    return *tensors, torch.tensor([seed]), torch.tensor([offset])


def npu_fusion_attention_grad_v3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    seed: Tensor | None = None,
    offset: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """As `npu_fusion_attention_grad`, with seed and offset as tensors."""
    drawn = [0 if tensor is None or not tensor.numel() else int(tensor) for tensor in (seed, offset)]
    return npu_fusion_attention_grad(query, key, value, dy, head_num, input_layout, seed=drawn[0], offset=drawn[1], **kwargs)


def npu_fusion_attention_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """As `npu_fusion_attention`, with a choice of where pse is added and with the rotated parts of query and key apart.

    Args:
        pse_type: 1 adds pse to the products before the scale, as the first form does; 0 after it.
        query_rope, key_rope: more head_dim of query and key, (T, N, Dr) and (T, Nkv, Dr).
        q_start_idx, kv_start_idx: where the slopes of pse_type 2 and 3 start; without meaning for the others.

    Raises:
        ValueError: what the API page or the wheel's operator does not allow.
        NotImplementedError: pse_type 2 or 3, a dropout mask from outside, a pse in compressed form.
    """
    _check_dropout_mask(dropout_mask)
    call = Call(
        _joined(query, query_rope, key_rope, input_layout), _joined(key, key_rope, query_rope, input_layout), value,
        head_num, input_layout, pse, _sparsity(sparse_mode, atten_mask, pre_tokens, next_tokens, prefix), scale, keep_prob,
        inner_precise, ends(actual_seq_qlen), ends(actual_seq_kvlen), sink, softmax_layout, _bias_scaled(pse_type, query_rope),
        seed, offset,
    )  # fmt: skip
    call, out, maxima, sums = fusion_core.forward(call, padding_mask)
    drawn = (call.seed, call.offset, fusion_core.decisions(call)) if keep_prob < 1 else (0, 0, 0)
    return out, maxima, sums, torch.empty(0, dtype=query.dtype), *drawn


def _bias_scaled(pse_type: int, rope: Tensor | None) -> bool:
    if rope is not None and pse_type != 1:
        raise ValueError(f"{_NAME}_v2 was given pse_type={pse_type} with query_rope and key_rope. It takes 1 with them.")
    if pse_type in (2, 3):
        raise NotImplementedError(
            f"{_NAME}_v2 was given pse_type={pse_type}: biases that the kernel makes from slopes are not computed here. "
            "Make the bias yourself and pass it with pse_type=0."
        )
    if pse_type not in (0, 1):
        raise ValueError(f"{_NAME}_v2 was given pse_type={pse_type}. It takes 0 to 3.")
    return pse_type == 1


def _joined(tensor: Tensor, rope: Tensor | None, other: Tensor | None, layout: str) -> Tensor:
    """The scores of two halves of head_dim add up, so the halves are one longer head_dim."""
    if (rope is None) != (other is None):
        raise ValueError(f"{_NAME}_v2 was given one of query_rope and key_rope. It takes both or neither.")
    if rope is None:
        return tensor
    if layout != "TND":
        raise ValueError(
            f"{_NAME}_v2 was given query_rope and key_rope with input_layout={layout!r}. They are for packed sequences (TND)."
        )
    if rope.dtype != tensor.dtype or rope.shape[:-1] != tensor.shape[:-1]:
        raise ValueError(
            f"{_NAME}_v2 was given a rope of {rope.dtype}, {tuple(rope.shape)} beside {tensor.dtype}, {tuple(tensor.shape)}. "
            "It takes one dtype and sizes that differ in the last dimension only."
        )
    return torch.cat((tensor, rope), -1)


def npu_fusion_attention_grad_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None,
    kv_start_idx: Sequence[int] | None = None,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, pse, query_rope, key_rope and sink."""
    call = Call(
        _joined(query, query_rope, key_rope, input_layout), _joined(key, key_rope, query_rope, input_layout), value,
        head_num, input_layout, pse, _sparsity(sparse_mode, atten_mask, pre_tokens, next_tokens, prefix), scale_value,
        keep_prob, inner_precise, ends(actual_seq_qlen), ends(actual_seq_kvlen), sink, softmax_layout,
        _bias_scaled(pse_type, query_rope), seed, offset,
    )  # fmt: skip
    found_query, found_key, found_value, bias, found_sink = fusion_core.backward(
        call, dy, attention_in, softmax_max, softmax_sum
    )
    if query_rope is None:
        return found_query, found_key, found_value, bias, None, None, found_sink
    cut = query.shape[-1]
    halves = [(t[..., :cut].contiguous(), t[..., cut:].contiguous()) for t in (found_query, found_key)]
    return halves[0][0], halves[1][0], found_value, bias, halves[0][1], halves[1][1], found_sink


OPERATORS: dict[str, Callable[..., Any]] = {
    "npu::npu_fusion_attention": npu_fusion_attention,
    "npu::npu_fusion_attention_grad": npu_fusion_attention_grad,
    "npu::npu_fusion_attention_v2": npu_fusion_attention_v2,
    "npu::npu_fusion_attention_grad_v2": npu_fusion_attention_grad_v2,
    "npu::npu_fusion_attention_v3": npu_fusion_attention_v3,
    "npu::npu_fusion_attention_grad_v3": npu_fusion_attention_grad_v3,
}
