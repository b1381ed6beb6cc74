"""Random number generators of the device.

A state taken on one backend cannot be set on another: CUDA's generator is Philox, the CPU's a Mersenne twister, and vendors
differ. For runs that must agree across devices draw on the CPU and move the result.
"""

from __future__ import annotations

import random as _python_random
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from operator import index

import torch

from portable.devices import DeviceLike, ordinal
from portable.selection import active, call


def manual_seed(seed: int) -> None:
    """Seed the current device's generator, as torch.cuda.manual_seed does. See `seed_everything` for the rest."""
    call("manual_seed")(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    call("manual_seed_all")(seed)


def seed_everything(seed: int) -> None:
    """Seed Python's generator, NumPy's if it has been imported, PyTorch's on the CPU and on all devices.

    Args:
        seed: 0 to 2**32 - 1 (NumPy's range).

    Raises:
        ValueError: outside that range.
        TypeError: not an integer.
    """
    seed = index(seed)  # NumPy's integers too; Python's own generator would take a float, and the others not
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed} was asked for; NumPy takes 0 to {2**32 - 1}. Choose a seed in that range.")
    _python_random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    call("manual_seed_all")(seed)


def seed() -> None:
    """Seed the current device's generator from entropy."""
    call("seed")()


def seed_all() -> None:
    """Seed the generators of all devices from entropy."""
    call("seed_all")()


def initial_seed() -> int:
    """The seed that the current device's generator started from."""
    return int(call("initial_seed")())


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """State of one device's generator, a ByteTensor on the CPU."""
    return call("get_rng_state")() if device is None else call("get_rng_state")(ordinal(device))


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices' generators."""
    return list(call("get_rng_state_all")())


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Restore the state of one device's generator."""
    if device is None:
        call("set_rng_state")(new_state)
    else:
        call("set_rng_state")(new_state, ordinal(device))


def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
    """Restore the states of all devices' generators."""
    call("set_rng_state_all")(new_states)


def fork_rng(devices: Iterable[DeviceLike] | None = None, enabled: bool = True) -> AbstractContextManager[None]:
    """Context manager: the CPU's and the devices' generators get their states back at the end of the block.

    Args:
        devices: devices whose generators are kept, all by default.
        enabled: False makes the block do nothing.

    Raises:
        DeviceIndexError, ConfigurationError: there is no such device.
    """
    kind = active().spec.device_type
    kept = list(range(call("device_count")())) if devices is None else [ordinal(device) for device in devices]
    if kind == "cpu":  # its generator is kept in any case
        return torch.random.fork_rng(devices=[], enabled=enabled)
    return torch.random.fork_rng(devices=kept, enabled=enabled, device_type=kind)
