"""Why a program ended by an exception: the device's doing, or its own."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from portable.errors import DeviceIndexError, PortableError, UnsupportedError
from portable.rehearsal import sources
from portable.rehearse.costs import Costs
from portable.rehearse.places import Where, where
from portable.rehearse.result import Failure

_OURS = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_DTYPE = re.compile(r"\b(?:dtypes? )?(?:torch\.)?(complex\w*|float64|float32|float16|bfloat16|float8_\w+|u?int\d+|bool)\b")
# What PyTorch says when a dispatch key has no kernel, and when the host itself is full.
_EMULATOR = re.compile(r"Could not run '[\w:.]+' with arguments from the '\w+' backend|DefaultCPUAllocator")


def dtype_in(message: str) -> str:
    """The dtype that a message is about, "" if none is named."""
    found = _DTYPE.search(message)
    return found[1] if found else ""


def rule_of_refusal(name: str, message: str) -> str:
    """Rule for what a device refused, from the operator's name and its message."""
    if name == "memory":
        return "REH-OOM"
    return "REH-REFUSED-DTYPE" if re.search(r"\bdtypes?\b", message) and dtype_in(message) else "REH-REFUSED"


def explain(error: BaseException, folder: str, backend_folder: str, costs: Costs) -> Failure:
    """What ended the program.

    Args:
        error: the exception.
        folder: files are shown relative to it.
        backend_folder: where the backend's Python code lies.
        costs: what the backend knows of its vendor's messages.
    """
    cause: Literal["device", "script", "emulator"] = "script"
    rule, guilty = "", error
    for one in _chain(error):
        if _EMULATOR.search(str(one)) or (costs.gap_pattern and re.search(costs.gap_pattern, str(one))):
            cause, guilty = "emulator", one
            break
        found = _rule(one, backend_folder, costs.error_pattern)
        if found:
            cause, rule, guilty = "device", found, one
            break
    place = _place(guilty, folder) or _place(error, folder) or Where("", 0)
    message = str(guilty).strip() or type(guilty).__name__
    return Failure(cause, type(guilty).__name__, message, place.file, place.line, place.code(folder), rule)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop(0)
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += [one.__cause__, None if one.__suppress_context__ else one.__context__]


def _rule(error: BaseException, backend_folder: str, pattern: str) -> str:
    """The finding that an exception is, "" if it is not the device's."""
    if isinstance(error, torch.OutOfMemoryError):
        return "REH-OOM"
    if isinstance(error, UnsupportedError):
        return "REH-UNSUPPORTED"
    if isinstance(error, DeviceIndexError):
        return "REH-DEVICE"
    innermost = _innermost(error.__traceback__)
    ours = innermost.startswith((_OURS, backend_folder)) if innermost else False
    if isinstance(error, PortableError) or ours or (pattern and re.search(pattern, str(error))):
        return rule_of_refusal("", str(error))
    return ""


def _innermost(trace: TracebackType | None) -> str:
    """File of the frame that raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename if trace is not None else ""


def _is_foreign(file: str) -> bool:
    """Whether a file is not the program's: PyTorch's, portable's, or the standard library's."""
    return sources.is_internal(file) or (file.startswith(_STANDARD) and "site-packages" not in file)


def _place(error: BaseException, folder: str) -> Where | None:
    """The program's line: the innermost outside PyTorch and portable, or the one in the text of another process's traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return where(f"{error.filename}:{error.lineno or 0}", folder)
    elsewhere = [m for m in _FRAME.finditer(str(error)) if not _is_foreign(m["file"])]
    if elsewhere and "Traceback" in str(error):
        return where(f"{elsewhere[-1]['file']}:{elsewhere[-1]['line']}", folder)
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not _is_foreign(frame.f_code.co_filename):
            return where(f"{frame.f_code.co_filename}:{line}", folder)
    return None
