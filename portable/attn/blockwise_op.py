"""The blockwise path as operators of PyTorch: autograd and torch.compile take them as one piece each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from portable.attn import blockwise
from portable.attn.canonical import Canonical

_FIELDS = ("lengths", "ids", "query_ids", "prefix", "slopes", "dense", "additive")


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Canonical, scale: float, dropout: float = 0.0, with_sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention (B, H, Lq, Dv) and, if asked for, its log-sum-exp (B, H, Lq).

    Dropout draws its seed from PyTorch's CPU generator, so torch.manual_seed decides it on every device.
    """
    seed = torch.randint(2**62, (1,)) if dropout else None
    tensors = [getattr(mask, name) for name in _FIELDS]
    band = [mask.low, mask.high, mask.prefix_high]
    out, sums = _attention(query, key, value, *tensors, seed, band, scale, dropout, with_sums)
    return out, sums if with_sums else None


def _call(query: Tensor, key: Tensor, tensors: Sequence[Tensor | None], seed: Tensor | None, band: Sequence[int], scale: float,
          dropout: float) -> blockwise.Call:  # fmt: skip
    named: dict[str, Any] = dict(zip(_FIELDS, tensors, strict=True))
    mask = Canonical(query.shape[2], key.shape[2], low=band[0], high=band[1], prefix_high=band[2], **named)
    return blockwise.Call(mask, scale, dropout, 0 if seed is None else int(seed))


def _not_cast(query: Tensor) -> Any:
    """Inside, products are float32 for a reason: a backward pass may be run within autocast, which would round them."""
    return torch.autocast(query.device.type, enabled=False)


@torch.library.custom_op("portable::blockwise_attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    query_ids: Tensor | None,
    prefix: Tensor | None,
    slopes: Tensor | None,
    dense: Tensor | None,
    additive: Tensor | None,
    seed: Tensor | None,
    band: Sequence[int],
    scale: float,
    dropout: float,
    with_sums: bool,
) -> tuple[Tensor, Tensor]:
    tensors = (lengths, ids, query_ids, prefix, slopes, dense, additive)
    with _not_cast(query):
        out, sums = blockwise.forward(query, key, value, _call(query, key, tensors, seed, band, scale, dropout), with_sums)
    return out, query.new_empty(0) if sums is None else sums


@torch.library.custom_op("portable::blockwise_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    grad_sums: Tensor | None,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    ids: Tensor | None,
    query_ids: Tensor | None,
    prefix: Tensor | None,
    slopes: Tensor | None,
    dense: Tensor | None,
    additive: Tensor | None,
    seed: Tensor | None,
    band: Sequence[int],
    scale: float,
    dropout: float,
    wants_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = (lengths, ids, query_ids, prefix, slopes, dense, additive)
    call = _call(query, key, tensors, seed, band, scale, dropout)
    with _not_cast(query):
        *found, of_mask = blockwise.backward(grad, grad_sums, query, key, value, out, call, wants_mask)
    return found[0], found[1], found[2], query.new_empty(0) if of_mask is None else of_mask


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:3], value.shape[-1]))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty(query.shape[:3], dtype=dtype) if rest[-1] else query.new_empty(0)


@_attention_backward.register_fake
def _(grad: Tensor, grad_sums: Tensor | None, out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
      ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    additive, wants_mask = rest[6], rest[11]
    of_mask = torch.empty_like(additive) if wants_mask and additive is not None else query.new_empty(0)
    found = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)]
    return found[0], found[1], found[2], of_mask


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.band, ctx.scale, ctx.dropout, ctx.with_sums = inputs
    ctx.save_for_backward(*tensors, output[0])
    ctx.set_materialize_grads(False)


def _derive(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> tuple[Any, ...]:
    *tensors, out = ctx.saved_tensors
    nothing = (None,) * 15
    grad_sums = grad_sums if ctx.with_sums else None
    if grad is None and grad_sums is None:
        return nothing
    wants_mask = ctx.needs_input_grad[9]
    mine = torch.zeros_like(out) if grad is None else grad
    of_query, of_key, of_value, of_mask = _attention_backward(
        mine, grad_sums, out, *tensors, ctx.band, ctx.scale, ctx.dropout, wants_mask
    )
    return of_query, of_key, of_value, *nothing[3:9], of_mask if wants_mask else None, *nothing[10:]


_attention.register_autograd(_derive, setup_context=_setup)
