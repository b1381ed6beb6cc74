"""Operators that make, size or copy the memory of an emulated device's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from portable.rehearsal.device import Device

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten = torch.ops.aten


class Allocation:
    """They go before the operators of `Device.run`: their ``device=`` decides where the answer lies."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def _index(self, where: torch.device | None) -> int:
        """Ordinal of the device that a factory function names."""
        device = self._device
        index = device.current if where is None or where.index is None else where.index
        count = len(device.memory)
        if not 0 <= index < count:
            raise RuntimeError(
                f"{device.kind}:{index} was asked for, but this process has {count} {device.kind} device{'s' * (count > 1)}. "
                f"Use {device.kind}:0."
            )
        return int(index)

    def empty(self, operator: Any, size: Sequence[int], *args: Any, **kwargs: Any) -> torch.Tensor:
        """``empty`` and ``empty_strided``."""
        device = self._device
        index = self._index(kwargs.pop("device", None))
        kwargs.pop("pin_memory", None)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        device.memory[index].check(torch.Size(size).numel() * dtype.itemsize)  # before the host's memory is taken
        out = device.put(operator(size, *args, **kwargs), index)
        if not device.recorder.paused:
            device.recorder.op(operator._schema.name)
        return out

    def zeros(self, size: Sequence[int], *, dtype: Any = None, device: Any = None, **kwargs: Any) -> torch.Tensor:
        """``_efficientzerotensor``, with memory: a tensor without any cannot be exchanged."""
        return torch.zeros(size, dtype=dtype, device=device)

    def resize(self, tensor: torch.Tensor, size: Sequence[int], memory_format: Any = None, **kwargs: Any) -> torch.Tensor:
        """``resize_``: new memory where the old is too small, which memory of an exchanged tensor does not allow by itself."""
        device = self._device
        needed = torch.Size(size).numel() * tensor.element_size()
        if needed > tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size():
            grown = torch.empty(size, dtype=tensor.dtype)
            old = device.host(tensor.detach()).flatten()
            grown.flatten()[: old.numel()].copy_(old[: grown.numel()])
            if memory_format not in (None, torch.preserve_format):
                grown = grown.contiguous(memory_format=memory_format)
            _aten.set_.source_Tensor.redispatch(_CPU_KEYS, tensor, device.put(grown, tensor.device.index))
            return tensor
        return _aten.resize_.default.redispatch(_CPU_KEYS, tensor, size, memory_format=memory_format)

    def to_copy(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """``_to_copy``: ``Tensor.to`` between devices and dtypes."""
        device = self._device
        target = kwargs.pop("device", None)
        kwargs.pop("non_blocking", None)
        kwargs.pop("pin_memory", None)
        operator = _aten._to_copy.default
        leaves = target is not None and target.type == "cpu"
        if leaves:
            out = operator(device.host(tensor), **kwargs)
        else:
            index = tensor.device.index if target is None else self._index(target)
            device.memory[index].check(tensor.numel() * (kwargs.get("dtype") or tensor.dtype).itemsize)
            out = device.put(operator(device.host(tensor), **kwargs), index)
        device.observer.observe(operator, (tensor,), kwargs, out)
        return out
