"""The result files: checked before the program runs, whole or not there afterwards.

While the program runs, what is known so far stands in ``FILE.partial``; so whatever ends the process, that can be read, and an
older FILE is lost to a complete result only.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from portable.errors import ConfigurationError
from portable.rehearse.result import Result

PARTIAL = ".partial"
MARK = "<!-- portable.rehearsal -->"
"""First line of a Markdown section, by which a later run knows a file that it may replace."""


def ranked(path: Path, rank: int) -> Path:
    """``report.json`` for rank 0, ``report.rank1.json`` and so on for the others."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


class Output:
    """The files of one process.

    Args:
        json_file, markdown_file: where to write, None for nowhere.
        rank: of this process, see `ranked`.

    Raises:
        ConfigurationError: one of them cannot be written, or is somebody else's.
    """

    def __init__(self, json_file: Path | None, markdown_file: Path | None, rank: int = 0) -> None:
        if json_file is not None and markdown_file is not None and json_file.absolute() == markdown_file.absolute():
            raise ConfigurationError(f"--json and --markdown both name {json_file}. Give each a file of its own.")
        self.json = ranked(json_file.absolute(), rank) if json_file else None
        self.markdown = ranked(markdown_file.absolute(), rank) if markdown_file else None
        for path, ours in ((self.json, _is_result), (self.markdown, _is_section)):
            if path is not None:
                _check(path, ours)
        self._lock = threading.RLock()

    def partial(self, result: Result) -> None:
        """Keep what is known so far. A failure to write is no reason to disturb the program."""
        if self.json is not None:
            with self._lock, contextlib.suppress(OSError):
                _write(self.json.with_name(self.json.name + PARTIAL), _json(result))

    def final(self, result: Result, section: Callable[[Result], str]) -> None:
        """Write the files.

        Raises:
            OSError: the folder has gone, or the disk is full.
        """
        with self._lock:
            if self.json is not None:
                _write(self.json, _json(result))
                self.json.with_name(self.json.name + PARTIAL).unlink(missing_ok=True)
            if self.markdown is not None:
                _write(self.markdown, section(result))


def _json(result: Result) -> str:
    return json.dumps(result.as_dict(), indent=1, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    """Write a file beside it and rename that, so that a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # mkstemp's files are the owner's alone
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _check(path: Path, ours: Callable[[Path], bool]) -> None:
    if path.exists():
        if not path.is_file():
            raise ConfigurationError(f"the result was to be written to {path}, which is no file. Name a file.")
        if path.stat().st_size and not ours(path):
            raise ConfigurationError(
                f"the result was to be written to {path}, which exists and is no result of portable rehearse. "
                "Name another file, or remove this one."
            )
        if not os.access(path, os.W_OK):
            raise ConfigurationError(f"the result was to be written to {path}, which is read-only. Name another file.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"the result was to be written to {path}, but no file can be made there: {error.strerror or error}. Name another."
        ) from error


def _is_result(path: Path) -> bool:
    try:
        return str(json.loads(path.read_text(encoding="utf-8")).get("schema")).startswith("portable.rehearsal/")
    except (OSError, ValueError, AttributeError):
        return False


def _is_section(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline().strip() == MARK
    except (OSError, ValueError):
        return False
