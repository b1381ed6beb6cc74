"""What the three forms of npu_fusion_attention share: checks, forward and backward pass, from the vendor's API page.

Source: "torch_npu.npu_fusion_attention" (Ascend/op-plugin, docs/zh/custom_APIs: formula, parameters, constraints) and CANN's
pages of aclnnFlashAttentionScore, ...V2 and ...VarLenScore; shapes of the answers: the meta kernels in the wheel
(torch_npu/op_plugin/meta/_meta_registrations.py). ``softmax_max`` and ``softmax_sum`` repeat each number eight times.

A bias (pse) is added before the scale: that is the page's formula, scale * (pse + query * key^T), and pse_type 1 of the second
form. (An example on the same page adds it after the scale, with numbers too small to tell.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor import arithmetic, draws, masks
from portable_ascend.host_acl.vendor.arithmetic import Problem
from portable_ascend.host_acl.vendor.layouts import LAYOUTS, Layout, check_layout
from portable_ascend.host_acl.vendor.masks import Sparsity
from portable_ascend.host_acl.vendor.refusals import refuse

_NAME = "npu_fusion_attention"
_LANES = 8
_COMPRESSED_BIAS = 1024
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
    softmax_layout: str = ""
    bias_scaled: bool = True
    seed: int = 0
    offset: int = 0

    @property
    def layout(self) -> Layout:
        return Layout(self.input_layout, self.head_num)

    @property
    def packed(self) -> bool:
        """Whether the sequences lie one behind another."""
        return self.input_layout == "TND"

    @cached_property
    def spans(self) -> list[tuple[slice, slice]]:
        """Queries and keys of each packed sequence. Ends of 0 behind the last sequence stand for sequences left out."""
        ends = list(zip(self.query_ends, self.key_ends, strict=True))
        while len(ends) > 1 and ends[-1] == (0, 0):
            ends.pop()
        starts = [(0, 0), *ends[:-1]]
        return [(slice(a, c), slice(b, d)) for (a, b), (c, d) in zip(starts, ends, strict=True)]


def ends(lengths: Any) -> tuple[int, ...]:
    if lengths is None:
        return ()
    return tuple(int(end) for end in (lengths.tolist() if isinstance(lengths, Tensor) else lengths))


def _refuse(found: str, allowed: str) -> NoReturn:
    refuse(_NAME, found, allowed)


def check(call: Call, padding_mask: Tensor | None) -> None:
    """Refuse what the vendor's operator or its page refuses.

    Raises:
        ValueError: see above.
        NotImplementedError: a compressed bias.
    """
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
    if call.softmax_layout not in (("", "TND") if call.packed else ("",)):
        _refuse(f"softmax_layout={call.softmax_layout!r} with input_layout={call.input_layout!r}", "'TND' with 'TND', else ''")
    if call.head_num <= 0:
        _refuse(f"head_num={call.head_num}", "a positive number")
    key_heads = call.layout.key_heads(query, key)
    if not key_heads or call.head_num % key_heads or call.head_num < key_heads:
        _refuse(f"{call.head_num} query heads and {key_heads} key heads", "a multiple of the key heads")
    if call.sink is not None and (call.sink.dtype != torch.float32 or call.sink.shape != (call.head_num,)):
        _refuse(f"a sink of {call.sink.dtype} and shape {tuple(call.sink.shape)}", f"float32 of shape ({call.head_num},)")
    if call.packed:
        _check_packed(call)
        return
    split = [call.layout.to_bnsd(t, n) for t, n in ((query, call.head_num), (key, key_heads), (value, key_heads))]
    if split[0].shape[1] != call.head_num:
        _refuse(f"head_num={call.head_num} and a query of {split[0].shape[1]} heads", "the query's number of heads")
    _check_sizes(*(tuple(t.shape) for t in split))
    batch, heads, length, _ = split[0].shape
    keys = split[1].shape[2]
    masks.check(_NAME, call.sparsity, batch, heads, length, keys, packed=False)
    masks.check_prefix(_NAME, call.sparsity, [(length, keys)] * batch)
    _check_bias(call, batch, length, keys)


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


def _check_bias(call: Call, batch: int, length: int, keys: int) -> None:
    bias = call.pse
    if bias is None:
        return
    if bias.dtype != call.query.dtype:
        _refuse(f"a pse of {bias.dtype} with a query of {call.query.dtype}", "one dtype for both")
    shape = tuple(bias.shape)
    compressed = [(size, call.head_num, _COMPRESSED_BIAS, keys) for size in (1, batch)]
    if shape in compressed and length > _COMPRESSED_BIAS:
        raise NotImplementedError(
            f"{_NAME} was given a pse of shape {shape}, the compressed form for {length} queries, which is not computed here. "
            f"Give all {length} rows."
        )
    allowed = [(batch, call.head_num, length, keys), (batch, call.head_num, 1, keys), (1, call.head_num, length, keys)]
    if shape not in allowed:
        _refuse(f"a pse of shape {shape}", f"one of {', '.join(map(str, allowed))}")


def _check_packed(call: Call) -> None:
    for name, given, tensor in (
        ("actual_seq_qlen", call.query_ends, call.query),
        ("actual_seq_kvlen", call.key_ends, call.key),
    ):
        used = [end for index, end in enumerate(given) if any(given[index:])]
        left_out = len(used) < len(given)
        bound = max(used, default=0)
        wrong = used != sorted(used) or (bound > tensor.shape[0] if left_out else bound != tensor.shape[0])
        if not given or wrong or min(given) < 0:
            _refuse(
                f"{name}={list(given) or None} with {tensor.shape[0]} tokens in layout TND",
                "cumulative lengths that end with the number of tokens (zeros behind them leave sequences out)",
            )
    if len(call.query_ends) != len(call.key_ends):
        _refuse(f"{len(call.query_ends)} query and {len(call.key_ends)} key sequences", "as many of the one as of the other")
    query, key, value = ((1, t.shape[1], t.shape[0], t.shape[2]) for t in (call.query, call.key, call.value))
    if query[1] != call.head_num:
        _refuse(f"head_num={call.head_num} and a query of {query[1]} heads", "the query's number of heads")
    _check_sizes(query, key, value)
    if call.pse is not None:
        if call.sparsity.mode in (masks.SPLIT_RIGHT_DOWN, masks.SPLIT_LEFT_UP):
            _refuse(f"a pse with sparse_mode={call.sparsity.mode}", "none with it")
        raise NotImplementedError(
            f"{_NAME} was given a pse with packed sequences (TND), for which the page knows the compressed form only. That is "
            "not computed here: use another layout."
        )
    lengths = [(_size(mine), _size(theirs)) for mine, theirs in call.spans]
    queries, keys = (max(sizes) for sizes in zip(*lengths, strict=True))
    masks.check(_NAME, call.sparsity, len(lengths), call.head_num, queries, keys, packed=True)
    masks.check_prefix(_NAME, call.sparsity, lengths)


def _size(span: slice) -> int:
    return int(span.stop - span.start)


def _problem(call: Call, sequence: int | None = None) -> Problem:
    """The arithmetic of a whole call, or of one of its packed sequences."""
    sparsity = call.sparsity
    if sequence is None:
        key_heads = call.layout.key_heads(call.query, call.key)
        query = call.layout.to_bnsd(call.query, call.head_num)
        key, value = (call.layout.to_bnsd(t, key_heads) for t in (call.key, call.value))
    else:
        mine, theirs = call.spans[sequence]
        query = call.query[mine].transpose(0, 1).unsqueeze(0)
        key, value = (t[theirs].transpose(0, 1).unsqueeze(0) for t in (call.key, call.value))
        sparsity = sparsity.of_sequence(sequence, len(call.spans))
    queries, keys = query.shape[2], key.shape[2]

    def masked(index: int, start: int, stop: int) -> Tensor | None:
        return masks.masked(sparsity, index if sequence is None else sequence, start, stop, queries, keys)

    zero_rows = call.inner_precise == 2 or sparsity.zeroes_rows(queries, keys)
    keep = None
    if call.keep_prob < 1:
        draw = draws.generator(call.seed, call.offset, sequence or 0)
        keep = torch.rand((*query.shape[:3], keys), generator=draw) < call.keep_prob
    return Problem(
        query, key, value, call.scale, masked, call.pse, call.bias_scaled, call.keep_prob, keep, call.sink, zero_rows
    )


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


def _pack(parts: Sequence[Tensor], tokens: int, call: Call) -> Tensor:
    """Statistics (N, Sq) of the sequences, as the operator answers them: (tokens, N, 8).

    With softmax_layout "TND" their order is that of the tokens. Without it the memory has the statistics of one sequence behind
    those of another, each by heads first, which the shape hides (the page calls it NTD; MindSpeed's ring attention, which
    sorts them, shows the order to be by sequences).
    """
    if call.softmax_layout == "TND":
        rows = torch.cat([part.transpose(0, 1) for part in parts])
        packed = torch.zeros(tokens, call.head_num)
        packed[: rows.shape[0]] = rows
        return packed
    flat = torch.cat([part.reshape(-1) for part in parts])
    packed = torch.zeros(tokens * call.head_num)
    packed[: flat.shape[0]] = flat
    return packed.view(tokens, call.head_num)


def _unpack(packed: Tensor, span: slice, call: Call) -> Tensor:
    """The inverse for one sequence, from (tokens, N): (N, Sq)."""
    if call.softmax_layout == "TND":
        return packed[span].transpose(0, 1)
    return packed.reshape(-1)[span.start * call.head_num : span.stop * call.head_num].view(call.head_num, -1)


def _forward_packed(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    tokens = call.query.shape[0]
    out = torch.zeros(tokens, call.head_num, call.value.shape[-1], dtype=call.query.dtype)
    maxima, sums = [], []
    for sequence, (span, _) in enumerate(call.spans):
        part, top, total = arithmetic.forward(_problem(call, sequence))
        out[span] = part[0].transpose(0, 1)
        maxima.append(top[0])
        sums.append(total[0])
    return out, _lanes(_pack(maxima, tokens, call)), _lanes(_pack(sums, tokens, call))


def forward(call: Call, padding_mask: Tensor | None) -> tuple[Call, Tensor, Tensor, Tensor]:
    """The call with the seed it drew, the output, softmax_max and softmax_sum."""
    check(call, padding_mask)
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
    for sequence, (mine, theirs) in enumerate(call.spans):
        rows = [t[mine].transpose(0, 1).unsqueeze(0) for t in (grad, out)]
        statistics = [_unpack(t[..., 0], mine, call).unsqueeze(0) for t in (maxima, sums)]
        part = arithmetic.backward(_problem(call, sequence), *rows, *statistics)
        found.query[mine] = part.query[0].transpose(0, 1)
        found.key[theirs] = part.key[0].transpose(0, 1)
        found.value[theirs] = part.value[0].transpose(0, 1)
        if found.sink is not None and part.sink is not None:
            found.sink += part.sink
    return found


def backward(
    call: Call, grad: Tensor, out: Tensor | None, maxima: Tensor | None, sums: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of query, key, value, pse (None without one) and sink (empty without one).

    Raises:
        ValueError: something of the forward pass is missing, or what `check` refuses.
    """
    if out is None or maxima is None or sums is None:
        raise ValueError(
            f"{_NAME}_grad needs softmax_max, softmax_sum and attention_in of the forward pass, and at least one was not given."
        )
    check(call, None)
    found = (_backward_packed if call.packed else _backward_dense)(call, grad, out, maxima, sums)
    sink = torch.empty(0) if found.sink is None else found.sink
    return found.query, found.key, found.value, found.bias, sink


def decisions(call: Call) -> int:
    """How many weights dropout decides on."""
    if call.packed:
        return sum(call.head_num * _size(mine) * _size(theirs) for mine, theirs in call.spans)
    query = call.layout.to_bnsd(call.query, call.head_num)
    key = call.layout.to_bnsd(call.key, call.layout.key_heads(call.query, call.key))
    return query.shape[0] * call.head_num * query.shape[2] * key.shape[2]
