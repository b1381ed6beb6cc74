"""Lines of the program: from the recorder's text to file and number, and the line's own text."""

from __future__ import annotations

import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)(?P<backward> \(backward\))?")


@dataclass(frozen=True)
class Where:
    """A line; file "" and line 0 if it is not known."""

    file: str
    line: int
    backward: bool = False

    def code(self, folder: str) -> str:
        """Text of the line, "" if it cannot be had; a relative file is looked for in the folder."""
        return linecache.getline(os.path.join(folder, self.file), self.line).strip() if self.line else ""  # noqa: PTH118

    def __str__(self) -> str:
        return f"{self.file or 'unknown'}:{self.line}" if self.line else self.file or "unknown"


def shown(path: str, folder: str) -> str:
    """A path relative to a folder if it lies in it, else as it is."""
    if not Path(path).is_absolute():
        return path
    try:
        inside = os.path.relpath(path, folder)
    except ValueError:  # another drive
        return path
    return path if inside.startswith("..") else inside


def where(text: str, folder: str) -> Where:
    """Read ``file.py:12 (backward)``.

    Args:
        text: as `portable.rehearsal.sources.line` writes it.
        folder: the folder that files are shown relative to.
    """
    found = _LINE.fullmatch(text)
    if found is None:
        return Where("", 0, "(backward)" in text)
    file = found["file"]
    if not Path(folder, file).exists() and Path(file).exists():  # the program has changed the current folder
        file = str(Path(file).absolute())
    return Where(shown(file, folder), int(found["line"]), found["backward"] is not None)
