"""The paths that every device has: blockwise, and PyTorch's math path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from portable.attn import adaptations, blockwise
from portable.attn.adaptations import BOOLEAN, UNSQUEEZE
from portable.attn.path import Answer, Arguments, Constraint, Path, constraint
from portable.attn.request import Request

_KERNELS = ("flash", "memory-efficient", "cuDNN")

NOT_FOUR = constraint(lambda r: r.dims != 4, "inputs have {dims} dimensions, not 4", UNSQUEEZE)
STRIDED = constraint(
    lambda r: not r.dense_last, "the last dimension of query, key or value is not contiguous", adaptations.CONTIGUOUS
)


def switched_off(index: int) -> Constraint:
    """One of PyTorch's kernels must not be switched off; by its place in `portable.attn.request.Request.off`."""
    return constraint(
        lambda r: r.off[index],
        f"PyTorch's {_KERNELS[index]} kernel is switched off (torch.nn.attention.sdpa_kernel or torch.backends.cuda)",
    )


NO_LSE = constraint(lambda r: r.lse, "the log-sum-exp is wanted, which it does not give")


def sdpa(a: Arguments) -> Answer:
    """F.scaled_dot_product_attention with what it takes: a flag, a boolean tensor, or an additive one."""
    mask, causal = tensors(a)
    gqa = a.key.shape[1] != a.query.shape[1]
    out = F.scaled_dot_product_attention(
        a.query, a.key, a.value, mask, a.dropout, causal, scale=a.scale, **({"enable_gqa": True} if gqa else {})
    )
    return out, None


def tensors(a: Arguments) -> tuple[Tensor | None, bool]:
    """(attn_mask, is_causal) for F.scaled_dot_product_attention. A path has made sure that the mask can be said so."""
    if a.mask.trivial:
        return None, False
    if a.mask.causal:
        return None, True
    if a.mask.dense is not None:
        return _four(a.mask.dense), False
    # Kernels take additive masks in the query's dtype.
    return None if a.mask.additive is None else _four(a.mask.additive).to(a.query.dtype), False


def _four(mask: Tensor) -> Tensor:
    # Kernels take masks of 2 or 4 dimensions.
    while mask.dim() < 2 or mask.dim() == 3:
        mask = mask.unsqueeze(0)
    return mask


def _blockwise(a: Arguments) -> Answer:
    from portable.attn import blockwise_op

    return blockwise_op.attention(a.query, a.key, a.value, a.mask.to(a.query.device), a.scale, a.dropout, a.lse)


def _block_memory(r: Request) -> int:
    return 4 * max(blockwise.SCORES, blockwise.ROWS // 4 * r.keys) * 3


BLOCKWISE = Path(
    "blockwise",
    "block of queries by block of queries in PyTorch's own operators, O(L) memory, any mask and bias",
    (NOT_FOUR,),
    _blockwise,
    _block_memory,
    "portable.attn.blockwise",
)


def _math(a: Arguments) -> Answer:
    if a.query.numel() == 0 or a.key.numel() == 0:
        # Sums over nothing: zeros, which PyTorch's own math path makes NaN of.
        out = a.query.new_zeros((*a.query.shape[:3], a.value.shape[-1])) + 0 * (a.query.sum() + a.key.sum() + a.value.sum())
        return out, None
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(a)


MATH = Path(
    "math",
    "PyTorch's decomposition: all scores in memory, twice",
    (
        NOT_FOUR,
        constraint(
            lambda r: not r.mask.trivial and not r.mask.causal and not r.mask.dense and not r.mask.bias,
            "the mask is not a tensor",
            BOOLEAN,
        ),
        constraint(
            lambda r: r.mask.bias and not (r.mask.dense and r.mask.kind == "additive tensor"),
            "mask and bias are not one tensor",
            adaptations.ADDITIVE,
        ),
        NO_LSE,
    ),
    _math,
    lambda r: 2 * r.score_bytes,
    "torch.nn.functional.scaled_dot_product_attention, SDPBackend.MATH",
    fused=False,
)


def deterministic() -> bool:
    """Whether PyTorch was told to be."""
    return torch.are_deterministic_algorithms_enabled()
