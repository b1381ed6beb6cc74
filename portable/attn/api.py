"""`pt.attention`: the call, its checks, and the way from tensors to a request."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from portable import plugins
from portable.attn.canonical import Canonical, canonical
from portable.attn.masks import Mask
from portable.attn.path import Answer, Arguments, Fit
from portable.attn.policy import note_math
from portable.attn.request import MaskTraits, Request
from portable.attn.select import choose
from portable.backend import Backend
from portable.errors import ConfigurationError
from portable.selection import active

Layout = Literal["bhsd", "bshd"]
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bhsd",
    enable_gqa: bool | None = None,
    path: str | None = None,
    return_lse: bool = False,
) -> Any:
    """Scaled dot-product attention on the fastest correct path of the device.

    Args:
        query: (B, H, Lq, D), or (B, Lq, H, D) with layout "bshd"; without B, three dimensions.
        key: (B, Hk, Lk, D) in the same layout, H a multiple of Hk.
        value: (B, Hk, Lk, Dv).
        mask: a specification (`pt.Causal` ...), a boolean tensor (True: attend), a float tensor (added to the scores), or None.
            Rows that see no key give zeros and zero gradients, on every path.
        dropout_p: rate of dropout on the weights; pass 0 outside training.
        scale: factor of the scores, 1 / sqrt(D) by default.
        layout: order of the dimensions.
        enable_gqa: False refuses fewer key heads than query heads; None and True allow it.
        path: name of the path to take (see `pt.explain_attention`); chosen if left out.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        (B, H, Lq, Dv) in the layout of the query; with return_lse a pair with (B, H, Lq), float32 or float64.

    Raises:
        ConfigurationError: arguments that do not fit each other; the path asked for cannot serve the call.
    """
    dims = query.dim()
    arguments = _arguments(query, key, value, mask, dropout_p, scale, layout, enable_gqa, return_lse)
    fit = _fit(arguments, dims, path)
    if not fit.path.fused and path is None:
        note_math(fit)
    out, sums = fit.run(arguments)
    if dims == 3:
        out, sums = out.squeeze(0), None if sums is None else sums.squeeze(0)
    if layout == "bshd":
        out = out.transpose(-2, -3)
    return (out, sums) if return_lse else out


def request_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bhsd",
    enable_gqa: bool | None = None,
    path: str | None = None,
    return_lse: bool = False,
) -> tuple[Request, Backend]:
    """The request that a call of `attention` makes, and the backend that serves it."""
    arguments = _arguments(query, key, value, mask, dropout_p, scale, layout, enable_gqa, return_lse)
    backend = _backend_of(query.device)
    return _request(arguments, query.dim(), _generation(backend, query.device)), backend


# -- from tensors to a request -------------------------------------------------------------------------------------------------


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    dropout_p: float,
    scale: float | None,
    layout: Layout,
    enable_gqa: bool | None,
    return_lse: bool,
) -> Arguments:
    """The arguments, checked, in the order (batch, heads, length, head_dim)."""
    if layout == "bshd":
        query, key, value = (t.transpose(-2, -3) for t in (query, key, value))
    elif layout != "bhsd":
        raise ConfigurationError(f"layout={layout!r} was asked for. Use 'bhsd' or 'bshd'.")
    _check(query, key, value, dropout_p, scale, enable_gqa)
    if query.dim() == 3:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    rule = canonical(mask, query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    factor = 1 / math.sqrt(query.shape[-1] or 1) if scale is None else float(scale)
    for tensor in (rule.dense, rule.additive):
        if tensor is not None and tensor.device != query.device:
            raise ConfigurationError(
                f"attention was given a mask on {tensor.device} and tensors on {query.device}. Move it with .to(query.device)."
            )
    return Arguments(query, key, value, rule.to(query.device), dropout_p, factor, return_lse)


def _check(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None, enable_gqa: bool | None) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.dim() not in (3, 4) or not query.dim() == key.dim() == value.dim():
        raise ConfigurationError(
            f"attention was given {shapes}. Give all three 4 dimensions (batch, heads, length, head_dim), or all three 3."
        )
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _DTYPES:
        names = ", ".join(str(t.dtype)[6:] for t in (query, key, value))
        raise ConfigurationError(
            f"attention was given dtypes {names}. Give one of float64, float32, float16 and bfloat16, the same for all three."
        )
    if not query.device == key.device == value.device:
        raise ConfigurationError(
            f"attention was given tensors on {query.device}, {key.device} and {value.device}. Move them to one device."
        )
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2] or key.shape[:-2] != value.shape[:-2]:
        raise ConfigurationError(
            f"attention was given {shapes}. Query and key need one head_dim, key and value one length, and one number of heads."
        )
    if query.dim() == 4 and query.shape[0] != key.shape[0]:
        raise ConfigurationError(f"attention was given {shapes}. Give one batch size.")
    heads, key_heads = query.shape[-3], key.shape[-3]
    if heads != key_heads and (not key_heads or heads % key_heads or enable_gqa is False):
        raise ConfigurationError(
            f"attention was given {heads} query heads and {key_heads} key heads"
            + (" with enable_gqa=False" if enable_gqa is False else "")
            + ". Give as many, or a multiple of the key heads."
        )
    if not 0 <= dropout_p <= 1:
        raise ConfigurationError(f"attention was given dropout_p={dropout_p}. Give a rate from 0 to 1.")
    if scale is not None and not math.isfinite(scale):
        raise ConfigurationError(f"attention was given scale={scale}. Give a finite number, or None for 1 / sqrt(head_dim).")


def traits(mask: Canonical, grad: bool = False) -> MaskTraits:
    """What a path may ask of a mask."""
    bias = mask.slopes is not None or mask.additive is not None
    shift = mask.keys - mask.queries
    window = (mask.low, mask.high) if mask.only_band and mask.banded else None
    return MaskTraits(
        mask.kind,
        mask.trivial,
        mask.causal,
        mask.only_band and mask.high == shift and mask.low <= 1 - mask.queries,
        mask.only_band,
        window,
        not bias,
        bias,
        mask.additive is not None and mask.additive.requires_grad and grad,
        (mask.dense is not None or mask.additive is not None)
        and sum(t is not None for t in mask.tensors) == 1
        and not mask.banded,
        all(t is None or t.dim() < 3 or t.shape[-3] == 1 for t in (mask.dense, mask.additive)) and mask.slopes is None,
        _may_be_empty(mask),
    )


def _may_be_empty(mask: Canonical) -> bool:
    if mask.only_band:
        return mask.high < 0 or mask.queries - 1 + mask.low >= mask.keys or mask.low > mask.high
    return True


def _request(a: Arguments, dims: int, generation: str) -> Request:
    query, key, value = a.query, a.key, a.value
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    learned = torch.is_grad_enabled() and a.mask.additive is not None and a.mask.additive.requires_grad
    return Request(
        query.device.type,
        query.shape[2],
        key.shape[2],
        query.shape[3],
        value.shape[3],
        str(query.dtype)[6:],
        query.shape[0],
        query.shape[1],
        key.shape[1],
        generation,
        dims,
        traits(a.mask, learned),
        a.dropout,
        grad or learned,
        all(t.stride(-1) == 1 for t in (query, key, value)),
        torch.are_deterministic_algorithms_enabled(),
        a.lse,
        torch.compiler.is_compiling(),
    )


def _backend_of(device: torch.device) -> Backend:
    chosen = active()
    if chosen.spec.device_type == device.type:
        return chosen
    for backend in plugins.registry().backends.values():
        if backend.spec.device_type == device.type and backend.spec.name != "generic":
            return backend
    raise ConfigurationError(f"attention was given tensors on {device}, a device that no backend here has.")


def _fit(a: Arguments, dims: int, path: str | None) -> Fit:
    backend = _backend_of(a.query.device)
    return choose(_request(a, dims, _generation(backend, a.query.device)), backend, path)


def _generation(backend: Backend, device: torch.device) -> str:
    key = (backend.spec.name, device.index or 0)
    if key not in _generations:
        found = backend.generation(device.index or 0)
        _generations[key] = found.name if found else ""
    return _generations[key]


_generations: dict[tuple[str, int], str] = {}


__all__ = ["Answer", "attention", "traits"]
