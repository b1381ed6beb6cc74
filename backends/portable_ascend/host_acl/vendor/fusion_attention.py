"""npu_fusion_attention, its third form and their backward passes, from the vendor's API page.

Source: hiascend.com, "torch_npu.npu_fusion_attention" (parameters and constraints); shapes of the answers: the meta kernels in
the wheel (torch_npu/op_plugin/meta/_meta_registrations.py). ``softmax_max`` and ``softmax_sum`` repeat each number eight times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor import arithmetic, draws, masks
from portable_ascend.host_acl.vendor.arithmetic import Problem
from portable_ascend.host_acl.vendor.layouts import LAYOUTS, Layout, check_layout
from portable_ascend.host_acl.vendor.masks import Sparsity

_NAME = "npu_fusion_attention"
_EVERYTHING = 2**31 - 1
_LANES = 8
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True)
class Call:
    """The arguments that forward and backward share."""

    query: Tensor
    key: Tensor
    value: Tensor
    head_num: int
    input_layout: str
    pse: Tensor | None
    sparsity: Sparsity
    scale: float
    keep_prob: float
    inner_precise: int
    query_ends: tuple[int, ...]
    key_ends: tuple[int, ...]
    sink: Tensor | None
    seed: int = 0
    offset: int = 0

    @property
    def layout(self) -> Layout:
        return Layout(self.input_layout, self.head_num)

    @property
    def packed(self) -> bool:
        """Whether the sequences lie one behind another."""
        return self.input_layout == "TND"


def _ends(lengths: Any) -> tuple[int, ...]:
    if lengths is None:
        return ()
    return tuple(int(end) for end in (lengths.tolist() if isinstance(lengths, Tensor) else lengths))


def _refuse(found: str, allowed: str) -> None:
    raise ValueError(f"{_NAME} was given {found}. It takes {allowed}.")


def _check(call: Call, padding_mask: Tensor | None) -> None:
    query, key, value = call.query, call.key, call.value
    check_layout(_NAME, call.input_layout, LAYOUTS, query=query, key=key, value=value)
    if padding_mask is not None:
        _refuse("a padding_mask", "none: put padding into atten_mask")
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        _refuse(
            f"dtypes {query.dtype}, {key.dtype}, {value.dtype}", "one of float16, bfloat16 and float32, the same for all three"
        )
    if not 0 < call.keep_prob <= 1:
        _refuse(f"keep_prob={call.keep_prob}", "a number above 0 and up to 1 (1 - dropout_p)")
    if call.inner_precise not in (0, 1, 2):
        _refuse(f"inner_precise={call.inner_precise}", "0, 1, or 2 for rows that are masked throughout")
    key_heads = call.layout.key_heads(query, key)
    if not key_heads or call.head_num % key_heads or call.head_num < key_heads:
        _refuse(f"{call.head_num} query heads and {key_heads} key heads", "a multiple of the key heads")
    if call.sink is not None and (call.sink.dtype != torch.float32 or call.sink.shape != (call.head_num,)):
        _refuse(f"a sink of {call.sink.dtype} and shape {tuple(call.sink.shape)}", f"float32 of shape ({call.head_num},)")
    if call.packed:
        _check_packed(call)
        return
    split = [call.layout.to_bnsd(t, n) for t, n in ((query, call.head_num), (key, key_heads), (value, key_heads))]
    _check_sizes(*(tuple(t.shape) for t in split))
    batch, heads, length, _ = split[0].shape
    masks.check(_NAME, call.sparsity, batch, heads, length, split[1].shape[2], packed=False)
    masks.check_prefix(_NAME, call.sparsity, batch)


def _check_sizes(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> None:
    if query[0] != key[0] or key[:3] != value[:3]:
        _refuse(
            f"query, key and value of shape {query}, {key}, {value} (batch, heads, length, head_dim)",
            "one batch size, and key and value of the same heads and length",
        )
    if query[3] != key[3] or value[3] > key[3]:
        _refuse(f"head_dim {query[3]}, {key[3]}, {value[3]}", "one for query and key, and that or less for value")
    if query[3] > 768:
        _refuse(f"head_dim {query[3]}", "1 to 768")


def _check_packed(call: Call) -> None:
    for name, ends, tensor in (
        ("actual_seq_qlen", call.query_ends, call.query),
        ("actual_seq_kvlen", call.key_ends, call.key),
    ):
        if not ends or list(ends) != sorted(ends) or ends[-1] != tensor.shape[0]:
            _refuse(
                f"{name}={list(ends) or None} with {tensor.shape[0]} tokens in layout TND",
                "cumulative lengths that end with the number of tokens",
            )
    if len(call.query_ends) != len(call.key_ends):
        _refuse(f"{len(call.query_ends)} query and {len(call.key_ends)} key sequences", "as many of the one as of the other")
    if len(call.query_ends) > 1024:
        _refuse(f"{len(call.query_ends)} packed sequences", "up to 1024")
    queries, keys = (_longest(ends) for ends in (call.query_ends, call.key_ends))
    masks.check(_NAME, call.sparsity, len(call.query_ends), call.head_num, queries, keys, packed=True)
    masks.check_prefix(_NAME, call.sparsity, len(call.query_ends))


def _longest(ends: Sequence[int]) -> int:
    return max(end - start for start, end in zip((0, *ends), ends, strict=False))


def _problem(call: Call, sequence: int | None = None) -> Problem:
    """The arithmetic of a whole call, or of one of its packed sequences."""
    if sequence is None:
        key_heads = call.layout.key_heads(call.query, call.key)
        query = call.layout.to_bnsd(call.query, call.head_num)
        key, value = (call.layout.to_bnsd(t, key_heads) for t in (call.key, call.value))
    else:
        mine, theirs = _span(call.query_ends, sequence), _span(call.key_ends, sequence)
        query = call.query[mine].transpose(0, 1).unsqueeze(0)
        key, value = (t[theirs].transpose(0, 1).unsqueeze(0) for t in (call.key, call.value))
    queries, keys = query.shape[2], key.shape[2]

    def masked(index: int, start: int, stop: int) -> Tensor | None:
        return masks.masked(call.sparsity, index if sequence is None else sequence, start, stop, queries, keys)

    # The vendor's page: mode 3 with more queries than keys turns the handling of such rows on by itself.
    zero_rows = call.inner_precise == 2 or (call.sparsity.mode == masks.RIGHT_DOWN and queries > keys)
    keep = None
    if call.keep_prob < 1:
        draw = draws.generator(call.seed, call.offset + 4 * (sequence or 0))
        keep = torch.rand((*query.shape[:3], keys), generator=draw) < call.keep_prob
    return Problem(query, key, value, call.scale, masked, call.pse, call.keep_prob, keep, call.sink, zero_rows)


def _span(ends: Sequence[int], sequence: int) -> slice:
    return slice(ends[sequence - 1] if sequence else 0, ends[sequence])


def _cpu_flash(problem: Problem, call: Call) -> dict[str, Any] | None:
    """Arguments with which PyTorch's own CPU flash kernel computes the same to the bit; None if it cannot."""
    plain = problem.bias is None and problem.keep is None and problem.sink is None and problem.repeats == 1
    sizes = problem.query.shape[3] == problem.value.shape[3] and min(*problem.query.shape, *problem.key.shape) > 0
    if not (plain and sizes and all(t.stride(-1) == 1 for t in (problem.query, problem.key, problem.value))):
        return None
    if call.sparsity.mask is None:
        return {}
    if call.sparsity.is_left_up_causal:
        return {"is_causal": True}
    if call.sparsity.mode not in (masks.DEFAULT, masks.ALL) or not problem.zero_rows:
        return None
    mask = call.sparsity.mask.bool()
    mask = mask.expand(problem.query.shape[0], -1, -1, -1) if mask.dim() == 4 else mask
    if call.sparsity.mode == masks.DEFAULT and min(call.sparsity.before, call.sparsity.after) < max(mask.shape[-2:]):
        return None
    additive = torch.zeros(mask.shape, dtype=problem.query.dtype).masked_fill_(mask, float("-inf"))
    return {"attn_mask": additive}


