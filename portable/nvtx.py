"""Named ranges in profiles: NVTX on CUDA, torch.profiler ranges elsewhere (both show in the trace of `pt.profile`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from portable.selection import call


def range_push(message: str) -> int:
    """Open a range; returns its zero-based depth."""
    return call("nvtx.range_push")(message)


def range_pop() -> int:
    """Close the innermost range; returns its depth."""
    return call("nvtx.range_pop")()


def range(message: str, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """Context manager: a named range; the arguments format the message."""
    return call("nvtx.range")(message, *args, **kwargs)


def mark(message: str) -> None:
    """A named instant."""
    call("nvtx.mark")(message)
