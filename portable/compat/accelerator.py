"""torch.accelerator, torch.Stream and torch.get_device_module: the device-independent API, as a CUDA program sees it.

A program may find its device through torch.accelerator and then branch on ``device.type == "cuda"``. It is told what it would
be told on a CUDA machine, so that it takes the same branches; what it does with the device is translated like everything else.
PyTorch's own code goes on seeing the device there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from portable import cuda as ours
from portable.compat.patching import Patches, stand_in, truthful_to_torch
from portable.compat.target import SOURCE, Target
from portable.selection import call

# torch.accelerator's name to torch.cuda's; functions of a PyTorch that does not have them yet are left out.
_NAMES = {
    "synchronize": "synchronize",
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "current_stream": "current_stream",
    "set_stream": "set_stream",
    "empty_cache": "empty_cache",
    "get_memory_info": "mem_get_info",
    "max_memory_allocated": "max_memory_allocated",
    "max_memory_reserved": "max_memory_reserved",
    "memory_allocated": "memory_allocated",
    "memory_reserved": "memory_reserved",
    "memory_stats": "memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "reset_accumulated_memory_stats": "reset_accumulated_memory_stats",
}
_SETTERS = ("set_device_index", "set_device_idx")


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace the functions."""
    answers: dict[str, Any] = {"current_accelerator": lambda check_available=False: torch.device(SOURCE)}
    if target().is_cpu:
        answers |= _on_cpu(target)
    else:
        names = (*_SETTERS, "device_index", *_NAMES)
        answers |= {name: _translated(getattr(torch.accelerator, name, None), target) for name in names}
    for name, answer in answers.items():
        original = getattr(torch.accelerator, name, None)
        if original is not None:
            patches.set(torch.accelerator, name, truthful_to_torch(original, _noted(name, answer, target)))
    # The memory functions live in a submodule, whose own names stay: only what programs call is replaced.
    module_of = torch.get_device_module
    patches.set(torch, "get_device_module", truthful_to_torch(module_of, lambda device=None: module_of(device or SOURCE)))
    for name in ("Stream", "Event"):
        patches.set(torch, name, _generic(getattr(torch, name), name, target))


def _on_cpu(target: Callable[[], Target]) -> dict[str, Any]:
    """PyTorch has no accelerator there, so the program is told that the CPU is one."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: target().count(),
        **dict.fromkeys(_SETTERS, lambda device: None),
        "device_index": lambda device: ours.device(0),
        **{name: _without_device(getattr(ours, cuda_name)) for name, cuda_name in _NAMES.items()},
    }


def _without_device(function: Any) -> Any:
    """Every device argument means the one CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        streams = [value for value in args if not isinstance(value, (int, str, torch.device, type(None)))]
        return function(*streams)

    return call


def _translated(original: Any, target: Callable[[], Target]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        here = target()
        new = {key: here.argument(value) for key, value in kwargs.items()}
        return original(*(here.argument(value) for value in args), **new)

    return call


def _noted(name: str, answer: Any, target: Callable[[], Target]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        here = target()
        here.note("redirected", f"torch.accelerator.{name}", "the CPU" if here.is_cpu else here.kind)
        return answer(*args, **kwargs)

    return noted


def _generic(original: Any, name: str, target: Callable[[], Target]) -> Any:
    """torch.Stream and torch.Event: PyTorch's own on an accelerator; the backend's where PyTorch has none."""
    own = call(name)

    def make(device: Any = None, *args: Any, **kwargs: Any) -> Any:
        here = target()
        if here.is_cpu:
            here.note("redirected", f"torch.{name}", f"portable.cuda.{name}")
            return own(**kwargs) if name == "Event" else own(None, *args, **kwargs)
        if device is None:
            return original(*args, **kwargs)
        return original(here.device(device, f"torch.{name}"), *args, **kwargs)

    return stand_in(original, make, also=(own,) if isinstance(own, type) else ())
