"""Plain equivalents of device functions, for devices whose own module lacks them.

They act on PyTorch's current accelerator and are reached through the support tables only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def constant(value: Any) -> Callable[..., Any]:
    """A function that answers ``value`` whatever it is asked."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def supports_bf16(including_emulation: bool = True) -> bool:
    """Whether a bfloat16 matrix product runs on the current accelerator and is right (2 x 2 ones, exact in bfloat16)."""
    try:
        ones = torch.ones(2, 2, dtype=torch.bfloat16, device=torch.accelerator.current_accelerator())
        return bool((ones @ ones).sum().item() == 8.0)
    except (RuntimeError, TypeError):
        return False


@contextlib.contextmanager
def device_of(tensor: torch.Tensor) -> Iterator[None]:
    """Make the device of ``tensor`` current inside the block; nothing happens for a tensor on the CPU."""
    if tensor.device.type == "cpu":
        yield
        return
    with torch.accelerator.device_index(tensor.device.index or 0):
        yield


@contextlib.contextmanager
def stream_context(stream: torch.Stream | None) -> Iterator[None]:
    """Make a stream current inside the block, through torch.accelerator."""
    if stream is None:
        yield
        return
    previous = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(previous)


def get_rng_state_all() -> list[torch.Tensor]:
    """The generator states of all devices, one ByteTensor each."""
    module = torch.get_device_module()
    return [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]


def set_rng_state_all(states: Sequence[torch.Tensor]) -> None:
    """Restore the generator states of all devices."""
    module = torch.get_device_module()
    for index, state in enumerate(states):
        module.set_rng_state(state, index)


def seed() -> None:
    """Seed all devices from entropy."""
    torch.get_device_module().manual_seed_all(torch.seed())


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The allocator's counters as text, one ``name value`` line each, from torch.accelerator.memory_stats."""
    stats = torch.accelerator.memory_stats(device)
    rows = [(name, value) for name, value in sorted(stats.items()) if not (abbreviated and "small_pool" in name)]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


class _Ranges(threading.local):
    """The profiler ranges that this thread has open; NVTX ranges nest by thread too."""

    def __init__(self) -> None:
        self.open: list[Any] = []


_ranges = _Ranges()


def range_push(message: str) -> int:
    """Open a range that torch.profiler records; returns its zero-based depth, as torch.cuda.nvtx.range_push does."""
    record = torch.profiler.record_function(str(message))
    record.__enter__()
    _ranges.open.append(record)
    return len(_ranges.open) - 1


def range_pop() -> int:
    """Close the innermost range; returns its depth, -1 if none was open (NVTX answers a negative value too)."""
    if not _ranges.open:
        return -1
    _ranges.open.pop().__exit__(None, None, None)
    return len(_ranges.open)


@contextlib.contextmanager
def profiler_range(message: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """A named range; the arguments format the message, as in torch.cuda.nvtx.range."""
    with torch.profiler.record_function(message.format(*args, **kwargs) if args or kwargs else message):
        yield


def mark(message: str) -> None:
    """A range of no length."""
    with torch.profiler.record_function(str(message)):
        pass
