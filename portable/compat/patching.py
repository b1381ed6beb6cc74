"""Replacing attributes and putting every one back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

_ABSENT = object()


class Patches:
    """A stack of replaced attributes. `undo` restores the very objects that were there, in reverse order."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any]] = []
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``; attributes that the owner only inherited are deleted again by `undo`."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._done.append((owner, name, before))

    def later(self, action: Callable[[], None]) -> None:
        """Do something more at the end."""
        self._undo.append(action)

    def owners(self) -> list[tuple[Any, str]]:
        """What is replaced now."""
        return [(owner, name) for owner, name, _ in self._done]

    def undo(self) -> None:
        """Put everything back."""
        while self._done:
            owner, name, before = self._done.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        while self._undo:
            self._undo.pop()()


def truthful_to_torch(original: Any, answer: Any) -> Any:
    """The program is told what it needs to hear; PyTorch's own code, which would act on it, gets the truth.

    TorchInductor, for one, asks torch.cuda for the architecture to compile for.
    """

    @functools.wraps(original)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # which could not trace a look at the stack
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller == "torch" or caller.startswith("torch."):
                return original(*args, **kwargs)
        return answer(*args, **kwargs)

    return asked


def like(original: Any, wrapper: Any, module: str, name: str) -> Any:
    """Give a wrapper the looks of what it replaces, so that it pickles by name and shows the same signature and help."""
    functools.update_wrapper(wrapper, original)
    wrapper.__module__, wrapper.__name__, wrapper.__qualname__ = module, name.rpartition(".")[2], name
    return wrapper
