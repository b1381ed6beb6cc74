"""Attention on Trainium: PyTorch's function through the gate of its flash kernel, and what opens the gate.

Source: AWS's torch-neuronx sources and release notes as far as published. The emulated device applies the same gate, and the
tests compare the two.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from portable.attn import common
from portable.attn.adaptations import PAD_VALUE
from portable.attn.path import Adaptation, Answer, Arguments, Path, changed, constraint
from portable.attn.request import Request

_MULTIPLE = 512
_MAX_HEAD_DIM = 128
_DTYPES = ("float32", "float16", "bfloat16")


def _up(length: int) -> int:
    return -(-length // _MULTIPLE) * _MULTIPLE


def _pad_before(a: Arguments) -> Arguments:
    length = a.query.shape[2]
    size = (0, 0, 0, _up(length) - length)
    query, key, value = (F.pad(t, size) for t in (a.query, a.key, a.value))
    mask = replace(a.mask, queries=_up(length), keys=_up(length))
    return replace(a, query=query, key=key, value=value, mask=mask)


def _pad_after(given: Arguments, answer: Answer) -> Answer:
    return answer[0][:, :, : given.query.shape[2]], answer[1]


PAD_LENGTH = Adaptation(
    f"pad length to a multiple of {_MULTIPLE}",
    lambda r: changed(r, queries=_up(r.queries), keys=_up(r.keys)),
    lambda r: (
        f"{r.queries} queries and keys are padded to {_up(r.queries)} at the end, where no row looks under a causal mask: "
        f"{(_up(r.queries) / max(r.queries, 1)) ** 2:.1f} times the work"
    ),
    _pad_before,
    _pad_after,
)


def _lengths(r: Request) -> bool:
    return r.queries % _MULTIPLE != 0 or r.keys % _MULTIPLE != 0


FLASH = Path(
    "nki_flash",
    "F.scaled_dot_product_attention through the gate of its NKI flash kernel",
    (
        common.NOT_FOUR,
        constraint(lambda r: r.empty, "a size is 0"),
        constraint(lambda r: r.dtype not in _DTYPES, "the dtype is {dtype}, not float32, float16 or bfloat16"),
        constraint(lambda r: r.dropout > 0, "dropout {dropout:g} is not in the kernel"),
        constraint(lambda r: r.lse, "the log-sum-exp is wanted, which PyTorch does not hand out"),
        constraint(
            lambda r: r.mask.causal and r.queries != r.keys,
            "causal with {queries} queries and {keys} keys: the vendor's forward and backward pass align it differently",
        ),
        constraint(lambda r: not (r.mask.trivial or r.mask.causal), lambda r: f"a mask ({r.mask.kind}) closes its gate"),
        constraint(lambda r: r.value_dim != r.head_dim, "value head_dim {value_dim} is not the key's {head_dim}", PAD_VALUE),
        constraint(lambda r: r.head_dim > _MAX_HEAD_DIM, f"head_dim {{head_dim}} is above {_MAX_HEAD_DIM}"),
        constraint(
            lambda r: _lengths(r) and not (r.mask.causal and r.queries == r.keys),
            f"lengths {{queries}} and {{keys}} are not multiples of {_MULTIPLE}",
        ),
        constraint(_lengths, f"lengths {{queries}} and {{keys}} are not multiples of {_MULTIPLE}", PAD_LENGTH),
    ),
    common.sdpa,
    lambda r: r.batch * r.heads * r.queries * 4,
    "torch-neuronx, the gate of scaled_dot_product_attention",
)

PATHS = (FLASH, common.BLOCKWISE, common.MATH)