def _lanes(statistics: Tensor) -> Tensor:
    return statistics.float().unsqueeze(-1).expand(*statistics.shape, _LANES).contiguous()


def _forward_dense(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    problem = _problem(call)
    options = _cpu_flash(problem, call)
    if options is not None:
        out, logsumexp = _flash(problem.query, problem.key, problem.value, scale=call.scale, **options)
        # Any pair whose max + log(sum) is the logarithm of the sum will do for the backward pass.
        maxima, sums = logsumexp, torch.ones_like(logsumexp)
    else:
        out, maxima, sums = arithmetic.forward(problem)
    return call.layout.from_bnsd(out), _lanes(maxima), _lanes(sums)


def _forward_packed(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.zeros(call.query.shape[0], call.head_num, call.value.shape[-1], dtype=call.query.dtype)
    statistics = [torch.zeros(call.query.shape[0], call.head_num) for _ in range(2)]
    for sequence in range(len(call.query_ends)):
        span = _span(call.query_ends, sequence)
        part, *found = arithmetic.forward(_problem(call, sequence))
        out[span] = part[0].transpose(0, 1)
        for whole, mine in zip(statistics, found, strict=True):
            whole[span] = mine[0].transpose(0, 1)
    return out, _lanes(statistics[0]), _lanes(statistics[1])


def _forward(call: Call, padding_mask: Tensor | None) -> tuple[Call, Tensor, Tensor, Tensor]:
    _check(call, padding_mask)
    if call.keep_prob < 1 and not call.seed and not call.offset:
        seed, offset = draws.draw()
        call = replace(call, seed=seed, offset=offset)
    return call, *(_forward_packed(call) if call.packed else _forward_dense(call))


def _backward_dense(call: Call, grad: Tensor, out: Tensor, maxima: Tensor, sums: Tensor) -> arithmetic.Gradients:
    problem = _problem(call)
    layout, heads = call.layout, call.head_num
    grad, out = layout.to_bnsd(grad, heads), layout.to_bnsd(out, heads)
    maxima, sums = maxima[..., 0], sums[..., 0]
    options = _cpu_flash(problem, call)
    if options is not None:
        causal, mask = options.get("is_causal", False), options.get("attn_mask")
        inputs = (problem.query, problem.key, problem.value, out, maxima + sums.log())
        query, key, value = _flash_backward(grad, *inputs, 0.0, causal, attn_mask=mask, scale=call.scale)
        found = arithmetic.Gradients(query, key, value, None, None)
    else:
        found = arithmetic.backward(problem, grad, out, maxima, sums)
    found.query, found.key, found.value = (layout.from_bnsd(t) for t in (found.query, found.key, found.value))
    return found


def _backward_packed(call: Call, grad: Tensor, out: Tensor, maxima: Tensor, sums: Tensor) -> arithmetic.Gradients:
    found = arithmetic.Gradients(
        torch.zeros(call.query.shape, dtype=call.query.dtype),
        torch.zeros(call.key.shape, dtype=call.key.dtype),
        torch.zeros(call.value.shape, dtype=call.value.dtype),
        None,
        None if call.sink is None else torch.zeros_like(call.sink),
    )
    for sequence in range(len(call.query_ends)):
        mine, theirs = _span(call.query_ends, sequence), _span(call.key_ends, sequence)
        rows = [t[mine].transpose(0, 1).unsqueeze(0) for t in (grad, out)]
        statistics = [t[mine, :, 0].transpose(0, 1).unsqueeze(0) for t in (maxima, sums)]
        part = arithmetic.backward(_problem(call, sequence), *rows, *statistics)
        found.query[mine] = part.query[0].transpose(0, 1)
        found.key[theirs] = part.key[0].transpose(0, 1)
        found.value[theirs] = part.value[0].transpose(0, 1)
        if found.sink is not None and part.sink is not None:
            found.sink += part.sink
    return found


def _backward(
    call: Call, grad: Tensor, out: Tensor | None, maxima: Tensor | None, sums: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    if out is None or maxima is None or sums is None:
        raise ValueError(
            f"{_NAME}_grad needs softmax_max, softmax_sum and attention_in of the forward pass, and at least one was not given."
        )
    _check(call, None)
    found = (_backward_packed if call.packed else _backward_dense)(call, grad, out, maxima, sums)
    sink = torch.empty(0) if found.sink is None else found.sink
    return found.query, found.key, found.value, found.bias, sink


def _sparsity(mode: int, mask: Tensor | None, before: int, after: int, prefix: Any) -> Sparsity:
    return Sparsity(mode, mask, before, after, _ends(prefix))


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
        NotImplementedError: a dropout mask from outside, sparse_mode 7 or 8.
    """
    if dropout_mask is not None:
        raise NotImplementedError(f"{_NAME} was given a dropout_mask, whose packing of bits is not documented. Leave it out.")
    call = Call(
        query, key, value, head_num, input_layout, pse, _sparsity(sparse_mode, atten_mask, pre_tockens, next_tockens, prefix),
        scale, keep_prob, inner_precise, _ends(actual_seq_qlen), _ends(actual_seq_kvlen), sink, seed, offset,
    )  # fmt: skip
    call, out, maxima, sums = _forward(call, padding_mask)
    drawn = (call.seed, call.offset, _decisions(call)) if keep_prob < 1 else (0, 0, 0)
    return out, maxima, sums, torch.empty(0, dtype=query.dtype), *drawn


def _decisions(call: Call) -> int:
    if call.packed:
        pairs = zip(range(len(call.query_ends)), strict=False)
        return sum(call.head_num * _length(call.query_ends, index) * _length(call.key_ends, index) for (index,) in pairs)
    query = call.layout.to_bnsd(call.query, call.head_num)
    key = call.layout.to_bnsd(call.key, call.layout.key_heads(call.query, call.key))
    return query.shape[0] * call.head_num * query.shape[2] * key.shape[2]


def _length(ends: Sequence[int], sequence: int) -> int:
    span = _span(ends, sequence)
    return span.stop - span.start


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
        scale_value, keep_prob, inner_precise, _ends(actual_seq_qlen), _ends(actual_seq_kvlen), sink, seed, offset,
    )  # fmt: skip
    return _backward(call, dy, attention_in, softmax_max, softmax_sum)


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


OPERATORS: Mapping[str, Callable[..., Any]] = {
    f"npu::{function.__name__}": function
    for function in (
        npu_fusion_attention,
        npu_fusion_attention_grad,
        npu_fusion_attention_v3,
        npu_fusion_attention_grad_v3,
    )
}
