"""The module torch.cuda: its functions go to the active backend, the rest is answered or refused with a reason."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

from portable import cuda as ours
from portable.compat.patching import Patches, refuse, stand_in, truthful_to_torch
from portable.compat.target import Target
from portable.errors import UnsupportedError
from portable.selection import call

# Classes must stay classes (isinstance, subclassing): the backend's own object is put there, not our factory function.
_CLASSES = ("Stream", "Event", "CUDAGraph")
_SUBMODULES = ("memory", "random", "streams", "graphs", "nvtx", "amp", "amp.autocast_mode", "amp.grad_scaler")
_DEVICE_PARAMETERS = ("device", "peer_device", "index")
_KEYWORDS = {"msg": "message", "obj": "tensor", "cuda_graph": "graph"}  # torch.cuda's name of a parameter to ours

# Names that `portable` has no counterpart for, and that can be answered honestly: what they return and why that is right.
_ANSWERS: dict[str, tuple[Any, str]] = {
    "is_current_stream_capturing": (False, "nothing is being recorded"),
    "get_sync_debug_mode": (0, "synchronisations are not tracked"),
    "set_sync_debug_mode": (None, "synchronisations are not tracked"),
    "get_gencode_flags": ("", "there are no CUDA architectures"),
    "get_allocator_backend": ("native", "the backend's own allocator"),
    "memory_stats_as_nested_dict": ({}, "use memory_stats"),
    "host_memory_stats": ({}, "the pinned host allocator is not CUDA's"),
    "reset_peak_host_memory_stats": (None, "the pinned host allocator is not CUDA's"),
    "reset_accumulated_host_memory_stats": (None, "the pinned host allocator is not CUDA's"),
    "caching_allocator_enable": (None, "the allocator is the backend's"),
    "memory._record_memory_history": (None, "use pt.profile(profile_memory=True)"),
    "memory._dump_snapshot": (None, "use pt.profile(profile_memory=True)"),
}

# Functions in the catalogue that a program can do without: where the target lacks them they are left out and reported.
_HARMLESS = frozenset({"set_per_process_memory_fraction"})

# Old spellings of functions in the catalogue (torch.cuda documentation, "deprecated").
_ALIASES = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace every public function of torch.cuda and its submodules."""
    replacements: dict[str, Any] = {}
    for name in ours.names():
        if name in _CLASSES:
            replacements[name] = _class(name, call(name), target)
        elif name != "OutOfMemoryError":  # one class for every device
            replacements[name] = _truthful(name, _redirect(name, _ours(name), target))
    for name, new in _ALIASES.items():
        replacements[name] = _redirect(name, _ours(new), target)
    replacements["is_available"] = _truthful("is_available", lambda: True)
    replacements["device_count"] = _truthful("device_count", lambda: target().count())
    replacements["make_graphed_callables"] = _graphed(replacements["make_graphed_callables"], target)
    for name, (value, why) in _ANSWERS.items():
        if name not in replacements or name == "is_current_stream_capturing":
            replacements[name] = _answer(name, value, why, target)
    for name in torch.cuda.__all__:
        original = getattr(torch.cuda, name, None)
        if isinstance(original, FunctionType) and name not in replacements:
            replacements[name] = refuse(f"torch.cuda.{name}", target)
    _apply(patches, replacements)


def _class(name: str, found: Any, target: Callable[[], Target]) -> Any:
    """The backend's class, its constructor's device translated; or a class for the function that makes or refuses one."""
    construct = f"torch.cuda.{name}"
    if getattr(found, "portable_unsupported", False):
        refused = _redirect(name, found, target)
        return type(name, (), {"__new__": lambda cls, *args, **kwargs: refused(), "__module__": "torch.cuda"})

    def make(*args: Any, **kwargs: Any) -> Any:
        here = target()
        here.note("redirected", construct, f"portable.cuda.{name}")
        if name == "Stream" and args:  # torch.cuda.Stream(device=None, priority=0); the other classes take no device
            args = (here.argument(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = here.argument(kwargs["device"])
        return found(*args, **kwargs)

    if isinstance(found, type):
        return stand_in(found, make)
    # The vendor has a function that makes them; its streams and events are PyTorch's own then.
    return stand_in(getattr(torch._C, name, None) or type(name, (), {}), make, name=name)


def _ours(name: str) -> Any:
    found: Any = ours
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _apply(patches: Patches, replacements: dict[str, Any]) -> None:
    """Put the replacements in place, also where a submodule holds the same object under the same name."""
    originals: dict[str, Any] = {}
    for name, value in replacements.items():
        owner: Any = torch.cuda
        *outer, last = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        if hasattr(owner, last):
            originals[last] = getattr(owner, last)
            patches.set(owner, last, value)
    by_name = {name.rpartition(".")[2]: value for name, value in replacements.items()}
    for path in _SUBMODULES:
        module = sys.modules.get(f"torch.cuda.{path}")
        if not isinstance(module, ModuleType):
            continue
        for name, original in originals.items():
            if vars(module).get(name) is original:
                patches.set(module, name, by_name[name])


def _redirect(name: str, function: Any, target: Callable[[], Target]) -> Any:
    """Call ours with translated devices; only parameters that are devices are looked at (a seed is no ordinal)."""
    parameters = list(inspect.signature(function).parameters)
    devices = {i for i, parameter in enumerate(parameters) if parameter in _DEVICE_PARAMETERS}
    construct = f"torch.cuda.{name}"

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        here = target()
        new = tuple(here.argument(value) if i in devices else value for i, value in enumerate(args))
        for key in _DEVICE_PARAMETERS:
            if kwargs.get(key) is not None:
                kwargs[key] = here.argument(kwargs[key])
        renamed = {_KEYWORDS.get(key, key) if key not in parameters else key: value for key, value in kwargs.items()}
        try:
            result = function(*new, **renamed)
        except UnsupportedError as error:
            if name in _HARMLESS:
                here.note("changed", construct, f"left out: {error.reason}")
                return None
            here.note("no equivalent", construct, "raised UnsupportedError")
            raise
        here.note("redirected", construct, f"portable.cuda.{name}")
        return result

    return redirected


def _truthful(name: str, answer: Any) -> Any:
    original: Any = torch.cuda
    for part in name.split("."):
        original = getattr(original, part, None)
    # Absent from this PyTorch, or a class: there is nothing to fall back to.
    return answer if original is None or isinstance(original, type) else truthful_to_torch(original, answer)


def _answer(name: str, value: Any, why: str, target: Callable[[], Target]) -> Any:
    def answered(*args: Any, **kwargs: Any) -> Any:
        if not name.startswith("_"):
            target().note("changed", f"torch.cuda.{name}", f"answers {value!r}: {why}")
        return value

    answered.__name__ = name.rpartition(".")[2]
    return answered


def _graphed(supported: Any, target: Callable[[], Target]) -> Any:
    """Graphed callables compute what the plain ones compute, only with less launch overhead: so the plain ones serve."""
    from portable.graphs import is_supported

    def make_graphed_callables(callables: Any, sample_args: Any, *args: Any, **kwargs: Any) -> Any:
        if is_supported():
            return supported(callables, sample_args, *args, **kwargs)
        target().note("changed", "torch.cuda.make_graphed_callables", "the callables themselves: the device records no graphs")
        return callables

    return make_graphed_callables
