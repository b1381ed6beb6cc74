"""npu_fused_infer_attention_score and its kin: attention for prefill and decoding, without a backward pass.

Source: the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py) and its meta kernels for shapes. Quantised
operands, shared prefixes, left padding and MLA's rope inputs are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor import arithmetic, masks
from portable_ascend.host_acl.vendor.arithmetic import Problem
from portable_ascend.host_acl.vendor.masks import Sparsity
from portable_ascend.host_acl.vendor.refusals import check_absent, refuse

_NAME = "npu_fused_infer_attention_score"
_EVERYTHING = 2**31 - 1
_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")
_MODES = (masks.DEFAULT, masks.ALL, masks.LEFT_UP, masks.RIGHT_DOWN, masks.BAND)
_NOT_HERE = "only plain float16 and bfloat16 attention is computed"
# inner_precise has two bits: the lower asks for speed instead of precision (no matter here); the higher for zeros in rows
# that are masked throughout.
_ZERO_ROWS = 2


@dataclass(frozen=True)
class Call:
    """The arguments that decide the answer."""

    query: Tensor
    key: Tensor
    value: Tensor
    layout: str
    heads: int
    key_heads: int
    scale: float
    sparsity: Sparsity
    bias: Tensor | None = None
    query_lengths: Sequence[int] | None = None
    key_lengths: Sequence[int] | None = None
    block_table: Tensor | None = None
    block_size: int = 0
    inner_precise: int = 0
    sink: Tensor | None = None
    with_lse: bool = False


@dataclass
class _Sequences:
    """Each sequence of a batch as (heads, length, head_dim), and where its rows go in the answer."""

    query: list[Tensor] = field(default_factory=list)
    key: list[Tensor] = field(default_factory=list)
    value: list[Tensor] = field(default_factory=list)


def _split(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """(batch, heads, length, head_dim)."""
    if layout.startswith("BNSD"):
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    return tensor.unflatten(-1, (heads, -1)).transpose(1, 2)


def _lengths(given: Sequence[int] | None, batch: int, longest: int, name: str) -> list[int]:
    if given is None:
        return [longest] * batch
    numbers = [int(n) for n in given]
    if len(numbers) == 1:
        numbers *= batch
    if len(numbers) < batch:
        refuse(_NAME, f"{len(numbers)} numbers in {name} and a batch of {batch}", "one, or one for each sequence")
    if any(not 0 <= n <= longest for n in numbers[:batch]):
        refuse(_NAME, f"{name}={numbers[:batch]} and sequences of {longest}", "lengths within the sequences")
    return numbers[:batch]


def _paged(pool: Tensor, table: Tensor, lengths: Sequence[int], call: Call) -> list[Tensor]:
    """Each sequence of a cache in blocks, (blocks, block_size, H) or (blocks, heads, block_size, head_dim)."""
    if pool.dim() == 3:
        pool = pool.unflatten(-1, (call.key_heads, -1)).transpose(1, 2)
    size = pool.shape[2]
    if call.block_size != size:
        refuse(_NAME, f"block_size={call.block_size} and a cache of blocks of {size}", "the cache's own block_size")
    found = []
    for row, length in zip(table.tolist(), lengths, strict=True):
        blocks = pool[torch.tensor(row[: -(-length // size)], dtype=torch.long)]
        found.append(blocks.transpose(0, 1).flatten(1, 2)[:, :length])
    return found


def _sequences(call: Call) -> _Sequences:
    found = _Sequences()
    if call.layout == "TND":
        for tensor, ends, parts in (
            (call.query, call.query_lengths, [found.query]),
            (call.key, call.key_lengths, [found.key]),
            (call.value, call.key_lengths, [found.value]),
        ):
            if ends is None or list(ends) != sorted(ends) or (ends and ends[-1] != tensor.shape[0]):
                refuse(
                    _NAME, f"ends {ends} for {tensor.shape[0]} tokens in layout TND", "ends of all sequences, the last one T"
                )
            starts = [0, *list(ends)[:-1]]
            parts[0].extend(tensor[a:b].transpose(0, 1) for a, b in zip(starts, ends, strict=True))
        if len(found.query) != len(found.key):
            refuse(_NAME, f"{len(found.query)} query and {len(found.key)} key sequences", "as many of the one as of the other")
        return found
    query = _split(call.query, call.layout, call.heads)
    batch, _, longest, _ = query.shape
    for sequence, length in enumerate(_lengths(call.query_lengths, batch, longest, "actual_seq_lengths")):
        # With one query a sequence, the argument has no meaning.
        found.query.append(query[sequence, :, : longest if longest == 1 else length])
    if call.block_table is not None:
        if call.key_lengths is None:
            refuse(_NAME, "a block_table without actual_seq_lengths_kv", "the length of each sequence with it")
        reach = call.block_table.shape[1] * call.block_size
        lengths = _lengths(call.key_lengths, batch, reach, "actual_seq_lengths_kv")
        found.key, found.value = (_paged(pool, call.block_table, lengths, call) for pool in (call.key, call.value))
        return found
    key, value = (_split(t, call.layout, call.key_heads) for t in (call.key, call.value))
    lengths = _lengths(call.key_lengths, key.shape[0], key.shape[2], "actual_seq_lengths_kv")
    found.key, found.value = ([t[i, :, :n] for i, n in enumerate(lengths)] for t in (key, value))
    return found


def _check(call: Call) -> None:
    if call.layout not in _LAYOUTS:
        refuse(_NAME, f"input_layout={call.layout!r}", ", ".join(_LAYOUTS))
    dtypes = {t.dtype for t in (call.query, call.key, call.value)}
    if len(dtypes) != 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        refuse(_NAME, f"dtypes {', '.join(sorted(str(d)[6:] for d in dtypes))}", "float16 or bfloat16, one for all three")
    if call.heads < 1 or call.key_heads < 1 or call.heads % call.key_heads or call.heads // call.key_heads > 64:
        refuse(_NAME, f"{call.heads} query heads and {call.key_heads} key heads", "a multiple, at most 64 times as many")
    dims = {"BSH": 3, "TND": 3}.get(call.layout, 4)
    if call.query.dim() != dims:
        refuse(_NAME, f"query of shape {tuple(call.query.shape)} in layout {call.layout}", f"{dims} dimensions")
    if call.layout != "BSH":
        axis = 1 if call.layout.startswith("BNSD") or call.layout == "TND" else 2
        if call.query.shape[axis] != call.heads:
            refuse(
                _NAME, f"num_heads={call.heads} and query of {call.query.shape[axis]} heads", "the query's own number of heads"
            )
    if call.sparsity.mode not in _MODES:
        refuse(_NAME, f"sparse_mode={call.sparsity.mode}", "0 to 4")
    if call.sparsity.mode == masks.ALL and call.sparsity.mask is None:
        refuse(_NAME, "sparse_mode=1 without a mask", "the whole mask with it")
    if call.sparsity.mask is not None and call.sparsity.mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        refuse(_NAME, f"an atten_mask of {call.sparsity.mask.dtype}", "bool, int8 or uint8 (1: masked out)")
    if call.inner_precise not in (0, 1, 2, 3):
        refuse(_NAME, f"inner_precise={call.inner_precise}", "0 to 3")


def _mask(call: Call, sequence: int, batch: int, queries: int, keys: int) -> Callable[[int, int, int], Tensor | None]:
    sparsity = call.sparsity
    mask = sparsity.mask
    # With one query the mode has no meaning: a mask is taken as it is.
    mode = masks.ALL if queries == 1 and sparsity.mode in _MODES[:2] else sparsity.mode
    if mask is not None and mode in (masks.DEFAULT, masks.ALL):
        if mask.dim() == 2 and queries == 1 and mask.shape[0] == batch > 1:
            mask = mask.view(batch, 1, 1, -1)
        if mask.dim() == 3:
            mask = mask.unsqueeze(1)
        if mask.shape[-2] < queries or mask.shape[-1] < keys:
            refuse(
                _NAME,
                f"an atten_mask of shape {tuple(mask.shape)} for {queries} queries and {keys} keys",
                "the mask of all queries and keys",
            )
        mask = mask[..., :queries, :keys]
    effective = Sparsity(mode, mask, sparsity.before, sparsity.after)
    return lambda index, start, stop: masks.masked(effective, sequence, start, stop, queries, keys)


def _attend(call: Call) -> tuple[Tensor, Tensor]:
    _check(call)
    found = _sequences(call)
    parts, sums = [], []
    batch = len(found.query)
    for sequence, (query, key, value) in enumerate(zip(found.query, found.key, found.value, strict=True)):
        queries, keys = query.shape[1], key.shape[1]
        bias = call.bias
        if bias is not None:
            bias = bias[sequence if bias.shape[0] > 1 else 0, :, :queries, :keys].float()
        problem = Problem(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            call.scale,
            _mask(call, sequence, batch, queries, keys),
            bias,
            sink=call.sink,
            zero_rows=bool(call.inner_precise & _ZERO_ROWS) or call.sparsity.mode in (masks.RIGHT_DOWN, masks.BAND),
        )
        out, maxima, totals = arithmetic.forward(problem)
        parts.append(out[0])
        sums.append((maxima + totals.log())[0])
    return _answer(call, parts), _lse(call, sums)


def _answer(call: Call, parts: list[Tensor]) -> Tensor:
    if call.layout == "TND":
        return torch.cat([part.transpose(0, 1) for part in parts]).contiguous()
    longest = _split(call.query, call.layout, call.heads).shape[2]
    whole = parts[0].new_zeros(len(parts), call.heads, longest, parts[0].shape[-1])
    for sequence, part in enumerate(parts):
        whole[sequence, :, : part.shape[1]] = part
    if call.layout == "BNSD":
        return whole
    whole = whole.transpose(1, 2)
    return (whole.flatten(2) if call.layout == "BSH" else whole).contiguous()


def _lse(call: Call, sums: list[Tensor]) -> Tensor:
    """log(sum(exp(scores))): (B, N, S, 1), or (T, N, 1) for packed sequences; empty unless asked for."""
    if not call.with_lse:
        return torch.empty(0)
    if call.layout == "TND":
        return torch.cat([part.t() for part in sums]).unsqueeze(-1).float()
    longest = _split(call.query, call.layout, call.heads).shape[2]
    whole = torch.full((len(sums), call.heads, longest, 1), float("inf"))
    for sequence, part in enumerate(sums):
        whole[sequence, :, : part.shape[1], 0] = part
    return whole


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp). num_key_value_heads 0 stands for num_heads.

    Raises:
        ValueError: what the documentation does not allow.
        NotImplementedError: see the head of this module.
    """
    check_absent(_NAME, _NOT_HERE, **others)
    return _attend(
        Call(
            query, key, value, input_layout, num_heads, num_key_value_heads or num_heads, scale,
            Sparsity(sparse_mode, atten_mask, pre_tokens, next_tokens), pse_shift, actual_seq_lengths, actual_seq_lengths_kv,
            block_table, block_size, inner_precise, None, softmax_lse_flag,
        )
    )  # fmt: skip


