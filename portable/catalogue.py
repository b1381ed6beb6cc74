"""The functions of the device API, by torch.cuda's own names.

This table is the single list that the backends' support tables, `portable.cuda`, the documentation and the tests are made
from. The names and meanings are those of ``torch.cuda`` (PyTorch 2.13 documentation, "torch.cuda" and its submodules).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Function:
    """One function of the device API.

    Attributes:
        name: torch.cuda's name, dotted for submodules ("nvtx.range_push").
        group: section of the documentation.
        portable: where it lives in `portable`, if the name differs ("device_index").
        summary: one line.
    """

    name: str
    group: str
    summary: str
    portable: str = ""

    @property
    def public_name(self) -> str:
        """The name under `portable`."""
        return self.portable or self.name


def _group(group: str, *rows: tuple[str, str] | tuple[str, str, str]) -> tuple[Function, ...]:
    return tuple(Function(row[0], group, row[1], row[2] if len(row) > 2 else "") for row in rows)


FUNCTIONS: tuple[Function, ...] = (
    *_group(
        "Devices",
        ("is_available", "whether the backend has a device that can be used"),
        ("is_initialized", "whether the device runtime has been started in this process"),
        ("init", "start the device runtime now instead of at first use"),
        ("device_count", "number of devices"),
        ("current_device", "index of the current device"),
        ("set_device", "make a device current"),
        ("device", "context manager: another current device", "device_index"),
        ("device_of", "context manager: the device of a tensor becomes current"),
        ("get_device_name", "name of a device"),
        ("get_device_properties", "name, total_memory and what else the vendor reports"),
        ("get_device_capability", "(major, minor) CUDA compute capability; (0, 0) where that notion does not exist"),
        ("get_arch_list", "architectures this PyTorch build has kernels for"),
        ("can_device_access_peer", "whether one device reads another's memory directly"),
        ("synchronize", "wait until the device has done all queued work"),
        ("is_bf16_supported", "whether bfloat16 tensors compute on the device"),
        ("is_tf32_supported", "whether float32 matmuls can run in TF32"),
    ),
    *_group(
        "Streams and events",
        ("Stream", "a queue of work"),
        ("Event", "a mark in a stream; measures time in milliseconds"),
        ("stream", "context manager: another current stream"),
        ("set_stream", "make a stream current"),
        ("current_stream", "the current stream"),
        ("default_stream", "the default stream"),
    ),
    *_group(
        "Memory",
        ("memory_allocated", "bytes that tensors occupy", "memory.allocated"),
        ("max_memory_allocated", "peak of memory_allocated in bytes", "memory.max_allocated"),
        ("memory_reserved", "bytes that the allocator holds", "memory.reserved"),
        ("max_memory_reserved", "peak of memory_reserved in bytes", "memory.max_reserved"),
        ("memory_stats", "counters of the allocator", "memory.stats"),
        ("memory_summary", "the counters as a text table", "memory.summary"),
        ("memory_snapshot", "every block of the allocator", "memory.snapshot"),
        ("reset_peak_memory_stats", "start the peaks anew", "memory.reset_peak"),
        ("reset_accumulated_memory_stats", "start the accumulated counters anew", "memory.reset_accumulated"),
        ("mem_get_info", "(free, total) bytes of the device", "memory.info"),
        ("empty_cache", "give cached blocks back", "memory.empty_cache"),
        ("set_per_process_memory_fraction", "limit this process to a share of the memory", "memory.set_fraction"),
        ("get_per_process_memory_fraction", "the limit in force", "memory.get_fraction"),
        ("OutOfMemoryError", "the exception for exhausted device memory"),
        ("ipc_collect", "release memory of finished inter-process shares"),
    ),
    *_group(
        "Random numbers",
        ("manual_seed", "seed the current device's generator"),
        ("manual_seed_all", "seed every device's generator"),
        ("seed", "seed the current device's generator from entropy"),
        ("seed_all", "seed every device's generator from entropy"),
        ("initial_seed", "the seed last given"),
        ("get_rng_state", "state of one device's generator"),
        ("get_rng_state_all", "states of all generators"),
        ("set_rng_state", "restore one state"),
        ("set_rng_state_all", "restore all states"),
    ),
    *_group(
        "Graphs",
        ("CUDAGraph", "a recorded sequence of kernels", "Graph"),
        ("graph", "context manager: record into a graph"),
        ("make_graphed_callables", "replace callables by recorded graphs"),
        ("is_current_stream_capturing", "whether a recording is under way"),
        ("graph_pool_handle", "a memory pool for graphs"),
    ),
    *_group(
        "Profiler ranges",
        ("nvtx.range_push", "open a named range in the profile"),
        ("nvtx.range_pop", "close the innermost range"),
        ("nvtx.range", "context manager: a named range"),
        ("nvtx.mark", "a named instant"),
    ),
    *_group(
        "Monitoring",
        ("utilization", "percent of the last interval in which the device was busy"),
        ("memory_usage", "percent of the last interval in which device memory was read or written"),
        ("temperature", "degrees Celsius"),
        ("power_draw", "milliwatts"),
        ("clock_rate", "MHz of the compute clock"),
        ("list_gpu_processes", "processes that use the device, as text"),
    ),
)

BY_NAME: dict[str, Function] = {function.name: function for function in FUNCTIONS}
