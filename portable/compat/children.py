"""Records of child processes: each writes its own when it ends, and the program's report adds them up.

Children of multiprocessing are meant (DataLoader workers, torch.multiprocessing.spawn, Process). One that is killed, or that
ends through os._exit, leaves no record.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from multiprocessing import util
from pathlib import Path

from portable.compat.report import Entry, Recorder


def expect(recorder: Recorder) -> None:
    """Make a folder for the records of this process's children, present and future."""
    recorder.folder = Path(tempfile.mkdtemp(prefix="portable-run-"))
    util.register_after_fork(recorder, _forked)


def contribute(recorder: Recorder, folder: Path) -> None:
    """In a child: write what is recorded to the parent's folder when the process ends."""
    recorder.folder = folder
    util.Finalize(None, _write, args=(recorder,), exitpriority=0)
    util.register_after_fork(recorder, _forked)


def gather(recorder: Recorder) -> None:
    """In the parent, when the interpreter ends: let multiprocessing end its children, and add up their records.

    Its own exit handler does that in the right order (the server of a Manager, for one, ends only when it is told to, and
    joining it first would wait for ever); a second call of it does nothing.
    """
    folder, recorder.folder = recorder.folder, None
    if folder is None:
        return
    util._exit_function()  # type: ignore[attr-defined]
    for file in sorted(folder.glob("*.json")):
        recorder.add([Entry(**entry) for entry in json.loads(file.read_text(encoding="utf-8"))["entries"]])
        recorder.children += 1
    shutil.rmtree(folder, ignore_errors=True)


def _forked(recorder: Recorder) -> None:
    """At the start of a child. A forked one has a copy of the parent's record; a spawned one what its imports did."""
    if recorder.process != os.getpid():
        recorder.process = os.getpid()
        recorder.clear()
    if recorder.folder is not None:
        util.Finalize(None, _write, args=(recorder,), exitpriority=0)


def _write(recorder: Recorder) -> None:
    if recorder.folder is not None and recorder.folder.is_dir() and recorder.entries():
        recorder.write(recorder.folder / f"{os.getpid()}.json")
