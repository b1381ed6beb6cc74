"""Streams (queues of work on a device) and events (marks in them).

On the CPU work is done when a call returns, so a stream there keeps the order by itself and an event is an instant of time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from portable.devices import DeviceLike, ordinal_or_none
from portable.selection import call


def Stream(*args: Any, **kwargs: Any) -> Any:
    """A new stream of the active backend; arguments as in ``torch.cuda.Stream(device=None, priority=0)``."""
    return call("Stream")(*args, **kwargs)


def Event(enable_timing: bool = False, *args: Any, **kwargs: Any) -> Any:
    """A new event of the active backend.

    Args:
        enable_timing: the event records when it is reached; ``start.elapsed_time(end)`` then gives milliseconds.
        args, kwargs: what the vendor's class takes besides (``blocking``, ``interprocess``), in torch.cuda.Event's order.
    """
    return call("Event")(enable_timing, *args, **kwargs) if args else call("Event")(enable_timing=enable_timing, **kwargs)


def stream(stream: Any) -> AbstractContextManager[Any]:
    """Context manager: ``stream`` is current inside the block; None leaves everything as it is."""
    return call("stream")(stream)


def set_stream(stream: Any) -> None:
    """Make a stream current."""
    call("set_stream")(stream)


def current_stream(device: DeviceLike = None) -> Any:
    """The current stream of a device."""
    return call("current_stream")(ordinal_or_none(device))


def default_stream(device: DeviceLike = None) -> Any:
    """The default stream of a device."""
    return call("default_stream")(ordinal_or_none(device))
