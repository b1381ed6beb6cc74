"""``torch.<device type>`` of the emulated device: exactly the names that the profile lists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from portable.rehearsal.device import Device
from portable.rehearsal.generator import Randomness
from portable.rehearsal.queues import classes


class Functions:
    """Implementations of the names that profiles list. Streams are one queue: work is done when a call returns."""

    def __init__(self, device: Device, randomness: Randomness) -> None:
        self._device = device
        self._random = randomness
        self._stream: Any = None
        self.Stream, self.Event = classes(device.kind, self._index)

    def _index(self, device: Any) -> int:
        """Ordinal of a device argument; None is the current device."""
        if device is None:
            return self._device.current
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != self._device.kind:
                raise ValueError(f"a device of type {self._device.kind!r} is needed, but {device} was passed")
            device = self._device.current if device.index is None else device.index
        count = len(self._device.memory)
        if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < count:
            raise RuntimeError(
                f"{self._device.kind} device {device!r} was asked for, but this process has {count}: pass 0"
                + (f" to {count - 1}" if count > 1 else "")
            )
        return device

    def is_available(self) -> bool:
        return bool(self._device.memory)

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        return None

    def device_count(self) -> int:
        return len(self._device.memory)

    def current_device(self) -> int:
        return self._device.current

    def set_device(self, device: Any) -> None:
        self._device.current = self._index(device)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self._device.current
        if not (isinstance(device, int) and device < 0):
            self.set_device(device)
        try:
            yield
        finally:
            self._device.current = before

    def get_device_name(self, device: Any = None) -> str:
        return f"{self._device.kind}:{self._index(device)}"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        index = self._index(device)
        return SimpleNamespace(name=self._device.profile.family.value, total_memory=self._device.memory[index].total)

    def synchronize(self, device: Any = None) -> None:
        self._index(device)
        if not self._device.recorder.paused:
            self._device.recorder.sync("synchronize")

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return torch.bfloat16 in self._device.profile.autocast_dtypes.value

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return list(self._device.profile.autocast_dtypes.value)

    # Streams and events, on a device that runs everything in order.

    def current_stream(self, device: Any = None) -> torch.Stream:
        return self._stream or self.default_stream(device)

    def default_stream(self, device: Any = None) -> torch.Stream:
        return self.Stream(device)

    def set_stream(self, stream: Any) -> None:
        if stream is not None:
            self._stream = stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self._stream
        self.set_stream(stream)
        try:
            yield
        finally:
            self._stream = before

    def wait_stream(self, stream: Any) -> None:
        return None

    def wait_event(self, event: Any) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        return event or self.Event()

    def query(self) -> bool:
        return True

    # Memory.

    def memory_allocated(self, device: Any = None) -> int:
        return self._device.memory[self._index(device)].used

    def max_memory_allocated(self, device: Any = None) -> int:
        return self._device.memory[self._index(device)].peak

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        memory = self._device.memory[self._index(device)]
        return {
            f"{kind}_bytes.all.{name}": value
            for kind in ("allocated", "reserved", "active")
            for name, value in (("current", memory.used), ("peak", memory.peak))
        } | {"num_allocations": memory.allocations}

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        rows = self.memory_stats(device)
        return "\n".join(f"{name:<28}{value:>20,}" for name, value in sorted(rows.items()))

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._device.memory[self._index(device)].reset_peak()

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        self._device.memory[self._index(device)].allocations = 0

    def empty_cache(self) -> None:
        return None

    # Random numbers.

    def manual_seed(self, seed: int) -> None:
        self._random.manual_seed(seed, self._device.current)

    def manual_seed_all(self, seed: int) -> None:
        self._random.manual_seed_all(seed)

    def seed(self) -> None:
        self._random.manual_seed(torch.Generator().seed(), self._device.current)

    def seed_all(self) -> None:
        self._random.manual_seed_all(torch.Generator().seed())

    def initial_seed(self) -> int:
        return self._random.initial_seed(self._device.current)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return self._random.get_state(self._index(device))

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        self._random.set_state(new_state, self._index(device))

    # torch.compile.

    def get_dynamo_metrics(self) -> dict[str, Any]:
        graphs = self._device.recorder.graphs
        return {"graphs": sum(n for n, _ in graphs.values()), "recompilations": sum(n for _, n in graphs.values())}

    def reset_dynamo_metrics(self) -> None:
        self._device.recorder.graphs.clear()

    def _is_in_bad_fork(self) -> bool:
        return False


def module(device: Device, randomness: Randomness) -> ModuleType:
    """The module for a device.

    Raises:
        NotImplementedError: the profile lists a name that the emulated device does not implement.
    """
    functions = Functions(device, randomness)
    made = ModuleType(f"torch.{device.kind}", f"Emulated: {device.profile.title}. Nothing it says was measured on hardware.")
    missing = [name for name in device.profile.surface.value if not hasattr(functions, name)]
    if missing:
        raise NotImplementedError(f"the profile of {device.profile.title} lists {missing}, which the emulated device has not")
    for name in device.profile.surface.value:
        setattr(made, name, getattr(functions, name))
    return made
