"""Child processes that start afresh (multiprocessing's spawn and forkserver): the mode is entered there too.

A forked child inherits everything. A spawned one unpickles its preparation data before it imports the main module
(multiprocessing/spawn.py, ``_main`` and ``prepare``); an object in that data whose unpickling enters the mode is all it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from portable.compat import children
from portable.compat.patching import Patches
from portable.compat.target import Target

_KEY = "portable_cuda_compat"


class Enter:
    """Unpickles by entering the mode, for the life of the process."""

    def __init__(self, backend: str, folder: Path | None) -> None:
        self.backend = backend
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str, Path | None]]:
        return enter, (self.backend, self.folder)


def enter(backend: str, folder: Path | None = None) -> None:
    """Enter the mode and stay in it; the record goes to the parent, which prints the report."""
    from portable._loading import ensure_torch

    ensure_torch()
    from portable.compat.engine import cuda_compat

    mode = cuda_compat(backend)
    mode.__enter__()
    if folder is not None:
        children.contribute(mode.recorder, folder)


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Add the object to the preparation data."""
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        here = target()
        data[_KEY] = Enter(here.backend.spec.name, here.recorder.folder)
        return data

    patches.set(spawn, "get_preparation_data", get_preparation_data)
    # popen_forkserver and popen_spawn_posix call it through the module, so one place suffices.
