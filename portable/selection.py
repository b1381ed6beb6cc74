"""Which backend this process uses.

The order: `use`, then the environment variable ``PORTABLE_BACKEND``, then the available backend with the highest declared
priority. The choice is made at the first call that needs it and holds for the process.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from typing import Any, get_args

from portable import plugins
from portable.backend import Backend
from portable.errors import BackendNotFound, BackendUnavailable, ConfigurationError, PluginError
from portable.spec import Availability, Execution

VARIABLE = "PORTABLE_BACKEND"
AUTO = "auto"

_lock = threading.RLock()
_active: Backend | None = None
_calls: dict[str, Any] = {}
active_name: str | None = None
"""Name of the backend in use, None before the choice. A plain string, on which compiled functions can be guarded."""
_availability: dict[str, Availability] = {}
remembered: dict[Any, int] = {}
"""Checked device arguments of the backend in use and their ordinals; a new dict with every choice (see portable.devices)."""


def find(name: str, asked_by: str = "") -> Backend:
    """The backend of this name or alias, available or not.

    Args:
        name: "cuda", "neuron", "ascend", "cpu", the name of a third-party backend, or an alias such as "npu".
        asked_by: where the name came from, for the message.

    Raises:
        BackendNotFound: no plugin provides it.
        ConfigurationError: it is not a string.
    """
    found = plugins.registry()
    if not isinstance(name, str):
        raise ConfigurationError(
            f"backend {name!r} was asked for{asked_by}, which is a {type(name).__name__}, not a name. "
            f"Pass one of {', '.join(sorted(found.backends))}, or None for the best one."
        )
    wanted = name.strip().lower()
    for backend in found.backends.values():
        if wanted == backend.spec.name.lower():
            return backend
    for backend in found.backends.values():  # a name goes before another backend's alias
        if wanted in (alias.lower() for alias in backend.spec.aliases):
            return backend
    broken = "".join(f" Plugin {p.plugin} failed: {p.message}." for p in found.problems)
    raise BackendNotFound(
        f"backend {name!r} was asked for{asked_by}, but the installed plugins provide "
        f"{', '.join(sorted(found.backends)) or 'none'}.{broken} "
        "Choose one of these or install the plugin that provides it (see `portable info`)."
    )


def availability(backend: Backend) -> Availability:
    """Whether a backend can run here; never raises. Asked once per process, and again when its device was emulated since."""
    name = backend.spec.name
    with _lock:
        if name not in _availability or (_made(backend) and not _availability[name].available):
            found = plugins.registry()
            provider = found.providers.get(name, name)
            answer = found.guarded(provider, "probe", backend.probe, _failed_probe)
            if not isinstance(answer, Availability):
                error = PluginError(f"probe() of {provider} returned {answer!r}, not an Availability (portable.spec)")
                answer = _failed_probe(found.report(provider, "probe", error))
            elif answer.execution not in get_args(Execution):
                known = ", ".join(get_args(Execution))
                error = PluginError(f"probe() of {provider} answered execution={answer.execution!r}, which is none of {known}")
                answer = _failed_probe(found.report(provider, "probe", error))
            _availability[name] = answer
        answer, made = _availability[name], _made(backend)  # the probe itself may have made the device
        return replace(answer, execution=made) if made else answer


def _made(backend: Backend) -> Execution | None:
    """How `portable.rehearsal` made this process's devices of the backend's type, None if it did not.

    Whatever a probe says, and through whichever backend they are reached: what is emulated cannot pass for hardware.
    """
    session = sys.modules.get("portable.rehearsal.session")
    current = session.current() if session is not None and hasattr(session, "current") else None
    return current.execution if current is not None and current.profile.device_type == backend.spec.device_type else None


def _failed_probe(problem: plugins.Problem) -> Availability:
    return Availability(False, f"its probe failed: {problem.message}", "report this to the plugin's maintainer")


def resolve(name: str | None = None, asked_by: str = "") -> Backend:
    """The backend of this name, or the best one, ready for use on this machine.

    Args:
        name: a name or alias; None or "auto" for the best available backend.
        asked_by: where the name came from, for the message.

    Raises:
        BackendNotFound: no plugin provides it.
        BackendUnavailable: it cannot run here; the message says why and what to do.
    """
    if name is None or (isinstance(name, str) and name.strip().lower() == AUTO):
        return _best()
    backend = find(name, asked_by)
    answer = availability(backend)
    if not answer.available:
        raise BackendUnavailable(
            f"backend {name!r} was asked for{asked_by}, but it is not available: {answer.reason}. "
            f"Next step: {answer.next_step or 'see `portable info`'}."
        )
    return backend


def _best() -> Backend:
    ranked = sorted(plugins.registry().backends.values(), key=lambda b: (-b.spec.priority, b.spec.name))
    for backend in ranked:
        if availability(backend).available:
            return backend
    reasons = "; ".join(f"{b.spec.name}: {availability(b).reason}" for b in ranked)
    raise BackendUnavailable(
        f"no backend is available ({reasons or 'no plugin provides one'}). Reinstall portable, which brings the cpu backend."
    )


def active() -> Backend:
    """The backend in use; chosen now if it has not been yet.

    Raises:
        BackendNotFound, BackendUnavailable: for the name in ``PORTABLE_BACKEND``.
    """
    backend = _active
    if backend is None:
        with _lock:
            if _active is None:
                asked = os.environ.get(VARIABLE, "").strip() or None
                _activate(resolve(asked, f" by the environment variable {VARIABLE}" if asked else ""))
            backend = _active
            assert backend is not None
    return backend


def call(name: str) -> Any:
    """What a function of the device API reaches on the active backend.

    Args:
        name: torch.cuda's name for it, a key of `portable.catalogue.BY_NAME`.
    """
    try:
        return _calls[name]
    except KeyError:
        with _lock:  # or another thread could take the choice back in between
            active()
            return _calls[name]


def _activate(backend: Backend | None) -> None:
    global _active, _calls, active_name, remembered
    with _lock:
        remembered = {}
        if backend is None:
            _follow_precision(None)
            _active, _calls, active_name = None, {}, None
            return
        try:
            backend.load()
            calls = backend.bind()
        except Exception as error:  # what a vendor's package raises while it starts
            raise BackendUnavailable(
                f"backend {backend.spec.name!r} was chosen and found available, but it failed to start "
                f"({type(error).__name__}: {error}). Next step: import {backend.package_module or 'torch'} in a fresh process "
                f"to see the whole error, or choose another backend (PORTABLE_BACKEND=cpu)."
            ) from error
        _follow_precision(backend)
        active_name = backend.spec.name
        _active, _calls = backend, calls  # replaced whole, so that a concurrent call sees one backend or the other


def _follow_precision(backend: Backend | None) -> None:
    """Set the level that PORTABLE_PRECISION asks for; without the variable nothing is touched, nor imported."""
    if os.environ.get("PORTABLE_PRECISION") or "portable.levels" in sys.modules:
        from portable import levels

        levels.follow_environment(backend)


class Use:
    """The outcome of `use`: the choice already holds; as a context manager it restores the earlier one at the end."""

    def __init__(self, name: str | None) -> None:
        with _lock:
            self._previous = _active
            self._restored = False
            self.backend = resolve(name, " by pt.use")
            _activate(self.backend)

    def __enter__(self) -> Backend:
        with _lock:
            if self._restored:  # a second `with` on the same object
                self._previous, self._restored = _active, False
                _activate(self.backend)
        return self.backend

    def __exit__(self, *exc: object) -> None:
        with _lock:
            self._restored = True
            _activate(self._previous)

    def __repr__(self) -> str:
        return f"use({self.backend.spec.name!r})"


def use(name: str | None = None) -> Use:
    """Choose the backend of this process.

    Args:
        name: "cuda", "neuron", "ascend", "cpu", a third-party backend's name or an alias; None or "auto" for the best.

    Returns:
        An object that may be ignored, or used in a ``with`` statement to go back to the earlier choice.

    Raises:
        BackendNotFound, BackendUnavailable: the earlier choice stays.
    """
    return Use(name)


def backends() -> dict[str, Availability]:
    """Every known backend and whether it can run here."""
    return {name: availability(backend) for name, backend in plugins.registry().backends.items()}


def reset() -> None:
    """Forget the choice, the probes and the plugins (for tests, and after installing a plugin)."""
    with _lock:
        _availability.clear()
        _activate(None)
        plugins.reset()
