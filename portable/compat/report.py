"""What the compatibility mode did: how often, where first, and what had no equivalent."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

Key = tuple[str, str, str]
Kind = Literal["redirected", "changed", "no equivalent"]
_STANDARD = Path(sysconfig.get_paths()["stdlib"])
_SITE = Path(torch.__file__).parent.parent
# Frames that are not the program's: ours, PyTorch's, the standard library's, and the decorator behind @deprecated.
_OWN = (
    str(Path(__file__).parent.parent) + os.sep,
    str(_SITE / "torch") + os.sep,
    str(_SITE / "typing_extensions.py"),
    str(_STANDARD / "contextlib.py"),
    str(_STANDARD / "warnings.py"),
    "<frozen ",
)


@dataclass
class Entry:
    """One construct.

    Attributes:
        kind: redirected (the same on the target), changed (dropped or replaced, results may differ in speed or rounding), or
            without equivalent (the call raised).
        construct: what the program wrote ("Tensor.to", "torch.cuda.memory_allocated").
        detail: what became of it.
        count: how often.
        where: file and line of the first time.
    """

    kind: Kind
    construct: str
    detail: str
    count: int
    where: str


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _after_fork() -> None:
    """A thread that another process has may have held a lock when this one was forked."""
    for recorder in list(_recorders):
        recorder._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Recorder:
    """Counts constructs; cheap enough for a training loop, and thread-safe.

    Attributes:
        folder: where child processes put their records; None if they are not collected.
        children: number of child processes whose records are included.
        process: the process that the counts are of.
    """

    folder: Path | None = None
    children = 0

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._counters: dict[Key, count] = {}  # next() on them is atomic, which saves a lock at each use
        self._lock = threading.Lock()
        self.process = os.getpid()
        _recorders.add(self)

    def note(self, kind: Kind, construct: str, detail: str) -> None:
        """Count one use."""
        key = (kind, construct, detail)
        counter = self._counters.get(key)
        if counter is None:
            with self._lock:
                if key not in self._counters:
                    self._entries[key] = Entry(kind, construct, detail, 0, call_site())
                    self._counters[key] = count()
                counter = self._counters[key]
        next(counter)

    def add(self, entries: Iterable[Entry]) -> None:
        """Add the counts of another record."""
        with self._lock:
            for entry in entries:
                key = (entry.kind, entry.construct, entry.detail)
                mine = self._entries.setdefault(key, replace(entry, count=0))
                mine.count += entry.count
                self._counters.setdefault(key, count())

    def clear(self) -> None:
        """Start from nothing."""
        with self._lock:
            self._entries.clear()
            self._counters.clear()

    def entries(self) -> list[Entry]:
        """All constructs: by kind, then the most frequent first."""
        order = {"no equivalent": 0, "changed": 1, "redirected": 2}
        with self._lock:
            found = [
                replace(entry, count=entry.count + int(repr(self._counters[key])[len("count(") : -1]))
                for key, entry in self._entries.items()
            ]
            return sorted(found, key=lambda e: (order[e.kind], -e.count, e.construct))

    def as_dict(self, backend: str, execution: str) -> dict[str, Any]:
        """The same as plain containers, for JSON; ``execution`` says what the backend ran on (portable.provenance)."""
        entries = [asdict(entry) for entry in self.entries()]
        found = {"schema": 1, "backend": backend, "execution": execution}
        return {**found, "child_processes": self.children, "entries": entries}

    def write(self, path: Path, backend: str = "", execution: str = "") -> None:
        """Write JSON; the file appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.as_dict(backend, execution), indent=2), encoding="utf-8")
        partial.replace(path)

    def show(self, backend: str, replaced: bool = True, notice: str = "") -> None:
        """Print a table on standard error.

        Args:
            backend: where the program ran.
            replaced: False if that was CUDA itself.
            notice: what to say of a backend that is no hardware.
        """
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(stderr=True)
        if not console.is_terminal:
            console.width = 140  # a log file has room; folded paths would be hard to search for
        entries = self.entries()
        if notice:
            console.print(f"portable run: {notice}")
        if not replaced:
            console.print(f"portable run: the program ran on the {backend} backend as it is; nothing was replaced")
            return
        if not entries:
            console.print(f"portable run: nothing in this program was bound to CUDA ({backend} backend)")
            return
        children = f", {self.children} child process{'es' if self.children > 1 else ''} included" if self.children else ""
        table = Table(title=f"portable run: CUDA on the {backend} backend{children}", title_justify="left", show_edge=False)
        table.add_column("", no_wrap=True)
        table.add_column("construct", overflow="fold", ratio=3)
        table.add_column("became", overflow="fold", ratio=4)
        table.add_column("times", justify="right", no_wrap=True)
        table.add_column("first at", overflow="fold", ratio=2)
        for entry in entries:
            style = {"no equivalent": "red", "changed": "yellow", "redirected": "green"}[entry.kind]
            cells = (escape(entry.construct), escape(entry.detail), str(entry.count), escape(entry.where))
            table.add_row(f"[{style}]{entry.kind}[/]", *cells)
        console.print(table)


def call_site() -> str:
    """File and line of the innermost frame that is neither PyTorch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN):
            try:
                shown = os.path.relpath(file)
            except (ValueError, OSError):  # another drive; a current folder that is gone
                shown = file
            return f"{shown if not shown.startswith('..') else file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
