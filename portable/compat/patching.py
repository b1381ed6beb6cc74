"""Replacing attributes and putting every one back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

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


def like(original: Any, wrapper: Any, module: str, name: str) -> Any:
    """Give a wrapper the looks of what it replaces, so that it pickles by name and shows the same signature and help."""
    functools.update_wrapper(wrapper, original)
    wrapper.__module__, wrapper.__name__, wrapper.__qualname__ = module, name.rpartition(".")[2], name
    return wrapper
