"""Discovery of plugins: lazy, and safe against plugins that fail.

Nothing is looked for until a backend is first needed. Each plugin is loaded and asked on its own, so that one that raises is
recorded as a `Problem` and never hides the others.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pluggy

from portable import hookspecs
from portable.backend import Backend
from portable.errors import PluginError

DISTRIBUTION = "portable"
# Known by import name too, so that a source tree on PYTHONPATH works without being installed.
SHIPPED = ("portable_cpu", "portable_cuda", "portable_neuron", "portable_ascend", "portable_generic")


@dataclass(frozen=True)
class Problem:
    """A plugin that failed.

    Attributes:
        plugin: the plugin's name with its distribution, "acme (portable-acme 1.0)".
        phase: what it was asked to do: "load", "portable_backend", "probe" ...
        message: the last line of its traceback.
        detail: the whole traceback.
    """

    plugin: str
    phase: str
    message: str
    detail: str


@dataclass(frozen=True)
class _Plugin:
    name: str
    distribution: str
    shipped: bool

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution})"


@dataclass
class Registry:
    """All plugins found, the backends they provide, and what went wrong."""

    backends: dict[str, Backend] = field(default_factory=dict)
    providers: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _manager: pluggy.PluginManager = field(default_factory=lambda: pluggy.PluginManager(hookspecs.PROJECT))
    _plugins: list[_Plugin] = field(default_factory=list)
    _ours: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._manager.add_hookspecs(hookspecs)

    def guarded(self, plugin: str, phase: str, function: Callable[[], Any]) -> Any:
        """Call a plugin's function; record what it raises and return None then."""
        try:
            return function()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may even call sys.exit
            message = traceback.format_exception_only(error)[-1].strip()
            self.problems.append(Problem(plugin, phase, message, traceback.format_exc()))
            return None

    def add(self, plugin: object, name: str, distribution: str, shipped: bool = False) -> None:
        """Register a plugin object and take the backend it provides.

        Of two backends with one name, the one that is not shipped with `portable` wins, and a warning says so.
        """
        entry = _Plugin(name, distribution, shipped)
        key = f"{distribution}:{name}"
        if self.guarded(str(entry), "load", lambda: self._manager.register(plugin, key)) is None:
            return
        self._plugins.append(entry)
        for backend in self._ask(entry, "portable_backend"):
            if not isinstance(backend, Backend):
                error = PluginError(
                    f"the hook portable_backend of plugin {entry} returned {backend!r} ({type(backend).__name__}); "
                    "return an instance of a subclass of portable.backend.Backend"
                )
                self._report(entry, "portable_backend", error)
                continue
            self._take(entry, backend)

    def _report(self, entry: _Plugin, phase: str, error: Exception) -> None:
        def fail() -> None:
            raise error

        self.guarded(str(entry), phase, fail)

    def _ask(self, entry: _Plugin, hook: str, **kwargs: Any) -> list[Any]:
        own = self._manager.get_plugin(f"{entry.distribution}:{entry.name}")
        others = [plugin for plugin in self._manager.get_plugins() if plugin is not own]
        caller = self._manager.subset_hook_caller(hook, others)
        return self.guarded(str(entry), hook, lambda: caller(**kwargs)) or []

    def _take(self, entry: _Plugin, backend: Backend) -> None:
        name = self.guarded(str(entry), "portable_backend", lambda: str(backend.spec.name))
        if name is None:
            return
        if name in self.backends:
            # A third-party backend replaces ours; of two third-party ones the first stays.
            wins = self._ours[name] and not entry.shipped
            kept, dropped = (str(entry), self.providers[name]) if wins else (self.providers[name], str(entry))
            warnings.warn(
                f"two plugins provide the backend {name!r}: {kept} is used, {dropped} is not; "
                "uninstall one of them to silence this",
                stacklevel=2,
            )
            if not wins:
                return
        self.backends[name] = backend
        self.providers[name] = str(entry)
        self._ours[name] = entry.shipped

    def collect(self, hook: str, element: type, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Ask every plugin for the elements of a list hook.

        Args:
            hook: name of a hook in `portable.hookspecs` that returns a sequence.
            element: runtime-checkable protocol that each element must satisfy; others are reported and left out.
            kwargs: arguments of the hook.

        Yields:
            (plugin, element) pairs.
        """
        for entry in list(self._plugins):
            for found in self._ask(entry, hook, **kwargs):
                elements = found if isinstance(found, (list, tuple)) else None
                if elements is None:
                    message = f"{hook} of plugin {entry} returned {found!r}; return a list of {element.__name__} objects"
                    self._report(entry, hook, PluginError(message))
                    continue
                for item in elements:
                    if isinstance(item, element):
                        yield str(entry), item
                    else:
                        message = f"{hook} of plugin {entry} returned a list with {item!r}, which is no {element.__name__}"
                        self._report(entry, hook, PluginError(message))


_lock = threading.RLock()
_registry: Registry | None = None


def registry() -> Registry:
    """The plugins of this process, looked for on the first call."""
    global _registry
    with _lock:
        if _registry is None:
            _registry = _discover()
        return _registry


def reset() -> None:
    """Forget what was found, so that the next use looks again (after installing a plugin, and in tests)."""
    global _registry
    with _lock:
        _registry = None


def _discover() -> Registry:
    found = Registry()
    entries = sorted(importlib.metadata.entry_points(group=hookspecs.PROJECT), key=_order)
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"
        # An editable install and its source tree may both announce the same entry point.
        if (entry.value, entry.name) in seen:
            continue
        seen.add((entry.value, entry.name))
        shipped = bool(entry.dist and entry.dist.name == DISTRIBUTION)
        label = str(_Plugin(entry.name, distribution, shipped))
        plugin = found.guarded(label, "load", entry.load)
        if plugin is not None:
            found.add(plugin, entry.name, distribution, shipped)
    for module in SHIPPED:
        announced = any(entry.value.partition(":")[0] == module for entry in entries)
        if not announced and (module in sys.modules or importlib.util.find_spec(module)):
            name = module.removeprefix("portable_")
            loaded = found.guarded(f"{name} (source tree)", "load", partial(importlib.import_module, module))
            if loaded is not None:
                found.add(loaded, name, "source tree", shipped=True)
    return found


def _order(entry: importlib.metadata.EntryPoint) -> tuple[bool, str, str]:
    """Ours first, then by distribution and name, so that the outcome does not depend on the order of sys.path."""
    distribution = entry.dist.name if entry.dist else ""
    return (distribution != DISTRIBUTION, distribution, entry.name)
