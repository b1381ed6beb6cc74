"""Streams and events of the emulated device. Its work is done when a call returns, so every stream is in order with all others.

PyTorch's own classes ask the device's C++ part for what a Python device cannot answer (`Event.synchronize`, times).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Event(torch.Event):
    """``torch.Event`` of one device type. `elapsed_time` is time of this machine's CPU, not of the device."""

    _when: float | None = None
    _timed = False

    def __new__(cls, device: Any = None, enable_timing: bool = False, **kwargs: Any) -> Event:
        made = super().__new__(cls, device=device, enable_timing=enable_timing, **kwargs)
        made._timed = enable_timing
        return made

    def record(self, stream: Any = None) -> None:
        """Mark the end of what was queued so far."""
        self._when = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing is left to wait for."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def query(self) -> bool:
        """Whether the work before the mark is done: always."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to another.

        Raises:
            RuntimeError: an event was not recorded, or made without ``enable_timing=True``.
        """
        if not (self._timed and end_event._timed):
            raise RuntimeError("elapsed_time needs events made with enable_timing=True")
        if self._when is None or end_event._when is None:
            raise RuntimeError("elapsed_time needs both events to be recorded first")
        return float(end_event._when - self._when) * 1000


class Stream(torch.Stream):
    """``torch.Stream`` of one device type.

    Attributes:
        event: class of the events that it makes.
    """

    event: type[Event] = Event

    def record_event(self, event: Any = None) -> Event:
        """Record an event, a new one unless it is given."""
        found: Event = event if event is not None else self.event()
        found.record()
        return found

    def wait_event(self, event: Any) -> None:
        """Nothing is left to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is left to wait for."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


def classes(kind: str, ordinal: Callable[[Any], int]) -> tuple[type[Stream], type[Event]]:
    """``torch.<kind>.Stream`` and ``Event``, which take the arguments of torch.cuda's.

    Args:
        kind: the device type.
        ordinal: what a device argument means; None is the current device.
    """

    def new_stream(cls: type[Stream], device: Any = None, priority: int = 0) -> Stream:
        return Stream.__new__(cls, device=torch.device(kind, ordinal(device)), priority=priority)

    def new_event(cls: type[Event], enable_timing: bool = False, blocking: bool = False) -> Event:
        return Event.__new__(cls, torch.device(kind), enable_timing)

    event = type("Event", (Event,), {"__new__": new_event, "__module__": f"torch.{kind}", "__doc__": Event.__doc__})
    names = {"__new__": new_stream, "__module__": f"torch.{kind}", "__doc__": Stream.__doc__, "event": event}
    return type("Stream", (Stream,), names), event
