"""Functions and methods that take a device: torch.zeros, Tensor.to, Module.to, torch.device as a context manager."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _device as default_device

from portable.compat import subclasses
from portable.compat.patching import Patches, like, truthful_to_torch
from portable.compat.target import SOURCE, Target

# Functions with a device argument whose schema does not show it, or that live in a submodule.
_BY_HAND: tuple[tuple[Any, str], ...] = (
    (torch, "asarray"),
    (torch, "from_dlpack"),
    (torch.fft, "fftfreq"),
    (torch.fft, "rfftfreq"),
    (torch.nested, "nested_tensor"),
    (torch.nested, "as_nested_tensor"),
)


def _takes_device(name: str) -> bool:
    """Whether an ATen operator of this name has a device argument."""
    try:
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    except RuntimeError:
        return False
    return any(argument.name == "device" for schema in schemas for argument in schema.arguments)


@cache
def functions() -> tuple[tuple[Any, str], ...]:
    """(owner, name) of the public functions with a device argument, from this PyTorch's own schemas."""
    names = [name for name in dir(torch) if not name.startswith("_") and _takes_device(name)]
    found = [(torch, name) for name in names if callable(getattr(torch, name)) and not isinstance(getattr(torch, name), type)]
    return (*found, *((owner, name) for owner, name in _BY_HAND if hasattr(owner, name)))


