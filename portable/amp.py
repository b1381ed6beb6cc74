"""Automatic mixed precision after the backend's policy (see `portable.policy`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from portable import selection
from portable.errors import ConfigurationError
from portable.policy import precision_policy
from portable.selection import active

_DTYPES = (torch.bfloat16, torch.float16)


def _settings(backend: str | None) -> tuple[str, str | None]:
    """Device type and the policy's autocast dtype.

    Dynamo cannot trace the choice of a backend or a vendor's device query, so it calls this while it traces. ``backend`` is
    only there for its guard: after `pt.use` of another backend a compiled function is traced anew.
    """
    kind, dtype = active().spec.device_type, precision_policy().autocast
    if dtype is None and not _has_autocast(kind):
        # torch.autocast refuses such a device even when it is to stay off; switched off for the CPU it does nothing either.
        return "cpu", None
    return kind, dtype


# All that torch.compiler.assume_constant_result does; calling it would load Dynamo, which takes seconds, for every program.
_settings._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _has_autocast(kind: str) -> bool:
    """Whether torch.autocast takes this device type (torch/amp/autocast_mode.py: what it asks of a PrivateUse1 module)."""
    if kind != torch._C._get_privateuse1_backend_name():
        return torch.amp.is_autocast_available(kind)
    return hasattr(getattr(torch, kind, None), "get_amp_supported_dtype")


def autocast(dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: bool | None = None) -> torch.autocast:
    """``torch.autocast`` for the active backend, as a context manager or decorator.

    Args:
        dtype: dtype of the matrix products; None for the policy's. Where the policy is float32, autocast stays off unless
            a dtype is given.
        enabled: False turns it off, whatever the policy says.
        cache_enabled: keep cast weights inside the block (PyTorch's default if None).

    Raises:
        ConfigurationError: a dtype that autocast has nowhere; PyTorch would warn and compute in float32.
    """
    if dtype is not None and enabled and dtype not in _DTYPES:
        raise ConfigurationError(
            f"pt.autocast was asked for {dtype}. It casts to torch.bfloat16 or torch.float16; leave the dtype out for the "
            "policy's, or give enabled=False for none."
        )
    kind, name = _settings(selection.active_name)
    if dtype is None:
        if name is None:
            # A dtype must be named even when off: some backends' default is one that they would warn about.
            return torch.autocast(kind, dtype=torch.bfloat16, enabled=False, cache_enabled=cache_enabled)
        dtype = getattr(torch, name)
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def GradScaler(enabled: bool | None = None, *, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """``torch.amp.GradScaler`` for the active backend; it passes everything through where no scaling is needed.

    Args:
        enabled: None for what the dtype needs; True or False decide by hand.
        dtype: what `autocast` was given, where that is not the policy's: float16 is scaled on every backend.
        kwargs: ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval`` as in PyTorch.
    """
    if enabled is None:
        enabled = precision_policy().scaler if dtype is None else dtype == torch.float16
    return active().grad_scaler(enabled, **kwargs)


def custom_fwd(fwd: Callable | None = None, *, cast_inputs: torch.dtype | None = None) -> Callable:
    """Decorator for ``forward`` of a torch.autograd.Function under autocast: torch.amp.custom_fwd for the active backend.

    The backend is looked up at each call, so that decorating (when a module is imported) does not choose one.
    """
    if fwd is None:
        return partial(custom_fwd, cast_inputs=cast_inputs)
    return _for_active(fwd, partial(torch.amp.custom_fwd, cast_inputs=cast_inputs))


def custom_bwd(bwd: Callable | None = None) -> Callable:
    """Decorator for ``backward`` of a torch.autograd.Function under autocast: torch.amp.custom_bwd for the active backend."""
    return custom_bwd if bwd is None else _for_active(bwd, torch.amp.custom_bwd)


def _for_active(function: Callable, decorate: Callable[..., Callable]) -> Callable:
    decorated: dict[str, Callable] = {}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kind = active().spec.device_type
        if kind not in decorated:
            decorated[kind] = decorate(function, device_type=kind)
        return decorated[kind](*args, **kwargs)

    return call
