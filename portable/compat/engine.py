"""Entering and leaving the mode."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from portable import selection
from portable.compat import accelerator, amp, cuda_module, distributed, factories, legacy, loading, spawn, training
from portable.compat.patching import Patches
from portable.compat.report import Recorder
from portable.compat.target import SOURCE, Target
from portable.errors import ConfigurationError

_AREAS = (factories, legacy, cuda_module, accelerator, amp, loading, distributed, training, spawn)

_lock = threading.RLock()
_patches = Patches()
_targets: list[Target] = []


def current() -> Target:
    """The target in force."""
    return _targets[-1]


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
        self._uses: list[selection.Use] = []

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
                self._uses.append(use)
                return self
            _targets.append(Target(chosen, self.recorder))
            if len(_targets) == 1:
                try:
                    for area in _AREAS:
                        area.install(_patches, current)
                except BaseException:
                    _patches.undo()
                    _targets.pop()
                    use.__exit__(None, None, None)
                    raise
            self._uses.append(use)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _lock:
            use = self._uses.pop()
            if use.backend.spec.device_type != SOURCE:
                _targets.pop()
                if not _targets:
                    _patches.undo()
                    _forget()
            use.__exit__(kind, error, trace)


def _forget() -> None:
    """Drop what Dynamo remembered of the wrappers (torch/_dynamo/trace_rules.py keeps maps by object)."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    for name in ("get_torch_obj_rule_map", "get_tensor_method"):
        clear = getattr(getattr(rules, name, None), "cache_clear", None)
        if clear is not None:
            clear()
