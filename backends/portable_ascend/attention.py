"""Attention on Ascend: the vendor's fused operators, called for what the model asks instead of through PyTorch's function.

PyTorch's function reaches the vendor's training kernel only for boolean masks in four dimensions; the operator itself also
takes sliding windows, bottom-right causal masks and biases. Sources: portable_ascend.sdpa (the vendor's dispatch), and the API
page of ``torch_npu.npu_fusion_attention`` (sparse modes, polarity of the mask, scale, keep_prob).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from portable.attn import common
from portable.attn.adaptations import ADDITIVE, BOOLEAN, PAD_VALUE, pad_head_dim
from portable.attn.canonical import ANY, Canonical
from portable.attn.path import Answer, Arguments, Constraint, Path, constraint
from portable.attn.request import Request
from portable.rehearsal.profile import AttentionCall
from portable_ascend import sdpa

_DTYPES = ("float16", "bfloat16", "float32")
_COMPRESSED = 2048
_MAX_HEADS = 256  # API page, constraint on N; the vendor's dispatch lets 2048 through
_LEFT_UP, _RIGHT_DOWN, _BAND = 2, 3, 4
_ZERO_ROWS = 2  # inner_precise: rows that see nothing give zeros


def _fused(name: str, dtypes: tuple[str, ...]) -> tuple[Constraint, ...]:
    """What the fused operators have in common."""
    return (
        common.NOT_FOUR,
        constraint(lambda r: r.empty, "a size is 0"),
        constraint(
            lambda r: bool(r.generation) and not sdpa.has_fused_kernels(r.generation),
            "{generation} has no fused attention kernel; Ascend910B1 and later have",
        ),
        constraint(lambda r: r.dtype not in dtypes, lambda r: f"the dtype is {r.dtype}, not {', '.join(dtypes)}"),
        constraint(lambda r: r.heads > _MAX_HEADS, lambda r: f"{r.heads} heads are more than {_MAX_HEADS}"),
        constraint(
            lambda r: r.lse and r.mask.empty_rows, "the log-sum-exp of rows that see no key is wanted, which is not documented"
        ),
        constraint(lambda r: r.compiled, "it is not in the graph compiler's operators under torch.compile here"),
    )


def _mode(mask: Canonical) -> tuple[int, Tensor | None, int, int]:
    """(sparse_mode, atten_mask, pre_tockens, next_tockens). In the vendor's mask True is masked out."""
    shift = mask.keys - mask.queries
    if mask.trivial:
        return 0, None, ANY, ANY
    if mask.causal:
        return _LEFT_UP, None, ANY, ANY
    if mask.only_band and mask.high == shift and mask.low <= 1 - mask.queries:
        return _RIGHT_DOWN, None, ANY, ANY
    if mask.only_band:
        # The band's counts are relative to the bottom-right diagonal.
        return _BAND, None, min(shift - mask.low, ANY), min(mask.high - shift, ANY)
    return 0, mask.dense, ANY, ANY


@cache
def _compressed(device: torch.device) -> Tensor:
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)


def _dense(mask: Tensor, a: Arguments) -> Tensor:
    """The inverted mask in a shape that the operators take: SS, 11SS, B1SS or BNSS."""
    inverted = ~mask.to(a.query.device)
    while inverted.dim() < 4:
        inverted = inverted.unsqueeze(0)
    batch, heads, queries, keys = a.query.shape[0], a.query.shape[1], a.query.shape[2], a.key.shape[2]
    sizes = (batch if inverted.shape[0] != 1 or inverted.shape[1] != 1 else 1, heads if inverted.shape[1] != 1 else 1)
    return inverted.expand(*sizes, queries, keys).contiguous()


def _training(a: Arguments) -> Answer:
    npu: Any = torch.ops.npu
    mode, dense, before, after = _mode(a.mask)
    given = dense if dense is None else _dense(dense, a)
    if mode in (_LEFT_UP, _RIGHT_DOWN, _BAND):
        given = _compressed(a.query.device)
    bias = None
    if a.mask.additive is not None or a.mask.slopes is not None:
        # The operator adds its bias before the scale.
        whole = a.mask.bias(0, a.mask.queries, 0, a.mask.keys, torch.float32)
        assert whole is not None
        while whole.dim() < 4:
            whole = whole.unsqueeze(0)
        bias = (whole / a.scale).to(a.query.dtype).expand(-1, a.query.shape[1], a.query.shape[2], a.key.shape[2]).contiguous()
    out, top, total, *_ = npu.npu_fusion_attention(
        a.query.contiguous(),
        a.key.contiguous(),
        a.value.contiguous(),
        a.query.shape[1],
        "BNSD",
        pse=bias,
        atten_mask=given,
        scale=a.scale,
        keep_prob=1.0 - a.dropout,
        pre_tockens=before,
        next_tockens=after,
        sparse_mode=mode,
        inner_precise=_ZERO_ROWS if given is not None else 0,
    )
    return out, top[..., 0] + total[..., 0].log() if a.lse else None


