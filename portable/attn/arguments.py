"""The arguments of `pt.attention`: checked, and brought into one order."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from portable.attn.building import canonical
from portable.attn.masks import Mask
from portable.attn.path import Arguments
from portable.errors import ConfigurationError

Layout = Literal["bhsd", "bshd"]
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def prepared(
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
    """The arguments of `pt.attention`, checked, in the order (batch, heads, length, head_dim).

    Raises:
        ConfigurationError: they do not fit each other.
    """
    if layout not in ("bhsd", "bshd"):
        raise ConfigurationError(f"layout={layout!r} was asked for. Use 'bhsd' or 'bshd'.")
    _check_kinds(query, key, value)
    if layout == "bshd":
        query, key, value = (t.transpose(-2, -3) for t in (query, key, value))
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


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _check_kinds(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, given in (("query", query), ("key", key), ("value", value)):
        if not isinstance(given, Tensor):
            raise ConfigurationError(f"attention was given a {type(given).__name__} as {name}. Give a tensor.")
    if query.dim() not in (3, 4) or not query.dim() == key.dim() == value.dim():
        raise ConfigurationError(
            f"attention was given {_shapes(query, key, value)}. Give all three 4 dimensions (batch, heads, length, head_dim), "
            "or all three 3."
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


def _check(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, scale: float | None, enable_gqa: bool | None) -> None:
    shapes = _shapes(query, key, value)
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
    if not isinstance(dropout_p, (int, float, torch.SymFloat)) or not 0 <= dropout_p <= 1:
        raise ConfigurationError(f"attention was given dropout_p={dropout_p}. Give a rate from 0 to 1.")
    if scale is not None and (isinstance(scale, Tensor) or not math.isfinite(scale)):
        raise ConfigurationError(
            f"attention was given scale={scale}. Give a finite number, or None for 1 / sqrt(head_dim); multiply query by a "
            "factor that is a tensor."
        )
