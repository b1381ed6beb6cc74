"""The places where PyTorch reaches for C++ parts that a Python device cannot bring: replaced for this process.

- ``torch.accelerator``'s functions about memory, synchronisation and the current device act on the emulated device;
- storages: see `portable.rehearsal.storages`;
- ``is_pinned`` answers what the profile says.

They hold for the life of the process, as the device does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from portable.rehearsal import storages
from portable.rehearsal.device import Device

_MEMORY = (
    "empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
    "reset_accumulated_memory_stats", "reset_peak_memory_stats",
)  # fmt: skip


def install(device: Device, module: ModuleType) -> tuple[torch.library.Library, ...]:
    """Replace them; what must live on is answered."""
    _accelerator(device, module)
    storages.install(device)
    pinned = device.profile.pinned.value
    if pinned is None:
        return ()
    library = torch.library.Library("aten", "IMPL")
    library.impl("is_pinned", lambda tensor, device=None: pinned, "CPU", allow_override=True)
    return (library,)


def _accelerator(device: Device, module: ModuleType) -> None:
    accelerator = torch.accelerator
    functions: dict[str, Any] = {name: getattr(module, name) for name in _MEMORY if hasattr(module, name)}
    if hasattr(module, "synchronize"):
        functions["synchronize"] = module.synchronize
    functions["device_count"] = lambda: len(device.memory)
    functions["current_device_index"] = functions["current_device_idx"] = lambda: device.current

    def set_index(where: Any, /) -> None:
        index = getattr(where, "index", where)
        count = len(device.memory)
        if not isinstance(index, int) or not 0 <= index < count:
            raise RuntimeError(f"{device.kind} device {where!r} was asked for, but this process has {count}")
        device.current = index

    @contextlib.contextmanager
    def device_index(index: int | None, /) -> Iterator[None]:
        before = device.current
        if index is not None and index >= 0:
            set_index(index)
        try:
            yield
        finally:
            device.current = before

    def memory_info(where: Any = None, /) -> tuple[int, int]:
        memory = device.memory[device.current if where is None else getattr(where, "index", where) or 0]
        return memory.total - memory.used, memory.total

    functions |= {
        "set_device_index": set_index,
        "set_device_idx": set_index,
        "device_index": device_index,
        "get_memory_info": memory_info,
    }
    for name, function in functions.items():
        for home in (accelerator, getattr(accelerator, "memory", None)):
            if home is not None and hasattr(home, name):
                setattr(home, name, function)