TRAINING = Path(
    "fusion_attention",
    "npu_fusion_attention, the vendor's fused kernel with a backward pass",
    (
        *_fused("npu_fusion_attention", _DTYPES),
        constraint(lambda r: r.head_dim > 512 or r.value_dim > 512, "head_dim {head_dim} is above 512"),
        constraint(lambda r: r.dropout >= 1, "keep_prob is in (0, 1]"),
        constraint(lambda r: r.mask.learned, "gradients of an additive mask that is broadcast are not computed"),
        constraint(lambda r: r.value_dim > r.head_dim, "value head_dim {value_dim} is above the key's {head_dim}", PAD_VALUE),
        constraint(
            lambda r: r.dtype == "float32" and (r.head_dim % 4 != 0 or r.value_dim % 4 != 0),
            "head_dim {head_dim} in float32 is not a multiple of 4",
            pad_head_dim(4),
        ),
        constraint(
            lambda r: r.mask.bias and r.mask.kind not in ("additive tensor", "ALiBi"),
            "a bias together with a mask is two arguments",
            ADDITIVE,
        ),
        constraint(
            lambda r: r.mask.boolean and not (r.mask.trivial or r.mask.band or r.mask.dense), "the mask is no tensor", BOOLEAN
        ),
    ),
    _training,
    lambda r: r.batch * r.heads * r.queries * 64,
    "hiascend.com, torch_npu.npu_fusion_attention",
)


def _inference(a: Arguments) -> Answer:
    npu: Any = torch.ops.npu
    mode, dense, before, after = _mode(a.mask)
    given = None if dense is None else _dense(dense, a)
    if mode in (_LEFT_UP, _RIGHT_DOWN, _BAND):
        given = _compressed(a.query.device)
    if given is not None and mode == 0:
        given = given[:, :1] if given.shape[1] == 1 else given
    out, sums = npu.npu_fused_infer_attention_score(
        a.query.contiguous(),
        a.key.contiguous(),
        a.value.contiguous(),
        num_heads=a.query.shape[1],
        num_key_value_heads=a.key.shape[1],
        input_layout="BNSD",
        scale=a.scale,
        atten_mask=given,
        sparse_mode=mode,
        pre_tokens=before,
        next_tokens=after,
        inner_precise=_ZERO_ROWS if given is not None else 0,
        softmax_lse_flag=a.lse,
    )
    return out, sums[..., 0] if a.lse else None


INFERENCE = Path(
    "fused_infer",
    "npu_fused_infer_attention_score, the vendor's kernel for prefill and decoding",
    (
        *_fused("npu_fused_infer_attention_score", ("float16", "bfloat16")),
        constraint(lambda r: r.grad, "a backward pass will follow, which it has not"),
        constraint(lambda r: r.dropout > 0, "it has no dropout"),
        constraint(lambda r: r.mask.bias, "a bias is wanted, which is taken by npu_fusion_attention only here"),
        constraint(lambda r: r.head_dim > 512, "head_dim {head_dim} is above 512"),
        constraint(lambda r: r.head_dim != r.value_dim, "value head_dim {value_dim} is not the key's {head_dim}", PAD_VALUE),
        constraint(lambda r: r.head_dim % 16 != 0, "head_dim {head_dim} is not a multiple of 16", pad_head_dim(16)),
        constraint(lambda r: r.heads // max(r.key_heads, 1) > 64, "more than 64 query heads share a key head"),
        constraint(lambda r: not (r.mask.trivial or r.mask.band or r.mask.dense), "the mask is no tensor", BOOLEAN),
        constraint(
            lambda r: r.mask.dense and not r.mask.same_for_heads, "the mask differs between heads, which it does not take"
        ),
        constraint(lambda r: r.mask.empty_rows, "rows that see no key are not documented for it"),
    ),
    _inference,
    lambda r: 0,
    "torch_npu's own documentation of npu_fused_infer_attention_score",
)


def _as_call(r: Request) -> AttentionCall:
    """The request as the vendor's dispatch sees it."""
    lead = () if r.dims == 3 else (r.batch,)
    dtype = getattr(torch, r.dtype)
    mask = None if r.mask.trivial or r.mask.causal else dtype if r.mask.bias else torch.bool
    return AttentionCall(
        torch.Size((*lead, r.heads, r.queries, r.head_dim)),
        torch.Size((*lead, r.key_heads, r.keys, r.head_dim)),
        torch.Size((*lead, r.key_heads, r.keys, r.value_dim)),
        (dtype, dtype, dtype),
        mask,
        r.dropout,
        r.mask.causal,
    )


SDPA = Path(
    "sdpa",
    "F.scaled_dot_product_attention, by the vendor's own dispatch",
    (
        common.NOT_FOUR,
        constraint(lambda r: r.empty, "a size is 0"),
        common.NO_LSE,
        constraint(
            lambda r: not (r.mask.trivial or r.mask.causal or r.mask.dense) and r.mask.boolean, "the mask is no tensor", BOOLEAN
        ),
        constraint(
            lambda r: bool(sdpa.reasons(_as_call(r), r.generation or "Ascend910B1")),
            lambda r: "; ".join(sdpa.reasons(_as_call(r), r.generation or "Ascend910B1")),
        ),
        constraint(lambda r: r.value_dim > r.head_dim, "value head_dim {value_dim} is above the key's {head_dim}", PAD_VALUE),
        constraint(lambda r: r.dropout >= 1, "keep_prob is in (0, 1]"),
    ),
    common.sdpa,
    lambda r: r.batch * r.heads * r.queries * 64,
    "op_plugin, ScaledDotProductAttentionKernelNpuOpApi.cpp",
)

PATHS = (INFERENCE, TRAINING, SDPA, common.BLOCKWISE, common.MATH)