def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = _EVERYTHING,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """As `npu_fused_infer_attention_score`, with a score for a key without a value ("sink") and other names."""
    check_absent(_NAME, _NOT_HERE, **others)
    return _attend(
        Call(
            query, key, value, input_layout, num_query_heads, num_key_value_heads or num_query_heads, softmax_scale,
            Sparsity(sparse_mode, atten_mask, pre_tokens, next_tokens), pse_shift, actual_seq_qlen, actual_seq_kvlen,
            block_table, block_size, inner_precise, learnable_sink, return_softmax_lse,
        )
    )  # fmt: skip


def npu_prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = _EVERYTHING,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    **others: Any,
) -> Tensor:
    """Attention of many queries. next_tokens is 0 by default: causal, where a mask is passed."""
    check_absent("npu_prompt_flash_attention", _NOT_HERE, **others)
    return _attend(
        Call(
            query, key, value, input_layout, num_heads, num_key_value_heads or num_heads, scale_value,
            Sparsity(sparse_mode, atten_mask, pre_tokens, next_tokens), pse_shift, actual_seq_lengths, actual_seq_lengths_kv,
        )
    )[0]  # fmt: skip


def npu_incre_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
    **others: Any,
) -> Tensor:
    """Attention of one query to each sequence of a cache; actual_seq_lengths are those of the cache."""
    check_absent("npu_incre_flash_attention", _NOT_HERE, **others)
    return _attend(
        Call(
            query, key, value, input_layout, num_heads, num_key_value_heads or num_heads, scale_value,
            Sparsity(masks.DEFAULT, atten_mask), pse_shift, None, actual_seq_lengths, block_table, block_size, inner_precise,
        )
    )[0]  # fmt: skip


OPERATORS: Mapping[str, Callable[..., Any]] = {
    f"npu::{function.__name__}": function
    for function in (
        npu_fused_infer_attention_score,
        npu_fused_infer_attention_score_v2,
        npu_prompt_flash_attention,
        npu_incre_flash_attention,
    )
}
