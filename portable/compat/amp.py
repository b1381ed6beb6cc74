"""torch.autocast, GradScaler and custom_fwd/custom_bwd for device type "cuda"; functions of torch that name a device type."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode, grad_scaler

from portable import amp as ours
from portable.compat.patching import Patches, like
from portable.compat.target import SOURCE, Target
from portable.policy import precision_policy

# Functions of torch whose first argument is a device type; those with a default mean "cuda" by it.
_BY_TYPE = {
    "is_autocast_enabled": SOURCE,
    "set_autocast_enabled": SOURCE,
    "get_autocast_dtype": None,
    "set_autocast_dtype": None,
}
# Older spellings with the device type in the name.
_OLD = {"get_autocast_gpu_dtype": "get_autocast_dtype", "set_autocast_gpu_dtype": "set_autocast_dtype"}


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace constructors, not classes: isinstance, subclasses and Dynamo's recognition of torch.autocast go on working."""
    init = autocast_mode.autocast.__init__

    @functools.wraps(init)
    def autocast_init(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        here = target()
        if device_type == SOURCE:
            device_type, dtype, enabled = here.kind, *_settings(here, dtype, enabled)
        init(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    patches.set(autocast_mode.autocast, "__init__", autocast_init)

    scaler_init = grad_scaler.GradScaler.__init__

    @functools.wraps(scaler_init)
    def new_scaler_init(self: Any, device: str = SOURCE, *args: Any, **kwargs: Any) -> None:
        scaler_init(self, target().type(device, "torch.amp.GradScaler"), *args, **kwargs)

    patches.set(grad_scaler.GradScaler, "__init__", new_scaler_init)

    for name, default in _BY_TYPE.items():
        original = getattr(torch, name)
        patches.set(torch, name, like(original, _typed(original, default, target), "torch", name))
    for old, name in _OLD.items():
        patches.set(torch, old, like(getattr(torch, old), _untyped(getattr(torch, name), target), "torch", old))
    for owner in (torch.amp, autocast_mode):
        for name in ("custom_fwd", "custom_bwd"):
            patches.set(owner, name, _custom(getattr(owner, name), target))
    # torch.cuda.amp binds "cuda" into these when it is imported.
    for owner in (torch.cuda.amp, torch.cuda.amp.autocast_mode):
        patches.set(owner, "custom_fwd", ours.custom_fwd)
        patches.set(owner, "custom_bwd", ours.custom_bwd)


def _settings(here: Target, dtype: Any, enabled: bool) -> tuple[Any, bool]:
    """What autocast does on the target: the program's dtype where the target multiplies it, else the policy's, else nothing."""
    if not enabled:
        return torch.bfloat16, False
    policy = precision_policy(here.backend)
    generation = here.backend.generation()
    wanted = str(dtype or torch.float16).removeprefix("torch.")  # CUDA's default is float16
    if wanted not in ("float16", "bfloat16"):  # on CUDA autocast switches itself off then (torch/amp/autocast_mode.py)
        here.note("redirected", "torch.autocast", f"{wanted}: off, as on CUDA")
        return torch.bfloat16, False
    if generation is not None and wanted in generation.autocast:
        here.note("redirected", "torch.autocast", f"{here.kind}, {wanted}")
        return getattr(torch, wanted), True
    if policy.autocast is not None:
        here.note("changed", "torch.autocast", f"{wanted} became {policy.autocast}: {policy.reason}")
        return getattr(torch, policy.autocast), True
    here.note("changed", "torch.autocast", f"{wanted} became float32: {policy.reason}")
    return torch.bfloat16, False


def _typed(original: Any, default: str | None, target: Callable[[], Target]) -> Any:
    def typed(*args: Any, **kwargs: Any) -> Any:
        named = bool(args) and isinstance(args[0], str)
        if named and args[0] == SOURCE:
            args = (target().kind, *args[1:])
        elif default is not None and not named and "device_type" not in kwargs:
            args = (target().kind, *args)
        return original(*args, **kwargs)

    return typed


def _untyped(original: Any, target: Callable[[], Target]) -> Any:
    def untyped(*args: Any) -> Any:
        return original(target().kind, *args)

    return untyped


def _custom(original: Any, target: Callable[[], Target]) -> Any:
    @functools.wraps(original)
    def custom(*args: Any, device_type: str, **kwargs: Any) -> Any:
        return original(*args, device_type=target().type(device_type, f"torch.amp.{original.__name__}"), **kwargs)

    return custom
