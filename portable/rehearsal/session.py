"""Starting the emulated device of a process. A process can have one, for its whole life: PyTorch has one PrivateUse1 slot."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration

from portable.errors import ConfigurationError
from portable.rehearsal import autocast, compiler, distributed, special, standins
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


class Rehearsal:
    """The emulated device of this process.

    Attributes:
        profile: its rules.
        device: the device itself.
        module: ``torch.<device type>``.
        recorder: what happened on it.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.device = Device(profile)
        self.module: ModuleType = module(self.device, self.device.random)
        backend_registration._setup_privateuseone_for_python_backend(
            profile.device_type, backend_module=self.module, device_guard=_Guard()
        )
        self._libraries = (
            *self.device.register(),
            Attention(self.device).register(),
            *autocast.register(profile.device_type),
            *standins.install(self.device, self.module),
        )
        special.install(self.device)
        compiler.register(self.device)
        distributed.register(self.device)

    @property
    def recorder(self) -> Recorder:
        return self.device.recorder


def current() -> Rehearsal | None:
    """The emulated device of this process, None if there is none."""
    return _current


def start(profile: Profile) -> Rehearsal:
    """Give this process the device of a profile.

    A second call with an equal profile answers the device that is there. There is no way back within the process.

    Raises:
        ConfigurationError: the process has another PrivateUse1 device already.
    """
    global _current
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
        _current = Rehearsal(profile)
        return _current
