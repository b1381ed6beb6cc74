"""torch.accelerator on a CPU target.

A program for CUDA may ask torch.accelerator instead of torch.cuda. Where the target is an accelerator, PyTorch's answers are
right as they are. On the CPU there is none, so the program is told that the CPU is it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from portable import cuda as ours
from portable.compat.patching import Patches, truthful_to_torch
from portable.compat.target import Target

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


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace the functions if the target is the CPU."""
    if not target().is_cpu:
        return
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: torch.device("cpu"),
        "device_count": lambda: target().count(),
        **dict.fromkeys(("set_device_index", "set_device_idx"), lambda device: None),
        "device_index": lambda device: ours.device(0),
        **{name: _without_device(getattr(ours, cuda_name)) for name, cuda_name in _NAMES.items()},
    }
    for name, answer in answers.items():
        original = getattr(torch.accelerator, name, None)
        if original is not None:
            patches.set(torch.accelerator, name, truthful_to_torch(original, _noted(name, answer, target)))
    # The memory functions live in a submodule, whose own names stay: only what programs call is replaced.


def _without_device(function: Any) -> Any:
    """Every device argument means the one CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        streams = [value for value in args if not isinstance(value, (int, str, torch.device, type(None)))]
        return function(*streams)

    return call


def _noted(name: str, answer: Any, target: Callable[[], Target]) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        target().note("redirected", f"torch.accelerator.{name}", "the CPU")
        return answer(*args, **kwargs)

    return noted
