"""Checkpoints that survive a kill at any moment, and that say what is wrong with them.

A checkpoint is one file of `torch.save` with tensors, numbers, strings and plain containers only, so that it loads with
``weights_only=True`` and cannot run code. A folder holds the newest one and the one before it:

* A new file is written beside them under a temporary name and forced to the disk; then the newest becomes the one before
  by a second name (a hard link), and the new file takes over the newest name by a rename. A rename replaces a name in one
  step (POSIX, rename(2)), so at every moment the newest name means a complete file: the old one or the new one.
* Reading checks the CRC-32 of every part (torch.load does not), so that a flipped bit is an error and not a wrong weight.
* A damaged newest file is never passed over in silence. The one before it is used only on request: it holds older weights,
  and whoever lost data should learn of it. The damaged file is then kept under a third name.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

FORMAT = "portable-example-gpt"
VERSION = 1
NEWEST = "checkpoint.pt"
PREVIOUS = "checkpoint.prev.pt"
LOCK = ".lock"
_TEMPORARY = ".checkpoint-"
_ZIP_START = b"PK\x03\x04"


class CheckpointError(Exception):
    """A checkpoint that cannot be used or written; the message says what was asked, what was found and what to do."""


class DamagedCheckpoint(CheckpointError):
    """A file that is cut off, altered, or no checkpoint of this program.

    Attributes:
        path: the file.
        problem: what is wrong with it.
    """

    def __init__(self, path: Path, problem: str, advice: str = "") -> None:
        super().__init__(f"a checkpoint was asked for, but {path} {problem}.{' ' + advice if advice else ''}")
        self.path = path
        self.problem = problem


class CheckpointMismatch(CheckpointError):
    """A sound checkpoint of another model, text or way of training.

    Attributes:
        differences: name to (asked, found).
    """

    def __init__(self, path: Path, differences: Mapping[str, tuple[Any, Any]], advice: str) -> None:
        listed = "; ".join(f"{name}: asked {asked}, found {found}" for name, (asked, found) in differences.items())
        super().__init__(f"{path} belongs to another run. {listed}. {advice}")
        self.differences = dict(differences)


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint, its tensors on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedCheckpoint: the file is cut off, altered, holds more than plain data, or was written by another program.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        starts_as_zip = file.read(len(_ZIP_START)) == _ZIP_START
    if not zipfile.is_zipfile(path):
        if starts_as_zip:
            raise DamagedCheckpoint(path, f"is cut off: its {size:,} bytes lack the directory that ends a whole file")
        raise DamagedCheckpoint(path, f"is not a checkpoint: its {size:,} bytes are not a file of torch.save")
    try:
        with zipfile.ZipFile(path) as archive:
            altered = archive.testzip()
        if altered is not None:
            raise DamagedCheckpoint(path, f"is damaged: the checksum of its part {altered!r} does not match")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DamagedCheckpoint(
            path, "is not a checkpoint of this program: it holds objects other than tensors and plain data"
        ) from error
    except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, NotImplementedError, ValueError) as error:
        raise DamagedCheckpoint(path, f"is damaged: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedCheckpoint(path, "is not a checkpoint of this program: it was saved by another one")
    if content.get("version") != VERSION:
        raise DamagedCheckpoint(
            path, f"has version {content.get('version')} of the format, and this program reads version {VERSION}"
        )
    return content


def require_same(path: Path, asked: Mapping[str, Any], found: Mapping[str, Any], advice: str) -> None:
    """Compare two flat descriptions of a run.

    Raises:
        CheckpointMismatch: they differ; the message lists every name that does.
    """
    absent = "nothing"
    differences = {
        name: (asked.get(name, absent), found.get(name, absent))
        for name in [*asked, *(name for name in found if name not in asked)]
        if asked.get(name, absent) != found.get(name, absent)
    }
    if differences:
        raise CheckpointMismatch(path, differences, advice)


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: an existing folder on a file system with rename and, better, hard links.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest = folder / NEWEST
        self.previous = folder / PREVIOUS

    def load(self, *, previous: bool = False) -> tuple[dict[str, Any], Path] | None:
        """The newest checkpoint, or the one before it if ``previous``, with its path; None if the folder has none.

        Where only the one before exists, it is the newest complete one: on file systems without hard links a kill can fall
        between the two renames of `save`.

        Raises:
            DamagedCheckpoint: the file cannot be used; the message tells whether the one before it can.
        """
        path = self.previous if previous or not self.newest.exists() else self.newest
        if not path.exists():
            if previous:
                raise CheckpointError(
                    f"the checkpoint before the newest was asked for, but {path} does not exist. Leave out "
                    "--from-previous to continue from the newest, or give --fresh to start over."
                )
            return None
        try:
            return read(path), path
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(path, error.problem, self._advice(path)) from error

    def _advice(self, damaged: Path) -> str:
        fresh = "--fresh to start over"
        if damaged == self.previous:
            newest = "leave out --from-previous to continue from the newest, " if self.newest.exists() else ""
            return f"Nothing was changed. {newest.capitalize()}give {fresh}, or --out with another folder."
        try:
            step = read(self.previous).get("step")
        except (FileNotFoundError, DamagedCheckpoint):
            return f"Nothing was changed. There is no sound earlier one: give {fresh}, or --out with another folder."
        return (
            f"Nothing was changed. The one before it, {self.previous} (step {step}), is complete: "
            f"give --from-previous to continue from it (the damaged file is kept), or {fresh}."
        )

    def set_newest_aside(self) -> Path | None:
        """Rename the newest file so that going on from the one before does not overwrite either; its new path."""
        if not self.newest.exists():
            return None
        number = 1
        while (aside := self.folder / f"checkpoint.aside-{number}.pt").exists():
            number += 1
        self.newest.rename(aside)
        _sync_folder(self.folder)
        return aside

    def save(self, content: Mapping[str, Any]) -> None:
        """Write the next checkpoint; returns when it is on the disk.

        Args:
            content: string keys; tensors, numbers, strings and plain containers as values.

        Raises:
            CheckpointError: it could not be written. The earlier checkpoints are as they were.
        """
        for left_over in self.folder.glob(_TEMPORARY + "*"):  # of a process that was killed in the middle
            left_over.unlink(missing_ok=True)
        fresh = self.folder / f"{_TEMPORARY}{os.getpid()}.tmp"
        second_name = self.folder / f"{_TEMPORARY}{os.getpid()}.link"
        try:
            with fresh.open("wb") as file:
                torch.save({"format": FORMAT, "version": VERSION, **content}, file)
                file.flush()
                os.fsync(file.fileno())
            if self.newest.exists():
                try:
                    os.link(self.newest, second_name)
                    second_name.replace(self.previous)
                    # After a kill both names may be of one file already, and rename(2) then leaves the second name there.
                    second_name.unlink(missing_ok=True)
                except OSError:  # no hard links here: `load` knows that the newest name can be missing for a moment
                    self.newest.replace(self.previous)
            fresh.replace(self.newest)
            _sync_folder(self.folder)
        except (OSError, RuntimeError) as error:
            for part in (fresh, second_name):
                with suppress(OSError):
                    part.unlink(missing_ok=True)
            kept = f"The last complete one is kept: {self.newest}" if self.newest.exists() else "There is no earlier one"
            raise CheckpointError(
                f"a checkpoint was to be written to {self.folder}, but that failed: {str(error).splitlines()[0]}. {kept}. "
                "Free space or choose another folder with --out, then run again."
            ) from error


def _sync_folder(folder: Path) -> None:
    # A rename reaches the disk with the folder, not with the file (fsync(2)).
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def only_user(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; a killed process holds it no longer.

    Raises:
        CheckpointError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such lock; there the user sees to it
        yield
        return
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"the folder {folder} was asked for, but another run is writing to it. "
                "Wait until it ends, or choose another folder with --out."
            ) from error
        yield
