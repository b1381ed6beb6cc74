"""Entering and leaving the mode."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from portable import selection
from portable.backend import Backend
from portable.compat import (
    accelerator,
    amp,
    backends,
    caches,
    cuda_extras,
    cuda_module,
    distributed,
    factories,
    legacy,
    loading,
    parallel,
    script,
    spawn,
    training,
)
from portable.compat.patching import Patches
from portable.compat.report import Recorder
from portable.compat.target import SOURCE, Off, Target
from portable.errors import ConfigurationError

_AREAS = (
    factories, legacy, cuda_module, cuda_extras, accelerator, amp, backends, loading, distributed, parallel,
    script, training, spawn, caches,
)  # fmt: skip

_lock = threading.RLock()
_patches = Patches()
_targets: list[Target] = []
_OFF = Off()


def _after_fork() -> None:
    """A thread that another process has may have held the lock when this one was forked."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def current() -> Target:
    """The target in force; one that changes nothing if there is none."""
    try:
        return _targets[-1]
    except IndexError:
        return _OFF


class cuda_compat:
    """Run code written for CUDA on another backend, as a context manager.

    The whole process is affected, all threads and child processes included. Entering again with the same backend nests;
    another backend inside is refused, since tensors of the outer one would be around. On leaving, every replaced attribute is
    the same object as before.

    Args:
        backend: name of the backend; the active one by default. With "cuda" nothing is replaced.
        recorder: where uses are counted; a new one by default.

    Attributes:
        recorder: what was redirected, changed, or had no equivalent.

    Raises:
        BackendNotFound, BackendUnavailable: as `pt.use`.
        ConfigurationError: another backend is in force already.
    """

    def __init__(self, backend: str | None = None, recorder: Recorder | None = None) -> None:
        self._name = backend
        self.recorder = recorder or Recorder()
        self._uses: list[tuple[selection.Use, Target | None]] = []

    def __enter__(self) -> cuda_compat:
        with _lock:
            chosen = selection.resolve(self._name, " by pt.cuda_compat") if self._name else selection.active()
            if _targets and _targets[-1].backend is not chosen:
                raise ConfigurationError(
                    f"pt.cuda_compat({chosen.spec.name!r}) was asked for inside pt.cuda_compat("
                    f"{_targets[-1].backend.spec.name!r}): one process can stand in for one device at a time. "
                    "Leave the outer block first, or use a process of its own."
                )
            use = selection.use(chosen.spec.name)
            if chosen.spec.device_type == SOURCE:
                self._uses.append((use, None))
                return self
            target = Target(chosen, self.recorder)
            _targets.append(target)
            if len(_targets) == 1:
                try:
                    caches.prime()
                    for area in _AREAS:
                        area.install(_patches, current)
                except BaseException:
                    _patches.undo()
                    _targets.pop()
                    use.__exit__(None, None, None)
                    raise
            self._uses.append((use, target))
        return self

    @property
    def backend(self) -> Backend:
        """The backend that programs run on; inside the block only."""
        return self._uses[-1][0].backend

    @property
    def replaces(self) -> bool:
        """Whether anything is replaced; inside the block only. On CUDA nothing is."""
        return self._uses[-1][1] is not None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _lock:
            use, target = self._uses.pop()
            if target is not None:
                _targets.remove(target)  # not always the last one: blocks of several threads need not nest
                if not _targets:
                    originals = _patches.originals()
                    _patches.undo()
                    caches.restore(originals)
            use.__exit__(kind, error, trace)
