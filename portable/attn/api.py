"""`pt.attention`: the call, and the plan of each kind of call, kept so that the next one starts at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from portable.attn.arguments import Layout, prepared
from portable.attn.building import canonical
from portable.attn.canonical import Canonical
from portable.attn.describe import backend_of, request_for
from portable.attn.masks import Mask
from portable.attn.path import Arguments, Fit
from portable.attn.policy import note_math
from portable.attn.request import Request
from portable.attn.select import choose
from portable.backend import Backend
from portable.selection import active


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
    rest = (dropout_p, scale, layout, enable_gqa, path, return_lse)
    traced = torch.compiler.is_compiling()
    if (traced or torch._C._is_any_autocast_enabled()) and torch.is_autocast_enabled(query.device.type):
        query, key, value = _cast(query, key, value)
        with torch.autocast(query.device.type, enabled=False):  # what runs inside is not cast again
            return _answer(*_planned(query, key, value, mask, *rest), layout)
    if traced:
        return _answer(*_planned(query, key, value, mask, *rest), layout)
    try:
        kind, form = _kind(query, key, value, mask, rest)
        plan = _plans.get(kind)
    except (TypeError, AttributeError):  # arguments of kinds that cannot even be looked up: the checks say which
        return _answer(*_planned(query, key, value, mask, *rest), layout)
    if plan is None:
        plan, arguments = _planned(query, key, value, mask, *rest)
        _remember(plan, arguments, kind, form is not None)
        return _answer(plan, arguments, layout)
    if layout == "bshd":
        query, key, value = query.transpose(-2, -3), key.transpose(-2, -3), value.transpose(-2, -3)
    if plan.flat:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    rule = form or plan.form
    assert rule is not None
    return _answer(plan, Arguments(query, key, value, rule, dropout_p, plan.scale, return_lse), layout)


@dataclass(frozen=True)
class _Plan:
    """What is done for calls of one kind: how they are served, and what need not be computed again.

    Attributes:
        fit: the path, and what is changed before.
        form: the mask, None where it holds tensors of the call.
        scale: factor of the scores.
        flat: the inputs have three dimensions.
        warn: it is the math path, and was not asked for.
    """

    fit: Fit
    form: Canonical | None
    scale: float
    flat: bool
    warn: bool


_PLANS = 4096
_plans: dict[tuple[Any, ...], _Plan] = {}
_sizes: dict[tuple[Any, ...], tuple[int, int, int, int]] = {}  # of shapes that were found to fit each other


def _planned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    dropout_p: float,
    scale: float | None,
    layout: Layout,
    enable_gqa: bool | None,
    path: str | None,
    return_lse: bool,
) -> tuple[_Plan, Arguments]:
    """Check, choose, and say what is to be done."""
    arguments = prepared(query, key, value, mask, dropout_p, scale, layout, enable_gqa, return_lse)
    backend = backend_of(query.device)
    fit = choose(request_for(arguments, query.dim(), backend), backend, path)
    return _Plan(fit, arguments.mask, arguments.scale, query.dim() == 3, not fit.path.fused and path is None), arguments


_NO_TOKEN = object()


def _kind(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, rest: tuple[Any, ...]
) -> tuple[tuple[Any, ...], Canonical | None]:
    """All that a plan depends on, and the canonical mask if it holds tensors of this call."""
    sizes = (query.shape, key.shape, value.shape, rest[2])
    token = form = None
    if mask is not None and (token := getattr(mask, "token", None)) is None:
        if sizes in _sizes:
            form = canonical(mask, *_sizes[sizes]).to(query.device)
            token = form.signature
        else:
            token = _NO_TOKEN  # no plan has it
    grad = torch.is_grad_enabled()
    kind = (
        sizes, token, query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
        query.stride(-1) == 1 and key.stride(-1) == 1 and value.stride(-1) == 1,
        grad, grad and (query.requires_grad or key.requires_grad or value.requires_grad),
        rest, torch.are_deterministic_algorithms_enabled(), active(), _switches(),
    )  # fmt: skip
    return kind, form


def _remember(plan: _Plan, a: Arguments, kind: tuple[Any, ...], own_mask: bool) -> None:
    """Keep a plan, without its mask if each call brings its own."""
    if len(_plans) >= _PLANS or len(_sizes) >= _PLANS:  # shapes that change at every call, such as those of a growing cache
        forget()
    _sizes[kind[0]] = (a.query.shape[0], a.query.shape[1], a.query.shape[2], a.key.shape[2])
    if kind[1] is not _NO_TOKEN:
        _plans[kind] = replace(plan, form=None) if own_mask else plan


def forget() -> None:
    """Plan anew from now on."""
    _plans.clear()
    _sizes.clear()


def _switches() -> tuple[bool, bool, bool]:
    """PyTorch's switches of its kernels, which ``torch.nn.attention.sdpa_kernel`` sets."""
    return torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled(), torch._C._get_cudnn_sdp_enabled()


def _cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs as autocast gives them to PyTorch's function: in its dtype, except those in float64."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 and t.device.type == device else t
        for t in (query, key, value)
    )
    return query, key, value


def _answer(plan: _Plan, arguments: Arguments, layout: str) -> Any:
    if plan.warn:
        note_math(plan.fit)
    out, sums = plan.fit.run(arguments)
    if plan.flat:
        out, sums = out.squeeze(0), None if sums is None else sums.squeeze(0)
    if layout == "bshd":
        out = out.transpose(-2, -3)
    return (out, sums) if arguments.lse else out


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
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = _cast(query, key, value)
    arguments = prepared(query, key, value, mask, dropout_p, scale, layout, enable_gqa, return_lse)
    backend = backend_of(query.device)
    return request_for(arguments, query.dim(), backend), backend
