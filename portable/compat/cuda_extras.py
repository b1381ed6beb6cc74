"""The parts of torch.cuda outside the device API: profiler switches, NVTX process ranges, NCCL, tuning, private names."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.cuda import gds, nccl, tunable

from portable.compat.patching import Patches, refuse, truthful_to_torch
from portable.compat.target import Target
from portable.errors import UnsupportedError

# Modules that drive CUDA's own libraries. Their public functions are refused with a reason when they are called.
_BETWEEN_DEVICES = ("broadcast", "broadcast_coalesced", "gather", "reduce_add", "reduce_add_coalesced", "scatter")
_REFUSED: dict[str, tuple[str, ...]] = {
    "torch.cuda.nccl": (*nccl.__all__, "init_rank", "unique_id", "version"),
    "torch.cuda.tunable": tuple(tunable.__all__),
    "torch.cuda.gds": tuple(gds.__all__),
    "torch.cuda.comm": _BETWEEN_DEVICES,
    "torch.nn.parallel.comm": _BETWEEN_DEVICES,
}


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace them."""
    for path, names in _REFUSED.items():
        module = importlib.import_module(path)
        for name in names:
            if isinstance(getattr(module, name, None), FunctionType):
                patches.set(module, name, refuse(f"{path}.{name}", target))
    _process_ranges(patches, target)
    _profiler_switch(patches, target)
    _emit_nvtx(patches, target)
    patches.set(torch.cuda, "_lazy_init", _lazy_init(target))
    patches.set(torch.cuda, "default_generators", _generators(target()))


def _lazy_init(target: Callable[[], Target]) -> Any:
    """Some programs start CUDA by hand, which needs no answer. PyTorch's own calls must go on failing.

    One of them comes from C++, for a CUDA device that reached it untranslated, and would be the last: it remembers a success
    for the life of the process. It shows the program's frame as its caller, in whose code the name does not occur.
    """
    original = torch.cuda._lazy_init

    def by_hand_or_from_below() -> None:
        if "_lazy_init" in sys._getframe(2).f_code.co_names:
            return
        raise UnsupportedError(
            target().backend.spec.name,
            "a CUDA device in a function that was taken from torch before the mode was entered",
            "only torch's own names are replaced, and `from torch import zeros` had kept the original",
            "import that module inside the mode, or start the program with `portable run`",
        )

    return truthful_to_torch(original, by_hand_or_from_below)


def _generators(here: Target) -> tuple[torch.Generator, ...]:
    if here.is_cpu:
        return (torch.default_generator,) * here.count()
    return tuple(getattr(here.backend.module(), "default_generators", ()))


def _process_ranges(patches: Patches, target: Callable[[], Target]) -> None:
    """Ranges with a handle, which other than pushed ones may overlap, as ranges of torch.profiler."""
    handles = itertools.count(1)
    running: dict[int, Any] = {}

    @functools.wraps(torch.cuda.nvtx.range_start)
    def range_start(msg: str) -> int:
        record = torch.profiler.record_function(str(msg))
        record.__enter__()
        handle = next(handles)
        running[handle] = record
        target().note("redirected", "torch.cuda.nvtx.range_start", "torch.profiler.record_function")
        return handle

    @functools.wraps(torch.cuda.nvtx.range_end)
    def range_end(range_id: int) -> None:
        record = running.pop(range_id, None)
        if record is not None:
            record.__exit__(None, None, None)

    patches.set(torch.cuda.nvtx, "range_start", range_start)
    patches.set(torch.cuda.nvtx, "range_end", range_end)


class _Runtime:
    """What torch.cuda.cudart() answers: switching an external profiler on and off is harmless, the rest is refused."""

    def __init__(self, target: Callable[[], Target]) -> None:
        self._target = target

    def cudaProfilerStart(self) -> int:
        return self._switch("cudaProfilerStart")

    def cudaProfilerStop(self) -> int:
        return self._switch("cudaProfilerStop")

    def _switch(self, name: str) -> int:
        self._target().note("changed", f"torch.cuda.cudart().{name}", "does nothing: there is no CUDA profiler; use pt.profile")
        return 0  # cudaSuccess

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refuse(f"torch.cuda.cudart().{name}", self._target)


def _profiler_switch(patches: Patches, target: Callable[[], Target]) -> None:
    runtime = _Runtime(target)
    patches.set(torch.cuda, "cudart", truthful_to_torch(torch.cuda.cudart, lambda: runtime))
    patches.set(torch.cuda, "check_error", truthful_to_torch(torch.cuda.check_error, lambda res: None))
    patches.set(torch.cuda.profiler, "start", runtime.cudaProfilerStart)
    patches.set(torch.cuda.profiler, "stop", runtime.cudaProfilerStop)


def _emit_nvtx(patches: Patches, target: Callable[[], Target]) -> None:
    init = autograd_profiler.emit_nvtx.__init__

    @functools.wraps(init)
    def new_init(self: Any, enabled: bool = True, record_shapes: bool = False) -> None:
        if enabled:
            target().note("changed", "torch.autograd.profiler.emit_nvtx", "does nothing: NVTX is NVIDIA's; use pt.profile")
        init(self, enabled=False, record_shapes=record_shapes)

    patches.set(autograd_profiler.emit_nvtx, "__init__", new_init)
