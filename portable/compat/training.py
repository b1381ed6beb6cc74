"""What training scripts tune for CUDA: pinned loaders, fused and capturable optimizers, compile modes, profiler activities."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import profiler
from torch.utils import data

from portable import compiling
from portable.compat.patching import Patches
from portable.compat.target import Target
from portable.graphs import is_supported as graphs_supported

_COMPILE_ARGUMENTS = frozenset(compiling.Arguments.__annotations__)
_CUDA_COMPILERS = ("inductor", "cudagraphs", "tensorrt", "torch_tensorrt", "onnxrt")


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace constructors and torch.compile."""
    _data_loader(patches, target)
    classes = (value for value in vars(torch.optim).values() if isinstance(value, type))
    kinds = tuple(kind for kind in classes if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer)
    for kind in kinds:
        _optimizer(patches, target, kind, kinds)
    _compile(patches, target)
    _profiler(patches, target)


def _data_loader(patches: Patches, target: Callable[[], Target]) -> None:
    init = data.DataLoader.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def new_init(self: Any, *args: Any, **kwargs: Any) -> None:
        here = target()
        if len(args) > 1:  # pin_memory may come by position
            given = signature.bind(self, *args, **kwargs).arguments
            self, args, kwargs = given.pop("self"), (), {**given.pop("kwargs", {}), **given}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = here.pin("DataLoader(pin_memory=True)")
        if here.is_source(kwargs.get("pin_memory_device") or None):
            kwargs["pin_memory_device"] = ""  # PyTorch then takes the accelerator there is
        init(self, *args, **kwargs)

    patches.set(data.DataLoader, "__init__", new_init)


def _optimizer(patches: Patches, target: Callable[[], Target], kind: type, kinds: tuple[type, ...]) -> None:
    """Drop options that the target has no kernels for; subclasses reach this through super().__init__."""
    init = kind.__init__  # type: ignore[misc]
    parameters = inspect.signature(init).parameters
    if "__init__" not in vars(kind) or not {"fused", "capturable"} & set(parameters):
        return

    @functools.wraps(init)
    def new_init(self: Any, *args: Any, **kwargs: Any) -> None:
        here = target()
        # AdamW's own __init__ calls Adam's: what counts is the class of PyTorch that the program named.
        name = next((base.__name__ for base in type(self).__mro__ if base in kinds), kind.__name__)
        known = here.backend.spec.optimizers.get(name)
        if kwargs.get("fused") and not (known and known.options.get("fused")):
            kwargs["fused"] = None
            instead = "PyTorch's default"
            if known and "foreach" in known.options and kwargs.get("foreach") is None:
                kwargs["foreach"] = known.options["foreach"]
                instead = f"foreach={known.options['foreach']}"
            reason = known.reason if known else f"the {here.backend.spec.name} backend declares no fused {name}"
            here.note("changed", f"{name}(fused=True)", f"{instead}: {reason}")
        if kwargs.get("capturable") and not graphs_supported():
            kwargs["capturable"] = False
            here.note("changed", f"{name}(capturable=True)", "False: the device records no graphs")
        init(self, *args, **kwargs)

    patches.set(kind, "__init__", new_init)


def _compile(patches: Patches, target: Callable[[], Target]) -> None:
    original = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if model is None:  # used as a decorator with arguments
            return lambda function: compile(function, **kwargs)
        here = target()
        known = {key: kwargs.pop(key) for key in list(kwargs) if key in _COMPILE_ARGUMENTS}
        options = {key: value for key, value in (known.get("options") or {}).items() if not key.startswith("triton.")}
        if options != (known.get("options") or {}):
            here.note("changed", "torch.compile(options=)", "options of Triton are left out")
        known["options"] = options or None
        asked = known.get("backend")
        if asked in _CUDA_COMPILERS:
            del known["backend"]
        choice = compiling.explain_compile(here.backend, **known)
        if asked in _CUDA_COMPILERS and asked != choice.backend:
            here.note("changed", f"torch.compile(backend={asked!r})", choice.backend or "eager mode")
        for key, reason in choice.dropped.items():
            here.note("changed", f"torch.compile({key}=)", f"left out: {reason}")
        if choice.backend is None:
            here.note("changed", "torch.compile", f"eager mode: {choice.reason}")
            return model
        here.note("redirected", "torch.compile", str(choice.backend))
        return original(model, backend=choice.backend, **choice.kwargs, **kwargs)

    patches.set(torch, "compile", compile)


def _profiler(patches: Patches, target: Callable[[], Target]) -> None:
    init = profiler.profile.__init__

    @functools.wraps(init)
    def new_init(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("activities")
        if asked:
            here = target()
            possible = profiler.supported_activities()
            names = here.backend.spec.profiler_activities
            kept = [activity for activity in asked if activity in possible and activity.name != "CUDA"]
            kept += [activity for activity in possible if activity.name in names and activity not in kept]
            if set(kept) != set(asked):
                here.note("redirected", "torch.profiler activities", ", ".join(sorted(activity.name for activity in kept)))
            kwargs["activities"] = kept
        init(self, *args, **kwargs)

    patches.set(profiler.profile, "__init__", new_init)
