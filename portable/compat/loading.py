"""Checkpoints and generators: torch.load, torch.Generator, torch.random.fork_rng."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import serialization

from portable.compat.patching import Patches, stand_in
from portable.compat.target import SOURCE, Target
from portable.errors import UnsupportedError


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace where a storage goes, and the generator's constructor."""
    _restore_location(patches, target)
    _fork_rng(patches, target)
    _generator(patches, target)


def _restore_location(patches: Patches, target: Callable[[], Target]) -> None:
    """Every form of map_location, and none at all, ends in this function with the name of a location
    (torch/serialization.py, _get_restore_location), so translating there covers strings, devices, dicts and files whose
    storages were saved on a GPU."""
    original = serialization.default_restore_location

    @functools.wraps(original)
    def default_restore_location(storage: Any, location: Any) -> Any:
        here = target()
        if here.is_source(location):
            location = str(here.device(location, "torch.load"))
        return original(storage, location)

    patches.set(serialization, "default_restore_location", default_restore_location)


def _fork_rng(patches: Patches, target: Callable[[], Target]) -> None:
    original = torch.random.fork_rng

    @functools.wraps(original)
    def fork_rng(devices: Any = None, enabled: bool = True, **kwargs: Any) -> Any:
        here = target()
        if kwargs.get("device_type", SOURCE) in (SOURCE, None):
            kwargs["device_type"] = here.kind
            if here.is_cpu:
                devices = []  # the CPU's generator is always kept
        return original(devices, enabled, **kwargs)

    patches.set(torch.random, "fork_rng", fork_rng)


def _generator(patches: Patches, target: Callable[[], Target]) -> None:
    original: Any = torch.Generator

    def make(device: Any = "cpu") -> Any:
        here = target()
        found = here.device(device, "torch.Generator")
        try:
            return original(device=found)
        except RuntimeError as error:  # NotImplementedError is one: what PyTorch raises for a device without generator objects
            if found is device:
                raise
            here.note("no equivalent", "torch.Generator", "raised UnsupportedError")
            raise UnsupportedError(
                here.backend.spec.name,
                f"torch.Generator(device={str(device)!r})",
                f"PyTorch makes none for {here.kind} ({str(error).splitlines()[0]})",
                "draw with torch.Generator() on the CPU and move the result: torch.randn(..., generator=g).to(device)",
            ) from error

    made = stand_in(original, make)
    made.__module__ = "torch"  # where pickle finds it
    patches.set(torch, "Generator", made)
