"""Acting on modules of PyTorch that are imported later, if at all, instead of importing them for every program."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[], None]


class _Finder(MetaPathFinder):
    """Lets the other finders find a module, and acts when it has been executed."""

    def __init__(self, actions: dict[str, list[Action]]) -> None:
        self._actions = actions
        self._busy: set[str] = set()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self._actions or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self._actions.get(fullname, ()):
                action()

        loader.exec_module = exec_module
        return spec


class Imports:
    """Actions to take once a module has been imported."""

    def __init__(self) -> None:
        self._actions: dict[str, list[Action]] = {}
        self._finder = _Finder(self._actions)

    def when_imported(self, module: str, action: Action) -> None:
        """Act now if the module is loaded, otherwise when it has been."""
        if module in sys.modules:
            action()
            return
        self._actions.setdefault(module, []).append(action)
        if self._finder not in sys.meta_path:
            sys.meta_path.insert(0, self._finder)

    def forget(self) -> None:
        """Take no more actions."""
        self._actions.clear()
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
