"""Device memory: what tensors occupy, what the allocator holds, and the peaks. All sizes in bytes.

Each function has a short name here (``pt.memory.allocated``) and torch.cuda's name (``pt.memory_allocated``).

On the CPU there is no caching allocator to ask, so *allocated* and *reserved* are both the resident set of this process,
including the interpreter and libraries, and *max* is its high-water mark (Linux: /proc/self/status, VmRSS and VmHWM).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from portable.devices import DeviceLike, ordinal_or_none
from portable.selection import call


def allocated(device: DeviceLike = None) -> int:
    """Bytes that tensors occupy on the device."""
    return int(call("memory_allocated")(ordinal_or_none(device)))


def max_allocated(device: DeviceLike = None) -> int:
    """Peak of `allocated` since the start or the last `reset_peak`."""
    return int(call("max_memory_allocated")(ordinal_or_none(device)))


def reserved(device: DeviceLike = None) -> int:
    """Bytes that the caching allocator holds from the device."""
    return int(call("memory_reserved")(ordinal_or_none(device)))


def max_reserved(device: DeviceLike = None) -> int:
    """Peak of `reserved`."""
    return int(call("max_memory_reserved")(ordinal_or_none(device)))


def stats(device: DeviceLike = None) -> Mapping[str, Any]:
    """The allocator's counters, by torch.cuda.memory_stats' keys ("allocated_bytes.all.current" ...)."""
    return call("memory_stats")(ordinal_or_none(device))


def summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """The counters as text."""
    return str(call("memory_summary")(ordinal_or_none(device), abbreviated))


def snapshot(*args: Any, **kwargs: Any) -> Any:
    """Every block of the allocator.

    Raises:
        UnsupportedError: the backend's allocator does not list them.
    """
    return call("memory_snapshot")(*args, **kwargs)


def reset_peak(device: DeviceLike = None) -> None:
    """Start the peaks anew from what is in use now."""
    call("reset_peak_memory_stats")(ordinal_or_none(device))


def reset_accumulated(device: DeviceLike = None) -> None:
    """Start the accumulated counters anew."""
    call("reset_accumulated_memory_stats")(ordinal_or_none(device))


def info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total) bytes of the device, or of the machine (within its control group) for the CPU."""
    free, total = call("mem_get_info")(ordinal_or_none(device))
    return int(free), int(total)


def empty_cache() -> None:
    """Give cached blocks back to the device. Slow, and rarely of use in a training loop."""
    call("empty_cache")()


def set_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Limit this process to a share of the device's memory (0 to 1).

    Raises:
        UnsupportedError: the backend's allocator has no limit.
    """
    call("set_per_process_memory_fraction")(fraction, ordinal_or_none(device))


def get_fraction(device: DeviceLike = None) -> float:
    """The limit in force, 1.0 if there is none."""
    return float(call("get_per_process_memory_fraction")(ordinal_or_none(device)))


# torch.cuda's names, for drop-in use.
memory_allocated = allocated
max_memory_allocated = max_allocated
memory_reserved = reserved
max_memory_reserved = max_reserved
memory_stats = stats
memory_summary = summary
memory_snapshot = snapshot
reset_peak_memory_stats = reset_peak
reset_accumulated_memory_stats = reset_accumulated
mem_get_info = info
set_per_process_memory_fraction = set_fraction
get_per_process_memory_fraction = get_fraction
