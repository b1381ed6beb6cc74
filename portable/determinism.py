"""`pt.deterministic`: runs that repeat bit for bit on one machine."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch

from portable.selection import active
from portable.support import lookup


class deterministic:
    """Make runs repeat bit for bit; takes effect at once, and as a context manager restores everything at the end.

    Sets ``torch.use_deterministic_algorithms`` and what the backend declares beyond it (cuDNN's autotuner, cuBLAS' workspace
    variable, Ascend's deterministic level). Results still differ between devices, versions and numbers of threads.

    A library that reads its variable when it starts does not see one that is set later: call this first in a program.

    Args:
        enabled: False allows nondeterministic kernels again.
        warn_only: an operator without a deterministic kernel warns instead of raising RuntimeError.
    """

    def __init__(self, enabled: bool = True, *, warn_only: bool = False) -> None:
        self._asked = (enabled, warn_only)
        self._depth = 0
        self._apply()

    def _apply(self) -> None:
        enabled, warn_only = self._asked
        spec = active().spec.determinism
        self._restored = False
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._flags: dict[str, Any] = {}
        self._environment: list[str] = []
        if enabled:
            for path, value in spec.flags.items():
                owner, _, name = path.rpartition(".")
                target = lookup(f"torch.{owner}", None)
                if target is not None and hasattr(target, name):
                    self._flags[path] = getattr(target, name)
                    setattr(target, name, value)
            for key, value in spec.environment.items():
                if key not in os.environ:
                    self._environment.append(key)
                    os.environ[key] = value
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)

    def __enter__(self) -> deterministic:
        if self._restored:  # a second `with` on the same object
            self._apply()
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth > 0:  # the same object in an inner block
            return
        self._restored = True
        enabled, warn_only = self._before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        for path, value in self._flags.items():
            owner, _, name = path.rpartition(".")
            setattr(lookup(f"torch.{owner}", None), name, value)
        for key in self._environment:
            os.environ.pop(key, None)
