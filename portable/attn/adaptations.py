"""Changes of a call that do not change its answer, and open a faster path."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from portable.attn.canonical import Canonical, blind_rows, boolean, guarded, numbers
from portable.attn.path import Adaptation, Answer, Arguments, changed
from portable.attn.request import MaskTraits, Request


def _bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _unsqueeze_before(a: Arguments) -> Arguments:
    return replace(a, query=a.query.unsqueeze(0), key=a.key.unsqueeze(0), value=a.value.unsqueeze(0))


UNSQUEEZE = Adaptation(
    "unsqueeze",
    lambda r: changed(r, dims=4),
    lambda r: "a batch dimension is added: free",
    # The caller of all paths adds it already.
)


def _contiguous_before(a: Arguments) -> Arguments:
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (a.query, a.key, a.value))
    return replace(a, query=query, key=key, value=value)


CONTIGUOUS = Adaptation(
    "contiguous",
    lambda r: changed(r, dense_last=True),
    lambda r: f"inputs whose last dimension is strided are copied: at most {_bytes(_input_bytes(r))}",
    _contiguous_before,
)


def _input_bytes(r: Request) -> int:
    return r.itemsize * r.batch * (r.heads * r.queries * r.head_dim + r.key_heads * r.keys * (r.head_dim + r.value_dim))


def _widen_before(a: Arguments) -> Arguments:
    return replace(a, query=a.query.float(), key=a.key.float(), value=a.value.float())


def _widen_after(given: Arguments, answer: Answer) -> Answer:
    return answer[0].to(given.query.dtype), answer[1]


WIDEN = Adaptation(
    "compute in float32",
    lambda r: changed(r, dtype="float32"),
    lambda r: f"inputs are widened and the answer rounded once: {_bytes(2 * _input_bytes(r))} for the time of the call",
    _widen_before,
    _widen_after,
)


def _pad_value_before(a: Arguments) -> Arguments:
    size, value = a.query.shape[-1], a.value.shape[-1]
    if value < size:
        return replace(a, value=F.pad(a.value, (0, size - value)))
    # Zeros beside query and key change no score; the scale is passed, so it stays that of the sizes given.
    return replace(a, query=F.pad(a.query, (0, value - size)), key=F.pad(a.key, (0, value - size)))


def _pad_value_after(given: Arguments, answer: Answer) -> Answer:
    return answer[0][..., : given.value.shape[-1]], answer[1]


PAD_VALUE = Adaptation(
    "pad value",
    lambda r: changed(r, head_dim=max(r.head_dim, r.value_dim), value_dim=max(r.head_dim, r.value_dim)),
    lambda r: f"head_dim {min(r.head_dim, r.value_dim)} is padded to {max(r.head_dim, r.value_dim)}, and the answer sliced",
    _pad_value_before,
    _pad_value_after,
)


def pad_head_dim(multiple: int) -> Adaptation:
    """Zeros up to a multiple of a number."""

    def up(size: int) -> int:
        return -(-size // multiple) * multiple

    def before(a: Arguments) -> Arguments:
        query, key, value = (F.pad(t, (0, up(t.shape[-1]) - t.shape[-1])) for t in (a.query, a.key, a.value))
        return replace(a, query=query, key=key, value=value)

    return Adaptation(
        f"pad head_dim to a multiple of {multiple}",
        lambda r: changed(r, head_dim=up(r.head_dim), value_dim=up(r.value_dim)),
        lambda r: f"head_dim {r.head_dim} is padded to {up(r.head_dim)}, and the answer sliced",
        before,
        _pad_value_after,
    )


def _repeat_before(a: Arguments) -> Arguments:
    groups = a.query.shape[1] // a.key.shape[1]
    return replace(a, key=a.key.repeat_interleave(groups, 1), value=a.value.repeat_interleave(groups, 1))


REPEAT_HEADS = Adaptation(
    "repeat key heads",
    lambda r: changed(r, key_heads=r.heads),
    lambda r: f"key and value are repeated {r.heads // max(r.key_heads, 1)} times",
    _repeat_before,
)


def _dense_traits(traits: MaskTraits) -> MaskTraits:
    return replace(traits, band=False, causal=False, bottom_right=False, window=None, dense=True)


def _boolean_before(a: Arguments) -> Arguments:
    return replace(a, mask=Canonical(a.mask.queries, a.mask.keys, dense=boolean(a.mask, a.query.device)))


BOOLEAN = Adaptation(
    "boolean mask",
    lambda r: changed(r, mask=_dense_traits(r.mask)),
    lambda r: f"the mask is made a boolean tensor: {_bytes(r.queries * r.keys)}, kept for the next call",
    _boolean_before,
)


def _additive_before(a: Arguments) -> Arguments:
    mask = a.mask
    return replace(a, mask=Canonical(mask.queries, mask.keys, additive=numbers(mask, a.query.device, a.query.dtype)))


ADDITIVE = Adaptation(
    "additive mask",
    lambda r: changed(r, mask=replace(_dense_traits(r.mask), kind="additive tensor")),
    lambda r: f"mask and bias are made one tensor: {_bytes(r.mask_bytes)}, kept for the next call",
    _additive_before,
)


def _guard_before(a: Arguments) -> Arguments:
    return replace(a, mask=guarded(a.mask))


def _guard_after(given: Arguments, answer: Answer) -> Answer:
    return answer[0].masked_fill(blind_rows(given.mask), 0.0), answer[1]


GUARD_ROWS = Adaptation(
    "guard empty rows",
    lambda r: changed(r, mask=replace(r.mask, empty_rows=False)),
    lambda r: "rows that see no key are let see all, and their answers set to zero",
    _guard_before,
    _guard_after,
)
