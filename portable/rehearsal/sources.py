"""The line of the user's program that caused something.

It is the innermost frame outside PyTorch and `portable`. The autograd engine runs the backward pass of a device in a thread of
its own, which has no such frame; the thread that waits in the engine has it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

import torch

_INTERNAL = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep, "<frozen ", "<eval_with_key>")
_PLAIN = {contextlib.__file__, "<string>", "<__array_function__ internals>"}
_packages: set[str] = set()
_internal: dict[CodeType, bool] = {}
_PRINTER = torch._tensor_str.__file__
_SAVER = torch.serialization.__file__
UNKNOWN = "unknown"


class _Graph(threading.local):
    """The line behind the operator of a compiled graph that a thread runs, "" outside of graphs."""

    line = ""


graph = _Graph()


def ignore(folder: str) -> None:
    """Count a folder (a backend package's) among the frames that are never the user's."""
    _packages.add(folder.rstrip(os.sep) + os.sep)
    _internal.clear()


def is_internal(file: str) -> bool:
    """Whether a file of code is PyTorch's, `portable`'s or a backend's, and so never the user's."""
    return file.startswith(_INTERNAL) or file in _PLAIN or any(file.startswith(folder) for folder in _packages)


def _is_internal(code: CodeType) -> bool:
    known = _internal.get(code)
    if known is None:
        known = _internal[code] = is_internal(code.co_filename)
    return known


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _is_internal(frame.f_code):
        frame = frame.f_back
    return frame


def _waiting() -> FrameType | None:
    """The user's frame of a thread that waits for the autograd engine."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)  # a frame that holds itself would keep all tensors of its callers
    for outer in frames.values():
        inner: FrameType | None = outer
        while inner is not None and inner.f_code.co_name != "_engine_run_backward":
            inner = inner.f_back
        if inner is not None:
            return _users(inner)
    return None


def purpose() -> str:
    """What PyTorch is at for the user's line: "printing" a tensor, "saving" to a file, or "" for anything else."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_internal(frame.f_code):
        if frame.f_code.co_filename == _PRINTER:
            return "printing"
        if frame.f_code.co_filename == _SAVER:
            return "saving"
        frame = frame.f_back
    return ""


def named(file: str, number: int) -> str:
    """``file.py:12``, relative to the working directory where possible."""
    with contextlib.suppress(ValueError, OSError):
        file = str(Path(file).relative_to(Path.cwd()))
    return f"{file}:{number}"


def line() -> str:
    """``file.py:12`` (relative to the working directory where possible), with " (backward)" in the backward pass."""
    if graph.line:
        return graph.line
    frame, suffix = _users(sys._getframe(1)), ""
    # A worker thread started by the interpreter shows the threading module only.
    if frame is None or frame.f_code.co_filename.endswith("threading.py"):
        frame, suffix = _waiting(), " (backward)"
        if frame is None:
            return UNKNOWN + suffix
    return named(frame.f_code.co_filename, frame.f_lineno) + suffix
