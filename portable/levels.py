"""Setting a precision level for a block, a function or the process, and taking it back.

Switches belong to the process, not to a thread, as all of ``torch.backends`` does. Blocks may nest, and may end in another
order than they began (threads, generators): the latest one that is still open decides, and when the last one ends
everything is as it was before the first.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from portable.backend import Backend
from portable.errors import ConfigurationError
from portable.selection import active
from portable.switches import LEVELS, Control, Level

VARIABLE = "PORTABLE_PRECISION"

log = logging.getLogger("portable")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_lock = threading.RLock()
_told: set[str] = set()


@dataclass(eq=False)
class Entry:
    """A level that is set, with what takes it back: for each control, by its key."""

    level: Level
    saved: dict[str, tuple[Control, Any]]


_open: list[Entry] = []


def checked(level: object, asked_by: str) -> Level:
    """The level of this name.

    Raises:
        ConfigurationError: there is none.
    """
    wanted = level.strip().lower() if isinstance(level, str) else level
    for name in LEVELS:
        if wanted == name:
            return name
    raise ConfigurationError(f"{asked_by} asks for the precision level {level!r}. Use one of {', '.join(map(repr, LEVELS))}.")


def in_force() -> Level | None:
    """The level that was set last and is still set, None if there is none."""
    with _lock:
        return _open[-1].level if _open else None


def enter(level: Level, backend: Backend) -> Entry:
    """Set a level.

    The generation is asked only where a control needs it: asking some devices starts them.

    Raises:
        ConfigurationError: something that was fixed when the process started rules the level out; nothing is changed.
    """
    with _lock:
        ask = functools.cache(backend.generation)
        controls: Sequence[Control] = backend.precision_controls()
        obstacles = [why for control in controls if (why := control.obstacle(level, ask))]
        if obstacles:
            raise ConfigurationError(f"the precision level {level!r} cannot be had: {' '.join(obstacles)}")
        entry = Entry(level, {})
        try:
            for control in controls:
                entry.saved[control.key] = (control, control.apply(level, ask))
        except BaseException:
            _restore(entry)
            raise
        _open.append(entry)
        if level == "strict":
            for rest in filter(None, (control.remains(ask) for control in controls)):
                if rest not in _told:
                    _told.add(rest)
                    log.warning("strict precision: %s", rest)
        return entry


def leave(entry: Entry) -> None:
    """Take a level back; under a later one that is still set, that one goes on."""
    with _lock:
        place = _open.index(entry)
        if place == len(_open) - 1:
            _open.pop()
            _restore(entry)
            return
        above = _open[place + 1]
        for key, (control, saved) in entry.saved.items():
            if key in above.saved:
                saved = control.merge(saved, above.saved[key][1])
            above.saved[key] = (control, saved)
        del _open[place]


def _restore(entry: Entry) -> None:
    for control, saved in reversed(entry.saved.values()):
        control.restore(saved)


def _untraced(function: _Function) -> _Function:
    """The function, of which Dynamo sees the call only; it is not loaded for this, which takes seconds."""
    dynamo = sys.modules.get("torch._dynamo")
    return function if dynamo is None else dynamo.disable(function)


class PrecisionLevel:
    """A level for a ``with`` block, for a decorated function, or with `keep` for the process.

    It does nothing until one of these is used. A decorated generator has the level while it runs and not between its values; a
    coroutine from its start to its end, and what else runs while it waits has it too. Around a compiled function it costs a
    compilation for each level; inside one, PyTorch runs that function uncompiled.
    """

    def __init__(self, level: Level) -> None:
        self.level = level
        self._entries: list[Entry] = []
        self._used = False

    def __enter__(self) -> PrecisionLevel:
        self._used = True
        self._entries.append(_untraced(enter)(self.level, active()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _untraced(leave)(self._entries.pop())

    def keep(self) -> None:
        """Set the level for the rest of the process; blocks inside may set others for themselves."""
        self.__enter__()
        self._entries.clear()

    def __call__(self, function: _Function) -> _Function:
        """Decorate a function, generator or coroutine; the backend is asked at each call."""
        self._used = True
        if inspect.isclass(function) or not callable(function):
            raise ConfigurationError(
                f"pt.precision({self.level!r}) was applied to {function!r}, which is not a function. Decorate its methods."
            )
        if inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                f"pt.precision({self.level!r}) cannot decorate the asynchronous generator {function.__qualname__}. Use a with "
                "statement inside it, around what is to run under the level."
            )
        if inspect.iscoroutinefunction(function):
            return _coroutine(self.level, function)  # type: ignore[return-value]
        from torch.utils._contextlib import context_decorator

        return context_decorator(lambda: PrecisionLevel(self.level), function)  # type: ignore[no-any-return]

    def __del__(self) -> None:
        if not getattr(self, "_used", True):
            log.warning(
                "pt.precision(%r) changed nothing: use it in a with statement, as a decorator, or call its keep().", self.level
            )

    def __repr__(self) -> str:
        return f"precision({self.level!r})"


def _coroutine(level: Level, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        with PrecisionLevel(level):
            return await function(*args, **kwargs)

    return call


# -- the environment -----------------------------------------------------------------------------------------------------------

_from_environment: Entry | None = None


def asked() -> Level | None:
    """What PORTABLE_PRECISION asks for.

    Raises:
        ConfigurationError: no such level.
    """
    text = os.environ.get(VARIABLE, "").strip()
    return checked(text, f"the environment variable {VARIABLE}") if text else None


def follow_environment(backend: Backend | None) -> None:
    """Set for a backend that is being chosen what PORTABLE_PRECISION asks for, and take back what the one before got.

    Raises:
        ConfigurationError: the level does not exist or cannot be had; what was set stays.
    """
    global _from_environment
    with _lock:
        level = asked() if backend is not None else None
        found = enter(level, backend) if backend is not None and level is not None else None
        if _from_environment is not None:
            leave(_from_environment)
        _from_environment = found
