"""Random numbers on the emulated device.

The kernels draw from the CPU's default generator. Either that is the device's generator too (then a program draws the same
numbers as on the CPU), or the device has a state of its own, which is put in place around each operator that draws.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Randomness:
    """The random state of a device.

    Args:
        mode: "cpu": shared with the CPU; "own": one state per device, seeded with PyTorch's seed.
        count: number of devices.
    """

    def __init__(self, mode: str, count: int) -> None:
        self.shared = mode == "cpu"
        self._lock = threading.RLock()
        self._own = [torch.Generator().manual_seed(torch.initial_seed()) for _ in range(0 if self.shared else count)]

    def manual_seed(self, seed: int, index: int) -> None:
        """Seed one device."""
        with self._lock:
            # Not torch.manual_seed, which would call back for all devices.
            (torch.default_generator if self.shared else self._own[index]).manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        """Seed all devices."""
        if self.shared:
            self.manual_seed(seed, 0)
        for index in range(len(self._own)):
            self.manual_seed(seed, index)

    def initial_seed(self, index: int) -> int:
        """The seed last set."""
        return (torch.default_generator if self.shared else self._own[index]).initial_seed()

    def get_state(self, index: int) -> torch.Tensor:
        """State as a ByteTensor on the CPU. Its size is that of PyTorch's CPU generator, not that of the real device."""
        with self._lock:
            return (torch.default_generator if self.shared else self._own[index]).get_state()

    def set_state(self, state: torch.Tensor, index: int) -> None:
        """Restore what `get_state` answered."""
        with self._lock:
            (torch.default_generator if self.shared else self._own[index]).set_state(state)

    def draw(self, index: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that draws from the CPU's default generator, on the device's state."""
        with self._lock:
            outside = torch.default_generator.get_state()
            own = self._own[index]
            torch.default_generator.set_state(own.get_state())
            try:
                return function(*args, **kwargs)
            finally:
                own.set_state(torch.default_generator.get_state())
                torch.default_generator.set_state(outside)