@cache
def methods() -> tuple[str, ...]:
    """The Tensor methods with a device argument by keyword."""
    return ("new", *(name for name in dir(torch.Tensor) if name.startswith("new_")))


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace the functions and methods."""
    # The set of constructors that `with torch.device(...)` redirects is made once from the attributes of torch. It must hold
    # the originals, which is what the wrappers call in the end.
    default_device._device_constructors()
    subclasses.begin()
    patches.later(subclasses.end)
    for owner, name in functions():
        _function(patches, target, owner, name)
    for name in methods():
        _function(patches, target, torch.Tensor, name)
    _tensor(patches, target)
    _modules(patches, target)
    _default_device(patches, target)


def _function(patches: Patches, target: Callable[[], Target], owner: Any, name: str) -> None:
    original = getattr(owner, name)
    construct = f"{owner.__name__}.{name}"

    def translate(kwargs: dict[str, Any]) -> dict[str, Any]:
        device = kwargs.get("device")
        if device is not None:
            kwargs["device"] = target().device(device, construct)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = target().pin(f"{construct}(pin_memory=True)")
        return kwargs

    def function(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **translate(kwargs)) if kwargs else original(*args)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is torch.Tensor:
            return original(self, *args, **translate(kwargs)) if kwargs else original(self, *args)
        return subclasses.call_method(original, self, *args, **translate(kwargs))

    def of_tensor(*args: Any, **kwargs: Any) -> Any:
        return subclasses.call_function(original, replacement, *args, **translate(kwargs))

    if owner is torch.Tensor:
        chosen: Any = method
    elif name.endswith("_like"):
        chosen = of_tensor
    else:
        chosen = function
    replacement = like(original, chosen, owner.__name__ if owner is not torch.Tensor else "torch", name)
    patches.set(owner, name, replacement)
    _teach_script(patches, original, replacement)


def _teach_script(patches: Patches, original: Any, replacement: Any) -> None:
    """Let torch.jit resolve the wrapper to the operator that the original stands for, so that scripting works as ever.

    torch.jit keeps a table from the id of a function to the operator (torch/jit/_builtins.py).
    """
    from torch.jit import _builtins

    table = _builtins._get_builtin_table()
    operator = table.get(id(original))
    if operator is not None:
        table[id(replacement)] = operator
        patches.later(lambda: table.pop(id(replacement), None))


def _tensor(patches: Patches, target: Callable[[], Target]) -> None:
    tensor = torch.Tensor
    to, pin_memory, is_pinned, as_type = tensor.to, tensor.pin_memory, tensor.is_pinned, tensor.type
    record_stream = tensor.record_stream

    def new_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], (str, torch.device, int)) and not isinstance(args[0], bool):
            args = (target().device(args[0], "Tensor.to"), *args[1:])
        elif kwargs.get("device") is not None:
            kwargs["device"] = target().device(kwargs["device"], "Tensor.to")
        if type(self) is torch.Tensor:
            return to(self, *args, **kwargs)
        return subclasses.call_method(to, self, *args, **kwargs)

    def new_cuda(
        self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> torch.Tensor:
        where = target().device("cuda" if device is None else device, "Tensor.cuda")
        return subclasses.call_method(to, self, where, non_blocking=non_blocking, memory_format=memory_format)

    def new_pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return pin_memory(self) if target().pin("Tensor.pin_memory") else self

    def new_is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        return target().pins and is_pinned(self)

    def new_type(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        from portable.compat.legacy import legacy_dtype

        if dtype is None:
            name = as_type(self)
            # The FloatTensor of the target is what the program knows as torch.cuda.FloatTensor.
            return name if target().is_cpu else name.replace(f"torch.{target().kind}.", f"torch.{SOURCE}.")
        found = legacy_dtype(dtype)
        if found is None:
            return as_type(self, dtype, non_blocking, **kwargs)
        return to(self, target().device("cuda", "Tensor.type"), dtype=found, non_blocking=non_blocking)

    def new_record_stream(self: torch.Tensor, s: Any) -> None:
        if not target().is_cpu:  # where memory may be reused as soon as it is freed, since nothing is queued
            record_stream(self, s)

    for name, wrapper in (
        ("to", new_to),
        ("cuda", new_cuda),
        ("pin_memory", new_pin_memory),
        ("is_pinned", new_is_pinned),
        ("type", new_type),
        ("record_stream", new_record_stream),
    ):
        patches.set(tensor, name, like(getattr(tensor, name), wrapper, "torch", f"Tensor.{name}"))
    # AOTAutograd runs a graph's method calls on this subclass, which has a `cuda` of its own that asks torch.cuda.
    patches.set(FunctionalTensor, "cuda", new_cuda)
    if not target().is_cpu:
        # It is inherited from the C base class; a property on Tensor itself hides it. PyTorch's own code, which would go on
        # to call CUDA's libraries, gets the truth.
        fact = torch._C.TensorBase.is_cuda.__get__  # type: ignore[attr-defined]
        kind = target().kind
        patches.set(tensor, "is_cuda", property(truthful_to_torch(fact, lambda self: self.device.type == kind)))

    for storage in (torch.UntypedStorage, torch.TypedStorage):
        patches.set(storage, "cuda", _storage_cuda(target))


def _storage_cuda(target: Callable[[], Target]) -> Any:
    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        where = target().device("cuda" if device is None else device, "Storage.cuda")
        return self.cpu() if where.type == "cpu" else self.to(device=where, non_blocking=non_blocking)

    return cuda


def _modules(patches: Patches, target: Callable[[], Target]) -> None:
    """Module.to parses its arguments in C++, which refuses an ordinal when PyTorch has no accelerator."""
    module_to = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if args and isinstance(args[0], (str, torch.device, int)) and not isinstance(args[0], bool):
            args = (target().device(args[0], "Module.to"), *args[1:])
        elif kwargs.get("device") is not None:
            kwargs["device"] = target().device(kwargs["device"], "Module.to")
        return module_to(self, *args, **kwargs)

    patches.set(torch.nn.Module, "to", like(module_to, to, "torch.nn.modules.module", "Module.to"))


def _default_device(patches: Patches, target: Callable[[], Target]) -> None:
    """``with torch.device("cuda"):`` and torch.set_default_device both make a DeviceContext."""
    init = default_device.DeviceContext.__init__

    def new_init(self: Any, device: Any) -> None:
        init(self, target().device(device, "torch.device as default device"))

    patches.set(default_device.DeviceContext, "__init__", new_init)
