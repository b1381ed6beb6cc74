"""Starting the emulated device of a process. A process can have one, for its whole life: PyTorch has one PrivateUse1 slot."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import backend_registration

from portable.errors import ConfigurationError
from portable.rehearsal import autocast, compiler, distributed, recurrent, registration, special, standins
from portable.rehearsal.attention import Attention
from portable.rehearsal.device import Device
from portable.rehearsal.module import module
from portable.rehearsal.profile import Profile
from portable.rehearsal.recorder import Recorder

_lock = threading.Lock()
_current: Rehearsal | None = None


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Rehearsal:
    """The devices of this process that are not hardware.

    Attributes:
        profile: their rules.
        device: what runs their operators.
        module: ``torch.<device type>``.
        execution: "emulated", or "vendor-package-on-host" where the vendor's own package runs.
        libraries: PyTorch forgets the kernels when these are collected.
    """

    profile: Profile
    device: Device
    module: Any
    execution: Literal["emulated", "vendor-package-on-host"]
    libraries: tuple[torch.library.Library, ...]

    def keep_going(self, lenient: bool = True) -> None:
        """Record what the real device would refuse as findings "refused", and compute it anyway (`Device.lenient`).

        One rehearsal then shows every line that would fail. Off when the device starts.
        """
        self.device.lenient = lenient

    @property
    def recorder(self) -> Recorder:
        """What happened on them."""
        return self.device.recorder


def _emulated(profile: Profile) -> Rehearsal:
    device = Device(profile)
    made = module(device, device.random)
    backend_registration._setup_privateuseone_for_python_backend(
        profile.device_type, backend_module=made, device_guard=_Guard()
    )
    libraries = (
        *registration.register(device),
        Attention(device).register(),
        recurrent.register(device),
        *autocast.register(profile.device_type),
        *standins.install(device, made),
    )
    special.install(device)
    compiler.register(device)
    distributed.register(device)
    return Rehearsal(profile, device, made, "emulated", libraries)


def adopt(rehearsal: Rehearsal) -> None:
    """Let `current` answer devices that a backend has made in its own way."""
    global _current
    _current = rehearsal


def current() -> Rehearsal | None:
    """The emulated device of this process, None if there is none."""
    return _current


def start(profile: Profile) -> Rehearsal:
    """Give this process the device of a profile.

    A second call with an equal profile answers the device that is there. There is no way back within the process.

    Raises:
        ConfigurationError: the process has another PrivateUse1 device already, or the profile has several devices.
    """
    global _current
    count = profile.device_count.value
    if count != 1:
        raise ConfigurationError(
            f"{count} emulated {profile.device_type} devices were asked for in one process, which can have one: PyTorch's "
            "autograd engine gives a device written in Python one queue. Start one process for each (torchrun --nproc-per-node "
            f"{max(count, 1)} ...)."
        )
    with _lock:
        if _current is not None:
            if _current.profile == profile:
                return _current
            raise ConfigurationError(
                f"an emulated {profile.device_type} device ({profile.title}) was asked for, but this process emulates "
                f"{_current.profile.title} already, and PyTorch has one slot for devices from outside. "
                "Use one emulated device per process."
            )
        taken = torch._C._get_privateuse1_backend_name()
        if taken != "privateuseone" or hasattr(torch, taken):
            raise ConfigurationError(
                f"an emulated {profile.device_type} device was asked for, but this process has the device {taken!r} already "
                "(a vendor's package or another emulated device), and PyTorch has one slot for devices from outside. "
                "Start a new process without it (TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps installed packages from loading)."
            )
        _current = _emulated(profile)
        return _current
