"""Automatic mixed precision after the backend's policy (see `portable.policy`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from portable.policy import precision_policy
from portable.selection import active


def autocast(dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None) -> torch.autocast:
    """``torch.autocast`` for the active backend, as a context manager or decorator.

    Args:
        dtype: dtype of the matrix products; None for the policy's. Where the policy is float32, autocast stays off unless
            a dtype is given.
        enabled: False turns it off, whatever the policy says.
        cache_enabled: keep cast weights inside the block (PyTorch's default if None).
    """
    kind = active().spec.device_type
    if dtype is None:
        name = precision_policy().autocast
        if name is None:
            # A dtype must be named even when off: some backends' default is one that they would warn about.
            return torch.autocast(kind, dtype=torch.bfloat16, enabled=False, cache_enabled=cache_enabled)
        dtype = getattr(torch, name)
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def GradScaler(enabled: bool | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """``torch.amp.GradScaler`` for the active backend; it passes everything through where the policy needs no scaling.

    Args:
        enabled: None for the policy's answer; True for float16 that was chosen by hand.
        kwargs: ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval`` as in PyTorch.
    """
    return torch.amp.GradScaler(
        active().spec.device_type, enabled=precision_policy().scaler if enabled is None else enabled, **kwargs
    )


def custom_fwd(fwd: Callable | None = None, *, cast_inputs: torch.dtype | None = None) -> Callable:
    """Decorator for ``forward`` of a torch.autograd.Function under autocast; torch.amp.custom_fwd for the active backend."""
    kind = active().spec.device_type
    if fwd is None:
        return torch.amp.custom_fwd(device_type=kind, cast_inputs=cast_inputs)
    return torch.amp.custom_fwd(fwd, device_type=kind, cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable | None = None) -> Callable:
    """Decorator for ``backward`` of a torch.autograd.Function under autocast; torch.amp.custom_bwd for the active backend."""
    kind = active().spec.device_type
    return torch.amp.custom_bwd(device_type=kind) if bwd is None else torch.amp.custom_bwd(bwd, device_type=kind)
