"""A backend for whichever device torch.accelerator reports, unless another backend declares that device type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from portable import plugins
from portable.backend import Backend
from portable.baseline import baseline
from portable.fp32_settings import common
from portable.spec import Availability, BackendSpec, Generation
from portable.support import Support
from portable.switches import Control
from portable_generic.facts import ANY, KNOWN, unknown
from portable_generic.modules import CHANGES, GENERATION
from portable_generic.precision import CONTROLS

# What a device's module needs for Inductor to use it (torch/_inductor/codegen/common.py, init_backend_registration).
_CODE_GENERATORS = ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen")


class GenericBackend(Backend):
    """PyTorch's current accelerator.

    Plugins are found before the device is known (its package may be imported later, and whether another plugin serves it is
    known only when all have been found), so ``spec`` is worked out when it is read, until a device has been found.

    Args:
        device_type: serve this device type only, whatever the machine has (for documents and tests).
    """

    def __init__(self, device_type: str | None = None) -> None:
        self._device_type = device_type
        self._spec: BackendSpec | None = None if device_type is None else declared(device_type)

    @property
    def spec(self) -> BackendSpec:  # type: ignore[override]
        """The declaration for the device found, or a placeholder whose device type is "any"."""
        return self._spec or declared(self._unclaimed() or ANY)

    def _unclaimed(self) -> str | None:
        kind = _accelerator()
        return kind if kind and not _server(kind, self) else None

    def probe(self) -> Availability:
        kind = self._device_type or _accelerator()
        if kind is None:
            return Availability(
                False,
                "PyTorch sees no accelerator",
                "install the PyTorch build or package for your device; import the package before portable is first used",
            )
        server = _server(kind, self)
        if server:
            return Availability(
                False,
                f"PyTorch sees no accelerator other than {kind}, which the backend {server} serves",
                f"see what is said of {server}",
            )
        return self._probe(kind)

    def _probe(self, kind: str) -> Availability:
        spec = declared(kind)
        module = _module(kind)
        if module is None:
            return Availability(False, f"PyTorch has the device type {kind} but no torch.{kind}", f"install {spec.install}")
        count = int(module.device_count()) if module.is_available() else 0
        if count == 0:
            return Availability(
                False,
                f"PyTorch was built for {kind}, but torch.{kind} finds no device",
                f"check the driver of the {spec.vendor} device ({spec.install})",
            )
        self._spec = spec
        return Availability(True, f"{count} {kind} device{'s' if count > 1 else ''}", device_count=count)

    def module(self) -> Any:
        return _module(self.spec.device_type)

    @property
    def support(self) -> Mapping[str, Support]:  # type: ignore[override]
        """Not cached: the table depends on the device, which may be found later."""
        return {**baseline(), **self.support_changes()}

    def support_changes(self) -> Mapping[str, Support]:
        return CHANGES.get(self.spec.device_type, {})

    def generation(self, index: int = 0) -> Generation | None:
        find = GENERATION.get(self.spec.device_type)
        return find(index) if find else None

    def precision_controls(self) -> Sequence[Control]:
        return CONTROLS.get(self.spec.device_type, common)()

    def device_name(self, index: int = 0) -> str:
        name = self.bind()["get_device_name"]
        if not getattr(name, "portable_unsupported", False):
            return str(name(index))
        generation = self.generation(index)
        return generation.title if generation else f"{self.spec.device_type}:{index}"

    def total_memory(self, index: int = 0) -> int | None:
        """Bytes, from the device's properties, else from its free and total memory; None if it tells neither."""
        calls = self.bind()
        try:
            return int(calls["get_device_properties"](index).total_memory)
        except (AttributeError, NotImplementedError, RuntimeError):
            pass
        try:
            return int(calls["mem_get_info"](index)[1])
        except (AttributeError, NotImplementedError, RuntimeError):
            return None

    def documented(self) -> Sequence[Backend]:
        """The baseline, and each device that the facts list; the same on every machine."""
        return [GenericBackend(ANY), *map(GenericBackend, KNOWN)]


def declared(device_type: str) -> BackendSpec:
    """The declaration of a device type; for one that is not listed, made from what its package registered with PyTorch."""
    if device_type in KNOWN:
        return KNOWN[device_type]
    module = _module(device_type)
    return unknown(
        device_type,
        process_group=_process_group(device_type),
        inductor=all(hasattr(module, name) for name in _CODE_GENERATORS),
    )


def _module(device_type: str) -> Any:
    return None if device_type == ANY else getattr(torch, device_type, None)  # torch.any is a function


def _process_group(device_type: str) -> str | None:
    from torch import distributed

    if not distributed.is_available():
        return None
    found = distributed.Backend.default_device_backend_map.get(device_type)
    return None if found == "fake" else found  # torch.testing puts that one in for devices without any


def _accelerator() -> str | None:
    """Type of PyTorch's accelerator, whether it is available or only built in; one process has one at most."""
    found = torch.accelerator.current_accelerator(check_available=False)
    return found.type if found else None


def _server(kind: str, but: Backend) -> str | None:
    """Name of another backend that declares the device type; while plugins are still being looked for there is none."""
    found = plugins.found()
    others = found.backends.values() if found else ()
    return next((b.spec.name for b in others if b is not but and b.spec.device_type == kind), None)
