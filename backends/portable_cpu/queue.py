"""Streams and events of the CPU.

PyTorch's CPU operators are done when they return. A stream therefore never has anything outstanding, and an event is the
instant at which it was recorded.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")


class Event:
    """An instant. ``elapsed_time`` needs ``enable_timing=True`` on both events, as in torch.cuda."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.device = _CPU
        self.enable_timing = enable_timing
        self._nanoseconds: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Take the present instant."""
        self._nanoseconds = time.perf_counter_ns()

    def query(self) -> bool:
        """True: whatever was called before has been done."""
        return True

    def wait(self, stream: Stream | None = None) -> None:
        """Return at once: whatever was called before has been done."""

    def synchronize(self) -> None:
        """Return at once: whatever was called before has been done."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``.

        Raises:
            ValueError: an event without timing, or one that was not recorded.
        """
        for event in (self, end_event):
            if not event.enable_timing:
                raise ValueError("elapsed_time needs two events made with enable_timing=True; this pair has one without.")
            if event._nanoseconds is None:
                raise ValueError("elapsed_time needs two recorded events; call record() on both first.")
        assert self._nanoseconds is not None and end_event._nanoseconds is not None
        return (end_event._nanoseconds - self._nanoseconds) / 1e6

    def __repr__(self) -> str:
        return f"<CPU event at {self._nanoseconds} ns>" if self._nanoseconds is not None else "<CPU event, not recorded>"


class Stream:
    """A queue that is always empty, because each operator is done when it returns."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = _CPU
        self.priority = priority

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, now."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """True: nothing is outstanding."""
        return True

    def __enter__(self) -> Stream:
        _current.before.append(_current.stream)
        set_stream(self)
        return self

    def __exit__(self, *exc: object) -> None:
        set_stream(_current.before.pop())

    def __repr__(self) -> str:
        return f"<CPU stream {id(self):#x}>"


_DEFAULT = Stream()


class _Current(threading.local):
    """This thread's current stream, and those to go back to when the streams that it has entered are left."""

    def __init__(self) -> None:
        self.stream = _DEFAULT
        self.before: list[Stream] = []


_current = _Current()


def default_stream(device: Any = None) -> Stream:
    """The stream that is current until another is made so."""
    return _DEFAULT


def current_stream(device: Any = None) -> Stream:
    """This thread's current stream."""
    return _current.stream


def set_stream(stream: Stream | None) -> None:
    """Make a stream current in this thread; None changes nothing, as in torch.cuda."""
    if stream is not None:
        _current.stream = stream


@contextlib.contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    """Make a stream current inside the block."""
    before = _current.stream
    set_stream(stream)
    try:
        yield
    finally:
        _current.stream = before
