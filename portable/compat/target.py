"""Which device a CUDA device becomes."""

from __future__ import annotations

import os
from typing import Any

import torch

from portable.backend import Backend
from portable.compat.report import Kind, Recorder
from portable.errors import DeviceIndexError

SOURCE = "cuda"


class Target:
    """The backend that CUDA devices are translated to, and the record of it.

    Attributes:
        backend: the backend.
        kind: its PyTorch device type.
        recorder: what was redirected.
        is_cpu: whether that is the CPU.
        pins: whether host memory is pinned for it.
    """

    def __init__(self, backend: Backend, recorder: Recorder) -> None:
        self.backend = backend
        self.kind = backend.spec.device_type
        self.recorder = recorder
        self.is_cpu = self.kind == "cpu"
        self.pins = backend.spec.pin_memory.value
        # Making a torch.device and its name takes longer than the rest, and a program uses few.
        self._known: dict[Any, torch.device | None] = {}
        self._details: dict[torch.device, str] = {}

    def note(self, kind: Kind, construct: str, detail: str) -> None:
        """Record one use; nothing while Dynamo traces, which must see plain Python only."""
        if not torch.compiler.is_dynamo_compiling():
            self.recorder.note(kind, construct, detail)

    def is_source(self, device: Any) -> bool:
        """Whether a value means a CUDA device: "cuda", "cuda:N" or a torch.device of that type, and nothing else."""
        if isinstance(device, str):
            return device == SOURCE or (device.startswith(SOURCE + ":") and device[5:].isdigit())
        return isinstance(device, torch.device) and device.type == SOURCE

    def device(self, device: Any, construct: str) -> Any:
        """Translate what stands in a device position; whatever is no CUDA device comes back unchanged.

        Args:
            device: a string, torch.device, ordinal (``.to(0)`` means ``cuda:0``) or anything else.
            construct: for the record.

        Raises:
            DeviceIndexError: an ordinal that the target does not have.
        """
        if torch.compiler.is_dynamo_compiling():
            found = self._translate(device)
            return device if found is None else found
        kind = type(device)
        if kind is not str and kind is not torch.device:
            found = self._translate(device)
        else:
            try:
                found = self._known[device]
            except KeyError:
                found = self._known[device] = self._translate(device)
        if found is None:
            return device
        self.recorder.note("redirected", construct, self._detail(found))
        return found

    def _detail(self, found: torch.device) -> str:
        detail = self._details.get(found)
        if detail is None:
            detail = self._details[found] = str(found)
        return detail

    def _translate(self, device: Any) -> torch.device | None:
        """The target's device, None for what is no CUDA device."""
        if isinstance(device, int) and not isinstance(device, bool):
            index: int | None = device
        elif self.is_source(device):
            text = device if isinstance(device, str) else str(device)
            index = int(text[5:]) if len(text) > 5 else None
        else:
            return None
        return self.ordinal(index)

    def argument(self, device: Any) -> Any:
        """Translate the device argument of a function of the device API, whose ordinals count the target's devices."""
        if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
            return self.ordinal(device) if self.is_cpu or self.backend.one_device_per_process else device
        if self.is_source(device):
            text = str(device)
            return self.ordinal(int(text[5:]) if len(text) > 5 else None)
        return device

    def ordinal(self, index: int | None) -> torch.device:
        """The target's device for a CUDA ordinal; None for the current one.

        The CPU is one device, and so is what a one-device-per-process runtime shows: there every ordinal means it, as the
        processes that torchrun starts each ask for the ordinal LOCAL_RANK.
        """
        if self.is_cpu or self.backend.one_device_per_process or index is None:
            return torch.device(self.kind)
        if not torch.compiler.is_dynamo_compiling():
            count = self.count()
            if index >= count:
                raise DeviceIndexError(
                    f"the program asked for cuda:{index}, but the {self.backend.spec.name} backend has {count} "
                    f"device{'' if count == 1 else 's'}. Choose an ordinal below {count}, or start fewer processes per machine."
                )
        return torch.device(self.kind, index)

    def count(self) -> int:
        """Devices that the program may believe in. Under torchrun the CPU serves as many as there are local processes."""
        from portable.devices import device_count

        if self.is_cpu:
            return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return device_count()

    def pin(self, construct: str) -> bool:
        """Whether host memory is to be pinned where the program asks for it."""
        choice = self.backend.spec.pin_memory
        if not choice.value:
            self.note("changed", construct, f"not pinned: {choice.reason}")
        return choice.value

    def type(self, device_type: Any, construct: str) -> Any:
        """Translate a device *type*: "cuda" as given to torch.autocast, DeviceMesh and others."""
        if self.is_source(device_type):
            self.note("redirected", construct, self.kind)
            return self.kind
        return device_type


class Off(Target):
    """No target: what a replacement meets that somebody kept beyond the end of the mode. It changes nothing."""

    def __init__(self) -> None:
        self.kind = SOURCE
        self.is_cpu = False
        self.pins = True

    def note(self, kind: Kind, construct: str, detail: str) -> None:
        """Nothing is recorded."""

    def is_source(self, device: Any) -> bool:
        """No device is translated."""
        return False

    def device(self, device: Any, construct: str) -> Any:
        """Every device stays."""
        return device

    def argument(self, device: Any) -> Any:
        """Every device stays."""
        return device

    def pin(self, construct: str) -> bool:
        """Memory is pinned as the program asks."""
        return True
