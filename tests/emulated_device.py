"""A device of PyTorch's PrivateUse1 kind, written in Python: its tensors keep their data on the CPU and compute there.

Results equal the CPU's to the bit, so a program that runs on the device can be compared exactly. One process can have one such
device, so tests install it in a process of their own. PyTorch's part: torch/utils/backend_registration.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

calls: Counter[str] = Counter()
"""How often each operator reached the device, by its name in ATen ("aten::mm")."""
_installed: _Module | None = None
_libraries: list[torch.library.Library] = []  # their registrations last as long as they do
_AUTOCAST = tuple(getattr(torch.ops.aten, name).default for name in ("linear", "mm", "addmm", "bmm", "matmul"))


class EmulatedTensor(torch.Tensor):
    """A tensor on the device; ``host`` is its data."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> EmulatedTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=device
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operator, args, kwargs or {})

    def __repr__(self, **kwargs: Any) -> str:
        return f"{self.host!r} on {self.device}"


def _run(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the host data; what it makes lies on the device unless it was asked to be elsewhere."""
    assert _installed is not None
    kind = _installed.device_type
    calls[operator._schema.name] += 1
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    inputs = [tensor for tensor in tensors if isinstance(tensor, EmulatedTensor)]
    # An operator that works in place answers its own argument.
    owners = {id(tensor): tensor for tensor in tensors} | {id(tensor.host): tensor for tensor in inputs}
    asked = kwargs.get("device")
    target = torch.device(asked or (inputs[0].device if inputs else kind))
    if target.type == kind and target.index is None:
        target = torch.device(kind, _installed.current_device())

    def lower(leaf: Any) -> Any:
        if isinstance(leaf, EmulatedTensor):
            return leaf.host
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == kind else leaf

    def raise_(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in owners:
            return owners[id(leaf)]
        return leaf if target.type == "cpu" else EmulatedTensor(leaf, target)

    answer = operator(*tree_map(lower, args), **tree_map(lower, kwargs))
    return tree_map(raise_, answer)


def _cast(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """A matrix product under autocast: float32 inputs in autocast's dtype."""
    assert _installed is not None
    dtype = torch.get_autocast_dtype(_installed.device_type)
    lowered = tree_map(lambda leaf: leaf.to(dtype) if getattr(leaf, "dtype", None) == torch.float32 else leaf, args)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        return operator(*lowered, **kwargs)


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1  # type: ignore[attr-defined]


class _Module(ModuleType):
    """What ``torch.<name>`` is: the functions that PyTorch and the baseline ask of a device module."""

    def __init__(self, device_type: str, count: int, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(f"torch.{device_type}")
        self.device_type = device_type
        self._count = count
        self._current = 0
        for name, function in functions.items():
            setattr(self, name, function)

    def is_available(self) -> bool:
        return self._count > 0

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._count

    def current_device(self) -> int:
        return self._current

    def set_device(self, index: int) -> None:
        if not 0 <= index < self._count:
            raise RuntimeError(f"no device {index}")
        self._current = index

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before = self._current
        self.set_device(index)
        try:
            yield
        finally:
            self.set_device(before)

    def synchronize(self, device: Any = None) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass  # torch.manual_seed, which calls this, has seeded the CPU's generator, from which the device draws

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def install(name: str, device_count: int = 2, **functions: Callable[..., Any]) -> ModuleType:
    """Give this process devices of the type ``name``; answers ``torch.<name>``, to which ``functions`` are added."""
    global _installed
    if _installed is not None:
        raise RuntimeError(f"this process has the device {_installed.device_type} already")
    _installed = _Module(name, device_count, functions)
    backend_registration._setup_privateuseone_for_python_backend(name, backend_module=_installed, device_guard=_Guard())
    fallbacks = torch.library.Library("_", "IMPL")
    fallbacks.fallback(lambda operator, *args, **kwargs: _run(operator, args, kwargs), "PrivateUse1")
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    autocast = torch.library.Library("aten", "IMPL")
    for operator in _AUTOCAST:
        autocast.impl(operator._schema.name, partial(_cast, operator), "AutocastPrivateUse1")
    _libraries.extend((fallbacks, autocast))
    return _installed
