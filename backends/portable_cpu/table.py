"""The CPU's support table: real values from the operating system, no-ops where a CPU has nothing to do."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portable.emulation import constant
from portable.support import Support, emulated, noop, unsupported
from portable_cpu import host, queue


@dataclass(frozen=True)
class CpuProperties:
    """What torch.cuda.get_device_properties has, as far as a CPU has it.

    Attributes:
        name: model name of the processor.
        total_memory: bytes of the machine, or of the control group if it limits less.
        multi_processor_count: cores that this process may use.
        capability: instruction set that PyTorch's kernels use (torch.backends.cpu.get_cpu_capability).
        major, minor: 0: there is no CUDA compute capability.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    capability: str
    major: int = 0
    minor: int = 0


def properties(device: Any = None) -> CpuProperties:
    return CpuProperties(
        host.cpu_name(), host.machine_memory()[1], host.usable_cores(), torch.backends.cpu.get_cpu_capability()
    )


def memory_stats(device: Any = None) -> OrderedDict[str, int]:
    now, peak = host.resident(), host.peak_resident()
    return OrderedDict(
        (f"{pool}_bytes.all.{moment}", value)
        for pool in ("allocated", "reserved", "active")
        for moment, value in (("current", now), ("peak", peak))
    )


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    free, total = host.machine_memory()
    rows = (
        ("resident set of this process", host.resident()),
        ("its high-water mark", host.peak_resident()),
        ("available on this machine", free),
        ("total on this machine", total),
    )
    return "\n".join(f"{name:<30} {value / 2**20:>12,.1f} MiB" for name, value in rows)


def _resident(device: Any = None) -> int:
    return host.resident()


def _peak(device: Any = None) -> int:
    return host.peak_resident()


def _reset_peak(device: Any = None) -> None:
    host.reset_peak()


def _memory_info(device: Any = None) -> tuple[int, int]:
    return host.machine_memory()


def _utilization(device: Any = None) -> int:
    return host.load_percent()


def _name(device: Any = None) -> str:
    return host.cpu_name()


def _supports_bf16(including_emulation: bool = True) -> bool:
    # PyTorch's CPU kernels compute bfloat16 everywhere; fast only with the instructions for it.
    if including_emulation:
        return True
    capabilities = host.capabilities()
    return any(capabilities.get(key) for key in ("amx_bf16", "avx512_bf16", "bf16"))


def _get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(new_state)


def _get_rng_state_all() -> list[torch.Tensor]:
    return [torch.get_rng_state()]


def _set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
    if len(new_states) != 1:
        raise ValueError(
            f"{len(new_states)} generator states were given; the CPU has one generator. "
            "Pass a list of one state, as get_rng_state_all() returns it here."
        )
    torch.set_rng_state(new_states[0])


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _seed() -> None:
    torch.default_generator.seed()


@contextlib.contextmanager
def _unchanged(device: Any = None) -> Iterator[None]:
    yield


_ONE = "the CPU is one device"
_PROC = "resident set of the process (/proc/self/statm)"
_PEAK = "high-water mark of the resident set (VmHWM)"
_DONE = "CPU operators are done when they return"
_GRAPHS = unsupported("a CPU records no graphs", "use pt.compile(model), or call the function directly")
_SENSOR = unsupported("PyTorch reads no sensors of the CPU", "use lm-sensors, turbostat or the machine's monitoring")

TABLE: dict[str, Support] = {
    "is_available": emulated(constant(True), "True"),
    "is_initialized": emulated(constant(True), "True"),
    "init": noop("there is no device runtime to start"),
    "device_count": emulated(constant(1), f"1: {_ONE}"),
    "current_device": emulated(constant(0), f"0: {_ONE}"),
    "set_device": noop(_ONE),
    "device": emulated(_unchanged, f"changes nothing: {_ONE}"),
    "device_of": emulated(_unchanged, f"changes nothing: {_ONE}"),
    "get_device_name": emulated(_name, "model name of the processor"),
    "get_device_properties": emulated(properties, "model name, memory, usable cores, instruction set"),
    "can_device_access_peer": emulated(constant(False), f"False: {_ONE}"),
    "synchronize": noop(_DONE),
    "is_bf16_supported": emulated(_supports_bf16, "True; with including_emulation=False: AMX, AVX512-BF16 or Arm BF16"),
    "Stream": emulated(queue.Stream, f"a queue that is always empty: {_DONE}"),
    "Event": emulated(queue.Event, "an instant of the monotonic clock"),
    "stream": emulated(queue.stream_context, "sets this thread's current stream"),
    "set_stream": emulated(queue.set_stream, "sets this thread's current stream"),
    "current_stream": emulated(queue.current_stream, "this thread's current stream"),
    "default_stream": emulated(queue.default_stream, "one stream for the process"),
    "memory_allocated": emulated(_resident, _PROC),
    "max_memory_allocated": emulated(_peak, _PEAK),
    "memory_reserved": emulated(_resident, _PROC),
    "max_memory_reserved": emulated(_peak, _PEAK),
    "memory_stats": emulated(memory_stats, f"{_PROC} and {_PEAK}, under torch.cuda's keys"),
    "memory_summary": emulated(memory_summary, "the same as text, with the machine's memory"),
    "memory_snapshot": unsupported(
        "the CPU allocator is the system's and lists no blocks", "use pt.profile(profile_memory=True) or tracemalloc"
    ),
    "reset_peak_memory_stats": emulated(_reset_peak, "/proc/self/clear_refs; no effect outside Linux"),
    "reset_accumulated_memory_stats": noop("there are no accumulated counters"),
    "mem_get_info": emulated(_memory_info, "memory of the machine or of its control group"),
    "empty_cache": noop("the CPU allocator keeps no cache of its own"),
    "set_per_process_memory_fraction": unsupported(
        "the CPU allocator has no limit", "limit the process from outside: ulimit -v, or the container's memory limit"
    ),
    "get_per_process_memory_fraction": emulated(constant(1.0), "1.0: no limit is in force"),
    "ipc_collect": noop("the operating system frees shared memory"),
    "manual_seed": emulated(_manual_seed, "torch.default_generator.manual_seed"),
    "manual_seed_all": emulated(_manual_seed, "torch.default_generator.manual_seed"),
    "seed": emulated(_seed, "torch.default_generator.seed"),
    "seed_all": emulated(_seed, "torch.default_generator.seed"),
    "initial_seed": emulated(torch.initial_seed, "torch.initial_seed"),
    "get_rng_state": emulated(_get_rng_state, "torch.get_rng_state"),
    "get_rng_state_all": emulated(_get_rng_state_all, "a list with the one state"),
    "set_rng_state": emulated(_set_rng_state, "torch.set_rng_state"),
    "set_rng_state_all": emulated(_set_rng_state_all, "takes a list with the one state"),
    "CUDAGraph": _GRAPHS,
    "graph": _GRAPHS,
    "make_graphed_callables": _GRAPHS,
    "graph_pool_handle": _GRAPHS,
    "utilization": emulated(_utilization, "one-minute load average over the number of cores"),
    "memory_usage": unsupported("the system does not count memory traffic", "use perf or the vendor's memory profiler"),
    "temperature": _SENSOR,
    "power_draw": _SENSOR,
    "clock_rate": _SENSOR,
    "list_gpu_processes": unsupported("a CPU is used by every process", "use ps or top"),
}
