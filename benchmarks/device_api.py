"""What a call through `portable` costs beyond the direct call, in nanoseconds.

"direct" is the very object that the support table reaches on the active backend: on a GPU the vendor's own function. Goal: at
most 1000 ns.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import interleaved, statement, table

import portable as pt
from portable import catalogue
from portable.selection import call

ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "set_device": lambda: (0,),
    "device": lambda: (0,),
    "device_of": lambda: (torch.zeros(1),),
    "stream": lambda: (pt.current_stream(),),
    "set_stream": lambda: (pt.current_stream(),),
    "can_device_access_peer": lambda: (0, 0),
    "manual_seed": lambda: (0,),
    "manual_seed_all": lambda: (0,),
    "set_rng_state": lambda: (pt.get_rng_state(),),
    "set_rng_state_all": lambda: (pt.get_rng_state_all(),),
    "nvtx.range_push": lambda: ("a",),
    "nvtx.range": lambda: ("a",),
    "nvtx.mark": lambda: ("a",),
}
# Not calls, or calls with a lasting effect: allocator limits, open ranges.
LEFT_OUT = {"OutOfMemoryError", "set_per_process_memory_fraction", "nvtx.range_push", "nvtx.range_pop"}
NEED_ORDINAL = {
    "get_device_name", "get_device_properties", "get_device_capability", "utilization", "memory_usage", "temperature",
    "power_draw", "clock_rate", "list_gpu_processes",
}  # fmt: skip


def cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Name to the call through `portable` and the direct call."""
    found = {}
    for name in catalogue.BY_NAME:
        cell = pt.active().support[name]
        if name in LEFT_OUT or cell.kind == "unsupported" or getattr(call(name), "portable_unsupported", False):
            continue
        arguments = ARGUMENTS.get(name, tuple)()
        mine: Any = pt.cuda
        for part in name.split("."):
            mine = getattr(mine, part)
        direct = (0,) if name in NEED_ORDINAL else arguments
        found[name] = partial(mine, *arguments), partial(call(name), *direct)
    # The same with a device argument, which `portable` checks.
    for name in ("memory_allocated", "synchronize", "current_stream"):
        for argument in (0, pt.device()):
            found[f"{name}({argument!r})"] = partial(getattr(pt, name), argument), partial(call(name), argument)
    return found


def per_call(function: Callable[[], Any], count: int) -> float:
    return timeit.timeit(function, number=count) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    statement()
    print(f"backend {pt.active().spec.name} (execution: {pt.execution()})\n")
    print(f"backend: {pt.active().spec.name}\n")
    rows = []
    for name, (mine, direct) in cases().items():
        once = max(per_call(direct, 3), per_call(mine, 3))
        count = max(1, min(20_000, int(0.002 / once)))
        variants = {"portable": partial(per_call, mine, count), "direct": partial(per_call, direct, count)}
        found = interleaved(variants, rounds)
        added = found["portable"].median - found["direct"].median
        rows.append((added, name, found["direct"].median, found["portable"].median))
    rows.sort(reverse=True)
    nanoseconds = [(name, *(f"{value * 1e9:.0f}" for value in (direct, mine, added))) for added, name, direct, mine in rows]
    table(("function", "direct ns", "portable ns", "added ns"), nanoseconds)
    quick = sorted(row[0] * 1e9 for row in rows if row[2] < 20e-6)  # beside a slow call the difference is noise
    print(f"added to a call of less than 20 us: at most {quick[-1]:.0f} ns, median {quick[len(quick) // 2]:.0f} ns")


if __name__ == "__main__":
    main()
