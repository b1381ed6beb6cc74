"""LSTM, GRU and RNN layers on the emulated device: the CPU's own operator, so that its numbers come out.

PyTorch takes the layers apart differently for a device from outside (aten/src/ATen/native/RNN.cpp: `_thnn_fused_lstm_cell`,
which has no CPU kernel) and for the CPU (one oneDNN kernel, or other matrix products). Here the layer's inputs are handed to
the CPU inside autograd: the graph goes on over CPU tensors that share the device's memory, and comes back at the end, so first
and higher derivatives are the CPU's too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from portable.rehearsal.device import Device
from portable.rehearsal.kernels import base_name
from portable.rehearsal.schemas import overload

LAYERS = tuple(f"{kind}.{form}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data"))
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
# What PyTorch calls on the device for each step of a layer, where it has no kernel for the layer.
_FUSED_CELLS = {"lstm": "aten::_thnn_fused_lstm_cell", "gru": "aten::_thnn_fused_gru_cell"}


class _Lower(torch.autograd.Function):
    """A device tensor as the CPU tensor over its memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: Device) -> torch.Tensor:
        ctx.device, ctx.index = device, tensor.device.index
        return device.host(tensor.detach())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Raise.apply(grad, ctx.device, ctx.index), None


class _Raise(torch.autograd.Function):
    """A CPU tensor as a tensor of the device over its memory."""

    @staticmethod
    def forward(ctx: Any, host: torch.Tensor, device: Device, index: int) -> torch.Tensor:
        ctx.device = device
        return device.put(host.detach(), index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Lower.apply(grad, ctx.device), None, None


def register(device: Device, more: tuple[str, ...] = ()) -> torch.library.Library:
    """Give PyTorch the layers, and more operators that the CPU takes apart; they last as long as the library answered."""
    library = torch.library.Library("aten", "IMPL")
    for name in LAYERS + CELLS + more:
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl(name, partial(_layer, device, overload(name)), key, allow_override=True)
    return library


def _layer(device: Device, operator: Any, *args: Any, **kwargs: Any) -> Any:
    index = -1

    def lower(value: Any) -> Any:
        nonlocal index
        if isinstance(value, torch.Tensor) and value.device.type == device.kind:
            index = value.device.index
            return _Lower.apply(value, device)
        return type(value)(map(lower, value)) if isinstance(value, (list, tuple)) else value

    low, low_kwargs = [lower(value) for value in args], {name: lower(value) for name, value in kwargs.items()}
    if device.random.shared:
        answer = operator(*low, **low_kwargs)
    else:  # dropout between the layers
        answer = device.random.draw(index, operator, low, low_kwargs)

    def lift(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _Raise.apply(value, device, index)
        return type(value)(map(lift, value)) if isinstance(value, (list, tuple)) else value

    out = lift(answer)
    device.observer.observe(operator, args, kwargs, out)
    kind = base_name(operator).removesuffix("_cell")
    if kind in _FUSED_CELLS and not device.recorder.paused and device.observer.plan(operator).fallback:
        device.recorder.finding(
            "may fail",
            operator._schema.name,
            f"without a kernel for the layer PyTorch calls {_FUSED_CELLS[kind]} there, which the CPU has no kernel for either: "
            "the fallback may raise. Compile the model, or write the cell with matmul, sigmoid and tanh",
        )
    return out
