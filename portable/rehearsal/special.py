"""Operators that a device takes differently from the CPU, computed so that the CPU's numbers come out; and refused options."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from portable.rehearsal.device import Device
from portable.rehearsal.recorder import Recorder

_aten = torch.ops.aten
_FUSED = (
    "_fused_adamw_.default",
    "_fused_adamw_.tensor_lr",
    "_fused_adam_.default",
    "_fused_adam_.tensor_lr",
    "_fused_sgd_.default",
)


def install(device: Device) -> None:
    """Give the device these kernels."""
    device.override(_aten.record_stream.default, lambda operator, args, kwargs: None)  # its memory is not handed out early
    device.override(_aten.native_dropout.default, _dropout)
    device.override(_aten.native_dropout_backward.default, _dropout_backward)
    if device.profile.refusals.value.scaler_with_fused:
        for name in _FUSED:
            packet, _, overload = name.partition(".")
            device.override(getattr(getattr(_aten, packet), overload), partial(_fused_optimizer, device.recorder))


def _dropout(operator: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout as the CPU composes it (aten/src/ATen/native/Dropout.cpp): the mask is drawn in the input's dtype.

    The kernel for devices draws and scales in another order, and so differs in the last bit.
    """
    tensor, p, train = args
    if train is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    noise = torch.empty_like(tensor).bernoulli_(1 - p)
    mask = noise.bool()
    return tensor * noise.div_(1 - p), mask


def _dropout_backward(operator: Any, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    grad, mask, scale = args
    if not grad.is_floating_point():
        return operator(grad, mask, scale)
    kept = mask.to(grad.dtype)
    return grad * (kept.div_(1 / scale) if scale else kept.zero_())  # scale 0: everything was dropped


def _fused_optimizer(recorder: Recorder, operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("grad_scale") is not None or kwargs.get("found_inf") is not None:
        name = operator._schema.name
        recorder.refuse(
            name,
            RuntimeError(
                f"{name} was called with a gradient scaler (grad_scale, found_inf), which the device's fused optimizer "
                "refuses. Train in bfloat16 without a scaler, or create the optimizer with fused=False."
            ),
        )
    return operator(*args, **kwargs)
