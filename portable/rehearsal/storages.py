"""``torch.UntypedStorage`` on the emulated device. PyTorch asks the allocator in C++, which a Python device has not.

- ``UntypedStorage(size, device=...)`` and ``UntypedStorage.<device type>()`` make a storage (``torch.load``, ``clone``);
- ``resize_`` to 0 and back, by which FSDP frees and restores parameters, changes what counts as in use. The bytes themselves
  stay, since they belong to an exchanged tensor.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from portable.rehearsal.device import Device


class _Freed:
    """On a storage while its memory counts as free; takes the bytes again when it goes."""

    __slots__ = ("_freed", "_size")

    def __init__(self, size: int, freed: deque[int]) -> None:
        self._size = size
        self._freed = freed
        freed.append(size)

    def __del__(self) -> None:
        self._freed.append(-self._size)


def install(device: Device) -> None:
    """Replace the methods for the life of the process. Storages of other devices go to PyTorch's own."""
    kind = device.kind
    storages = torch.UntypedStorage
    create, resize, nbytes = storages.__new__, storages.resize_, storages.nbytes

    def new(cls: type[torch.UntypedStorage], *args: Any, device: Any = None, **kwargs: Any) -> torch.UntypedStorage:
        if device is not None and torch.device(device).type == kind:
            size = args[0] if args else kwargs.get("size", 0)
            return torch.empty(int(size), dtype=torch.uint8, device=device).untyped_storage()
        return create(cls, *args, **kwargs) if device is None else create(cls, *args, device=device, **kwargs)  # type: ignore[call-arg]

    def to_device(self: torch.UntypedStorage, where: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if self.device.type == kind:
            return self
        where = kwargs.get("device", where)
        if isinstance(where, int):
            where = torch.device(kind, where)
        return self.to(device=where or kind)

    def resized(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != kind:
            return resize(self, size)
        memory = device.memory[self.device.index or 0]
        whole = nbytes(self)
        if size == whole:
            if "_portable_freed" in self.__dict__:
                memory.check(whole)
                del self.__dict__["_portable_freed"]
                memory.transient(0)  # the peak
        elif size == 0:
            self.__dict__.setdefault("_portable_freed", _Freed(memory.round(whole), memory.freed))
        else:
            raise NotImplementedError(
                f"a storage of {whole} bytes on {kind} was to be resized to {size}; emulated devices resize storages to 0 and "
                "back to their whole size only. Use Tensor.resize_, or a new tensor."
            )
        return self

    def size_of(self: torch.UntypedStorage) -> int:
        return 0 if "_portable_freed" in self.__dict__ else nbytes(self)

    storages.__new__ = new  # type: ignore[method-assign, assignment]
    setattr(storages, kind, to_device)
    for name, method in {"resize_": resized, "nbytes": size_of, "size": size_of}.items():
        setattr(storages, name, method)
