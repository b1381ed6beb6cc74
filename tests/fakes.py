"""Stand-ins for devices that this machine lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from portable.backend import Backend
from portable.hookspecs import hookimpl
from portable.spec import Availability, BackendSpec, Choice, CompileSpec, FallbackSpec, Generation
from portable.support import Support, emulated


def spec(name: str = "fake", device_type: str = "fpga", **changes: Any) -> BackendSpec:
    """A declaration with harmless values; ``fpga`` is a type that PyTorch knows and no machine has."""
    values: dict[str, Any] = {
        "name": name,
        "vendor": "Fake",
        "device_type": device_type,
        "compile": CompileSpec(None, "it has no compiler"),
        "process_group": "gloo",
        "pin_memory": Choice(True, "copies overlap"),
        "fallback": FallbackSpec(False, "never"),
        "rng": "none",
    }
    return BackendSpec(**{**values, **changes})


def generation(*autocast: str, title: str = "Fake 1") -> Generation:
    """A device generation that computes fast in the given dtypes."""
    dtypes = frozenset({"float32", *autocast})
    return Generation("fake1", title, dtypes, dtypes, autocast, "made up for a test")


class Fake(Backend):
    """A backend of ``count`` devices whose table is what the test passes."""

    def __init__(
        self,
        declared: BackendSpec | None = None,
        *,
        count: int = 2,
        answer: Availability | None = None,
        table: Mapping[str, Support] | None = None,
        generation: Generation | None = None,
        load_error: Exception | None = None,
    ) -> None:
        self.spec = declared or spec()
        self.answer = answer or Availability(True, f"{count} fake devices", device_count=count, execution="emulated")
        self.current = 0
        self.loads = 0
        self._generation = generation
        self._load_error = load_error
        self._table = {
            "device_count": emulated(lambda: count, "fixed"),
            "current_device": emulated(lambda: self.current, "fixed"),
            "set_device": emulated(self._set, "remembers"),
            "synchronize": emulated(lambda device=None: None, "nothing queued"),
            **(table or {}),
        }

    def _set(self, index: int) -> None:
        self.current = index

    def probe(self) -> Availability:
        return self.answer

    def load(self) -> None:
        self.loads += 1
        if self._load_error is not None:
            raise self._load_error

    def module(self) -> Any:
        return None

    def generation(self, index: int = 0) -> Generation | None:
        return self._generation

    def support_changes(self) -> Mapping[str, Support]:
        return self._table


class PlugIn:
    """A plugin object that provides one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @hookimpl
    def portable_backend(self) -> Backend:
        return self._backend


def rel_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest magnitude expected."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
