"""Tensor subclasses with a ``__torch_function__`` of their own, which compare the function they are given by identity.

A library that was imported while the mode is on has the replacements in its tables; one that was imported before has the
originals. Each is handed what it knows.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import handle_torch_function

_loaded: dict[str, Any] = {}
_before: dict[type, bool] = {}


def begin() -> None:
    """Remember which modules are loaded."""
    _loaded.clear()
    _loaded.update(sys.modules)
    _before.clear()


def end() -> None:
    """Forget them."""
    _loaded.clear()
    _before.clear()


def defined_before(kind: type) -> bool:
    """Whether the module of a class was imported before the mode was entered."""
    answer = _before.get(kind)
    if answer is None:
        module = kind.__module__
        answer = module in _loaded and _loaded[module] is sys.modules.get(module)
        _before[kind] = answer
    return answer


def overrides(tensor: Any) -> bool:
    """Whether a tensor's class has a say in what functions do with it, and is not in the middle of saying it."""
    return (
        type(tensor) is not torch.Tensor
        and isinstance(tensor, torch.Tensor)
        and not torch.compiler.is_dynamo_compiling()
        and torch._C._has_torch_function_unary(tensor)
    )


def call_method(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of Tensor. PyTorch hands a subclass what it finds under the method's name, which is the replacement."""
    if overrides(self) and defined_before(type(self)):
        return handle_torch_function(original, (self,), self, *args, **kwargs)
    return original(self, *args, **kwargs)


def call_function(original: Any, replacement: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch on a tensor. PyTorch hands a subclass the original, whatever its name leads to."""
    if args and overrides(args[0]) and not defined_before(type(args[0])):
        return handle_torch_function(replacement, (args[0],), *args, **kwargs)
    return original(*args, **kwargs)
