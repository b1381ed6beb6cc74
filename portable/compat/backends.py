"""torch.backends.cuda and torch.backends.cudnn: settings are kept and read back; where nothing reads them, that is reported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import backends

from portable.compat.patching import Patches
from portable.compat.target import Target

_PREFERENCES = ("preferred_linalg_library", "preferred_blas_library", "preferred_rocm_fa_library")
_NO_EFFECT = "kept, without effect: it is a setting of CUDA's libraries"


class _PlanCache:
    """torch.backends.cuda.cufft_plan_cache where there is no cuFFT: always empty, of the size that was asked for."""

    size = 0

    def __init__(self) -> None:
        self.max_size = 4096  # cuFFT's own default (docs/source/notes/cuda.rst of PyTorch)

    def clear(self) -> None:
        pass

    def __getitem__(self, device: Any) -> _PlanCache:
        return self


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace what needs CUDA, and watch the settings."""
    for name in _PREFERENCES:
        if hasattr(backends.cuda, name):
            patches.set(backends.cuda, name, _preference(getattr(backends.cuda, name), target))
    patches.set(backends.cuda, "cufft_plan_cache", _PlanCache())
    _watch(patches, target)


def _preference(original: Any, target: Callable[[], Target]) -> Any:
    """A library that this PyTorch lacks cannot be preferred; the call answers what is used instead, as it always does."""

    @functools.wraps(original)
    def preferred(backend: Any = None) -> Any:
        try:
            return original(backend)
        except RuntimeError as error:
            if "compiled" not in str(error):  # an unknown name is the program's own mistake
                raise
            target().note("changed", f"torch.backends.cuda.{original.__name__}", f"left out: {error}".splitlines()[0])
            return original()

    return preferred


def _watch(patches: Patches, target: Callable[[], Target]) -> None:
    """Note what the program sets. The values are PyTorch's own variables, which exist in every build."""
    kind = backends.ContextProp
    owned = {id(prop): name for name, prop in vars(type(torch.backends.cudnn)).items() if isinstance(prop, kind)}
    set_property = kind.__set__

    @functools.wraps(set_property)
    def new_set(self: Any, obj: Any, val: Any) -> None:
        if id(self) in owned:
            target().note("changed", f"torch.backends.cudnn.{owned[id(self)]}", _NO_EFFECT)
        set_property(self, obj, val)

    patches.set(kind, "__set__", new_set)
    matmul = type(backends.cuda.matmul)
    set_attribute = matmul.__setattr__

    @functools.wraps(set_attribute)
    def new_setattr(self: Any, name: str, value: Any) -> None:
        set_attribute(self, name, value)
        target().note("changed", f"torch.backends.cuda.matmul.{name}", _NO_EFFECT)

    patches.set(matmul, "__setattr__", new_setattr)
