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
from portable.spec import BackendSpec

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

    def guarded(
        self, plugin: str, phase: str, function: Callable[[], Any], otherwise: Callable[[Problem], Any] | None = None
    ) -> Any:
        """Call a plugin's function; where it raises, record that and return what ``otherwise`` makes of it, None by default."""
        try:
            return function()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may even call sys.exit
            problem = self.report(plugin, phase, error)
            return otherwise(problem) if otherwise else None

    def report(self, plugin: str, phase: str, error: BaseException) -> Problem:
        """Record an error of a plugin, once however often it comes."""
        problem = Problem(plugin, phase, _last_line(error), "".join(traceback.format_exception(error)))
        if not any((p.plugin, p.phase, p.message) == (plugin, phase, problem.message) for p in self.problems):
            self.problems.append(problem)
        return problem

    def add(self, plugin: object, name: str, distribution: str, shipped: bool = False) -> None:
        """Register a plugin object and take the backend it provides.

        Of two backends with one name, the one that is not shipped with `portable` wins, and a warning says so.
        """
        entry = _Plugin(name, distribution, shipped)
        key = f"{distribution}:{name}"
        if self.guarded(str(entry), "load", lambda: self._manager.register(plugin, key)) is None:
            return
        self._plugins.append(entry)
        self._check_hooks(entry, plugin)
        for backend in self._ask(entry, "portable_backend"):
            self._take(entry, backend)

    def _check_hooks(self, entry: _Plugin, plugin: object) -> None:
        """Report a plugin that does nothing: one without hooks, or with a hook whose name is misspelt."""
        callers = self._manager.get_hookcallers(plugin) or []
        known = ", ".join(name for name in vars(hookspecs) if name.startswith("portable_"))
        if not callers:
            message = f"plugin {entry} implements no hook; mark one with portable.hookspecs.hookimpl ({known})"
            self.report(str(entry), "load", PluginError(message))
        for caller in callers:
            if not caller.has_spec():
                message = f"plugin {entry} implements {caller.name}, which is no hook of portable; the hooks are {known}"
                self.report(str(entry), "load", PluginError(message))

    def _ask(self, entry: _Plugin, hook: str, **kwargs: Any) -> list[Any]:
        own = self._manager.get_plugin(f"{entry.distribution}:{entry.name}")
        others = [plugin for plugin in self._manager.get_plugins() if plugin is not own]
        caller = self._manager.subset_hook_caller(hook, others)
        answers = self.guarded(str(entry), hook, lambda: caller(**kwargs))
        # pluggy leaves None out of the answers, and a forgotten `return` gives None.
        return [None] if answers == [] and caller.get_hookimpls() else answers or []

    def _take(self, entry: _Plugin, backend: Any) -> None:
        error = self.guarded(str(entry), "portable_backend", lambda: _backend_error(backend))
        if error:
            message = f"the hook portable_backend of plugin {entry} returned {error}"
            self.report(str(entry), "portable_backend", PluginError(message))
        if error == "":  # None if reading the declaration raised
            self._keep(entry, backend)

    def _keep(self, entry: _Plugin, backend: Backend) -> None:
        name = backend.spec.name
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
                    self.report(str(entry), hook, PluginError(message))
                    continue
                for item in elements:
                    # A property that raises makes isinstance raise; a class has its instances' names.
                    if self.guarded(str(entry), hook, partial(isinstance, item, element)) and not isinstance(item, type):
                        yield str(entry), item
                    else:
                        message = f"{hook} of plugin {entry} returned a list with {item!r}, which is no {element.__name__}"
                        self.report(str(entry), hook, PluginError(message))


def _backend_error(backend: Any) -> str:
    """What is wrong with a hook's answer, "" if nothing. Only what would break other backends is looked at."""
    if not isinstance(backend, Backend):
        return f"{backend!r} ({type(backend).__name__}); return an instance of a subclass of portable.backend.Backend"
    spec = backend.spec
    if not isinstance(spec, BackendSpec):
        return f"a backend whose spec is {spec!r} ({type(spec).__name__}); make it a portable.spec.BackendSpec"
    for field_name, kind, example in _SHARED_FIELDS:
        value = getattr(spec, field_name)
        if not isinstance(value, kind) or value == "":
            return f"a backend whose spec has {field_name}={value!r}; make it like {example}"
    if not all(isinstance(alias, str) for alias in spec.aliases):
        return f"a backend whose spec has aliases={spec.aliases!r}; make it a tuple of names"
    return ""


# The fields by which backends are compared with one another.
_SHARED_FIELDS: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("name", str, '"acme"'),
    ("device_type", str, '"acme"'),
    ("priority", int, "100"),
    ("aliases", (tuple, list), '("acme_npu",)'),
)


def _last_line(error: BaseException) -> str:
    """The exception as the last line of its traceback; of a message with several lines the first and the last."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0].strip()} ... {lines[-1].strip()}"


_lock = threading.RLock()
_registry: Registry | None = None


def registry() -> Registry:
    """The plugins of this process, looked for on the first call."""
    global _registry
    with _lock:
        if _registry is None:
            _registry = _discover()
        return _registry


def found() -> Registry | None:
    """The plugins if they have been looked for; None before that, and while it is going on."""
    return _registry


def reset() -> None:
    """Forget what was found, so that the next use looks again (after installing a plugin, and in tests)."""
    global _registry
    with _lock:
        _registry = None


def _discover() -> Registry:
    found = Registry()
    # Reading them fails for all packages at once if one's metadata is malformed.
    entries = found.guarded("every plugin", "discovery", lambda: importlib.metadata.entry_points(group=hookspecs.PROJECT))
    entries = sorted(entries or (), key=_order)
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        distribution = " ".join(_distribution(entry))
        # An editable install and its source tree may both announce the same entry point.
        if (entry.value, entry.name) in seen:
            continue
        seen.add((entry.value, entry.name))
        shipped = _distribution(entry)[0] == DISTRIBUTION
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
    distribution, _ = _distribution(entry)
    return (distribution != DISTRIBUTION, distribution, entry.name)


def _distribution(entry: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """Name and version of the package that announces an entry point, as far as its metadata tells."""
    try:
        if entry.dist is not None:
            return str(entry.dist.name or "unnamed"), str(entry.dist.version)
    except Exception:  # metadata without a name or version, or none at all
        pass
    return "unknown distribution", ""
