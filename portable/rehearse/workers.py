"""Child processes of multiprocessing (torch.multiprocessing.spawn, Process): what they did on the device is added up.

Each writes its observations when it ends, if it used the device at all; a DataLoader's worker does not. A spawned child
unpickles its preparation data before it imports the main module, and an object in that data makes it count (as
`portable.compat.spawn` enters its mode).
"""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

from portable.rehearsal import Rehearsal, current
from portable.rehearse.observations import Observations, observe
from portable.rehearse.steps import Steps

_KEY = "portable_rehearse"
_mine: Worker | None = None  # multiprocessing knows it by a weak reference only


class Worker:
    """What a process needs to know to contribute."""

    def __init__(self, rehearsal: Rehearsal, steps: Steps, folder: Path) -> None:
        self.rehearsal = rehearsal
        self.steps = steps
        self.folder = folder
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._unlock)
        util.register_after_fork(self, Worker._forked)

    def _unlock(self) -> None:
        self.rehearsal.recorder._lock = threading.RLock()  # a thread that only the parent has may have held it

    def _forked(self) -> None:
        self.rehearsal.recorder.reset()
        self.steps.restart()
        self.contribute()

    def contribute(self) -> None:
        """Write what is observed when this process ends."""
        util.Finalize(None, self._write, exitpriority=0)

    def _write(self) -> None:
        seen = observe(self.rehearsal, self.steps)
        if seen.ops and self.folder.is_dir():
            (self.folder / f"{os.getpid()}.pickle").write_bytes(pickle.dumps(seen))

    def gather(self) -> Iterator[Observations]:
        """In the parent, after its children have ended: what they observed."""
        for file in sorted(self.folder.glob("*.pickle")):
            yield pickle.loads(file.read_bytes())
        shutil.rmtree(self.folder, ignore_errors=True)


class Enter:
    """Unpickles by making the process count."""

    def __init__(self, folder: Path, limit: int | None, lenient: bool) -> None:
        self.arguments = (folder, limit, lenient)

    def __reduce__(self) -> tuple[Any, tuple[Path, int | None, bool]]:
        return enter, self.arguments


def enter(folder: Path, limit: int | None, lenient: bool) -> None:
    """In a spawned child, whose device has been started by the backend."""
    rehearsal = current()
    if rehearsal is None:
        return
    rehearsal.keep_going(lenient)
    _contribute(rehearsal, Steps(rehearsal.recorder, limit), folder).contribute()
    _announce(folder, limit, lenient)


def _contribute(rehearsal: Rehearsal, steps: Steps, folder: Path) -> Worker:
    global _mine
    _mine = Worker(rehearsal, steps, folder)
    return _mine


def _announce(folder: Path, limit: int | None, lenient: bool) -> None:
    """Let the children that this process spawns contribute."""
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), _KEY: Enter(folder, limit, lenient)}

    spawn.get_preparation_data = get_preparation_data


def expect(rehearsal: Rehearsal, steps: Steps, lenient: bool) -> Worker:
    """Let the children of this process contribute, forked and spawned ones."""
    folder = Path(tempfile.mkdtemp(prefix="portable-rehearse-"))
    _announce(folder, steps.limit, lenient)
    return _contribute(rehearsal, steps, folder)
