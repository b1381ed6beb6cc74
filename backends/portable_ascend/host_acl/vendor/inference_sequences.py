"""The sequences of a call of the vendor's attention for inference, out of layouts, pages and lengths. See `inference_core`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor import paging
from portable_ascend.host_acl.vendor.inference_request import Request
from portable_ascend.host_acl.vendor.layouts import Layout

_ROPE = 64  # head_dim of the rotated parts


@dataclass
class Sequences:
    """The sequences of a call, each (heads, length, head_dim), with the length that counts (the rest is padding)."""

    queries: list[Tensor]
    used: list[int]
    keys: list[Tensor]
    values: list[Tensor]


def sequences(request: Request) -> Sequences:
    """The sequences of a call.

    Raises:
        ValueError: sizes or lengths that the pages do not allow.
    """
    layout_in = request.layout_in
    if request.packed:
        found = _packed(request)
    else:
        query = _heads_first(request, request.query, request.heads)
        if query.shape[1] != request.heads:
            request.refuse(f"num_heads={request.heads} and a query of {query.shape[1]} heads", "the query's number of heads")
        batch, length = query.shape[0], query.shape[2]
        if request.layout == "BNSD_BSND" and length == 1:
            request.refuse("input_layout='BNSD_BSND' with queries of length 1", "it with longer ones")
        if request.layout_out == "NBSD" and length > 16:
            request.refuse(f"input_layout={request.layout!r} with queries of length {length}", "it with lengths up to 16")
        if request.query_rope is not None:
            query = _joined(request, query, _heads_first(request, request.query_rope, request.heads), "query_rope")
        queries = list(query)
        # "Without meaning" for queries of length 1.
        used = [1] * batch if length == 1 else _lengths(request, "actual_seq_lengths", request.query_lengths, batch, length)
        found = Sequences(queries, used, *_dense_keys(request, batch))
    _check_head_dim(request, found)
    if request.key_prefix is not None and request.value_prefix is not None:
        _add_prefix(request, found)
    if layout_in == "NSD" and len(found.queries) != 1:
        request.refuse("more than one sequence in layout NSD", "one")
    return found


def _heads_first(request: Request, tensor: Tensor, heads: int) -> Tensor:
    """(batch, heads, length, head_dim)."""
    if request.layout_in == "NSD":
        return tensor.unsqueeze(0)
    if request.layout_in == "BSH" and tensor.shape[-1] % heads:
        request.refuse(f"a tensor of shape {tuple(tensor.shape)} and {heads} heads", "a last dimension that the heads divide")
    return Layout(request.layout_in, heads).to_bnsd(tensor, heads)


def _joined(request: Request, tensor: Tensor, rope: Tensor, name: str) -> Tensor:
    """The scores of two parts of head_dim add up, so the parts are one longer head_dim."""
    if rope.shape[:-1] != tensor.shape[:-1] or rope.shape[-1] != _ROPE or rope.dtype != tensor.dtype:
        request.refuse(
            f"a {name} that is {rope.dtype}, {tuple(rope.shape)} beside {tensor.dtype}, {tuple(tensor.shape)} (heads first)",
            f"the same sizes, with a head_dim of {_ROPE}",
        )
    return torch.cat((tensor, rope), -1)


def _lengths(request: Request, name: str, given: Sequence[int] | None, batch: int, length: int) -> list[int]:
    if given is None:
        return [length] * batch
    found = [int(n) for n in given]
    if len(found) == 1:
        found *= batch
    if len(found) < batch:
        request.refuse(f"{name} of {len(found)} lengths for a batch of {batch}", "one length, or one for each sequence")
    found = found[:batch]
    if any(not 0 <= n <= length for n in found):
        request.refuse(f"{name}={found} for sequences of length {length}", "lengths up to that")
    return found


def _dense_keys(request: Request, batch: int) -> tuple[list[Tensor], list[Tensor]]:
    if request.block_table is not None:
        return _paged_keys(request, batch, request.single)
    groups = request.groups
    key, value = (_heads_first(request, t, groups) for t in (request.key, request.value))
    if key.shape != value.shape or key.shape[0] != batch or key.shape[1] != groups:
        request.refuse(
            f"key and value of shape {tuple(key.shape)}, {tuple(value.shape)} (batch, heads, length, head_dim) for a batch of "
            f"{batch} and {groups} key heads",
            "one shape for both, with that batch and those heads",
        )
    if request.key_rope is not None:
        key = _joined(request, key, _heads_first(request, request.key_rope, groups), "key_rope")
    lengths = _lengths(request, "actual_seq_lengths_kv", request.key_lengths, batch, key.shape[2])
    keys, values = zip(*((k[:, :n], v[:, :n]) for k, v, n in zip(key, value, lengths, strict=True)), strict=True)
    return list(keys), list(values)


def _paged_keys(request: Request, batch: int, single: bool) -> tuple[list[Tensor], list[Tensor]]:
    if request.key_lengths is None:
        request.refuse("block_table without actual_seq_lengths_kv", "both")
    if request.key_prefix is not None:
        request.refuse("block_table with a shared prefix", "one of them")
    assert request.block_table is not None
    limit = 1024 if request.packed or request.query_rope is not None else 512
    multiple = 16 if single or limit == 1024 else 128
    size = request.block_size
    if not 0 < size <= limit or size % multiple:
        request.refuse(f"block_size={size}", f"multiples of {multiple} up to {limit} with such queries")
    pages = paging.Pages(request.operator, request.block_table, size, request.groups)
    lengths = _lengths(request, "actual_seq_lengths_kv", request.key_lengths, batch, pages.capacity)
    pages.check(batch, heads_first=request.layout_in not in ("BSH", "BSND"), caches=(request.key, request.value))
    keys, values = (pages.gather(cache, lengths) for cache in (request.key, request.value))
    if request.key_rope is not None:
        ropes = pages.gather(request.key_rope, lengths)
        keys = [_joined(request, key, rope, "key_rope") for key, rope in zip(keys, ropes, strict=True)]
    return keys, values


def _packed(request: Request) -> Sequences:
    query, query_rope, key_rope = request.query, request.query_rope, request.key_rope
    ends = _ends(request, "actual_seq_lengths", request.query_lengths, query)
    if request.key_lengths is None:
        request.refuse("no actual_seq_lengths_kv with packed sequences", "it with them")
    # NTD has the heads first, as it is wanted here.
    turn = request.layout_in == "TND"
    query = query.transpose(0, 1) if turn else query
    if query.shape[0] != request.heads:
        request.refuse(f"num_heads={request.heads} and a query of {query.shape[0]} heads", "the query's number of heads")
    if query_rope is not None:
        query = _joined(request, query, query_rope.transpose(0, 1) if turn else query_rope, "query_rope")
    queries = _cut(query, ends)
    if request.block_table is not None:
        keys, values = _paged_keys(request, len(queries), False)
    else:
        key_ends = _ends(request, "actual_seq_lengths_kv", request.key_lengths, request.key)
        if len(key_ends) != len(ends):
            request.refuse(f"{len(ends)} query and {len(key_ends)} key sequences", "as many of the one as of the other")
        key, value = (t.transpose(0, 1) if turn else t for t in (request.key, request.value))
        if key.shape[:2] != value.shape[:2] or key.shape[0] != request.groups:
            request.refuse(
                f"key and value of shape {tuple(request.key.shape)}, {tuple(request.value.shape)}, {request.groups} key heads",
                "the same tokens and heads for both, and those heads",
            )
        if key_rope is not None:
            key = _joined(request, key, key_rope.transpose(0, 1) if turn else key_rope, "key_rope")
        keys, values = _cut(key, key_ends), _cut(value, key_ends)
    return Sequences(queries, [q.shape[1] for q in queries], keys, values)


def _ends(request: Request, name: str, given: Sequence[int] | None, tensor: Tensor) -> list[int]:
    tokens = tensor.shape[0 if request.layout_in == "TND" else 1]
    found = [int(end) for end in given or ()]
    if not found or len(found) > 4096 or found != sorted(found) or found[0] < 0 or found[-1] > tokens:
        request.refuse(f"{name}={found or None} with {tokens} packed tokens", "cumulative lengths up to that, 4096 at most")
    return found


def _cut(tensor: Tensor, ends: Sequence[int]) -> list[Tensor]:
    return [tensor[:, a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _check_head_dim(request: Request, sequences: Sequences) -> None:
    if not sequences.queries:
        return
    rope = _ROPE if request.query_rope is not None else 0
    size, other, values = (parts[0].shape[2] for parts in (sequences.queries, sequences.keys, sequences.values))
    if size != other:
        request.refuse(f"head_dim {size - rope} of the query and {other - rope} of the key", "one for both")
    size -= rope
    if size > 512 or size % 16 or values % 16:
        request.refuse(f"head_dim {size} (values: {values})", "multiples of 16 up to 512")
    if rope and size not in (128, 512):
        request.refuse(f"query_rope with head_dim {size}", "it with 128 and 512")
    if rope and size == 512 and request.groups != 1:
        request.refuse(f"query_rope with head_dim 512 and {request.groups} key heads", "one key head then")
    if request.packed and not rope:
        allowed = {(128, 128), (192, 128), (192, 192), *([(64, 64)] if request.heads == request.groups else [])}
        if (size, values) not in allowed:
            request.refuse(
                f"head_dim {size} (values: {values}) with packed sequences", f"one of {sorted(allowed)} (64: without groups)"
            )


def _add_prefix(request: Request, sequences: Sequences) -> None:
    """Put what all sequences have in common before the keys and values of each."""
    assert request.key_prefix is not None and request.value_prefix is not None
    key, value = (_heads_first(request, t, request.groups) for t in (request.key_prefix, request.value_prefix))
    if key.shape != value.shape or key.shape[0] != 1 or key.shape[1] != request.groups:
        request.refuse(
            f"shared prefixes of shape {tuple(request.key_prefix.shape)}, {tuple(request.value_prefix.shape)}",
            "one shape for both, with a batch of 1 and the heads of the keys",
        )
    (length,) = _lengths(request, "actual_shared_prefix_len", request.prefix_length, 1, key.shape[2])
    sequences.keys = [torch.cat((key[0, :, :length], k), 1) for k in sequences.keys]
    sequences.values = [torch.cat((value[0, :, :length], v), 1) for v in sequences.values]
