"""torch.cuda's surface under torch.cuda's own names, dispatched to the active backend.

For code that is to keep those names (``from portable import cuda``) and for `portable.compat`, which lends them to unmodified
CUDA programs. New code reads better with the names of `portable` itself; docs/device-api.md lists both.
"""

from __future__ import annotations

from torch import OutOfMemoryError

from portable import nvtx
from portable.amp import GradScaler, autocast, custom_bwd, custom_fwd
from portable.catalogue import FUNCTIONS
from portable.devices import (
    can_device_access_peer,
    clock_rate,
    current_device,
    device_count,
    device_of,
    get_arch_list,
    get_device_capability,
    get_device_name,
    get_device_properties,
    init,
    ipc_collect,
    is_available,
    is_bf16_supported,
    is_initialized,
    is_tf32_supported,
    list_gpu_processes,
    memory_usage,
    power_draw,
    set_device,
    synchronize,
    temperature,
    utilization,
)
from portable.devices import device_index as device
from portable.graphs import CUDAGraph, graph, graph_pool_handle, is_current_stream_capturing, make_graphed_callables
from portable.memory import (
    empty_cache,
    get_per_process_memory_fraction,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from portable.random import (
    fork_rng,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from portable.streams import Event, Stream, current_stream, default_stream, set_stream, stream

__all__ = [
    "CUDAGraph", "Event", "GradScaler", "OutOfMemoryError", "Stream", "autocast", "can_device_access_peer", "clock_rate",
    "current_device", "current_stream", "custom_bwd", "custom_fwd", "default_stream", "device", "device_count", "device_of",
    "empty_cache", "fork_rng", "get_arch_list", "get_device_capability", "get_device_name", "get_device_properties",
    "get_per_process_memory_fraction", "get_rng_state", "get_rng_state_all", "graph", "graph_pool_handle", "init",
    "initial_seed", "ipc_collect", "is_available", "is_bf16_supported", "is_current_stream_capturing", "is_initialized",
    "is_tf32_supported", "list_gpu_processes", "make_graphed_callables", "manual_seed", "manual_seed_all",
    "max_memory_allocated", "max_memory_reserved", "mem_get_info", "memory_allocated", "memory_reserved", "memory_snapshot",
    "memory_stats", "memory_summary", "memory_usage", "names", "nvtx", "power_draw", "reset_accumulated_memory_stats",
    "reset_peak_memory_stats", "seed", "seed_all", "set_device", "set_per_process_memory_fraction", "set_rng_state",
    "set_rng_state_all", "set_stream", "stream", "synchronize", "temperature", "utilization",
]  # fmt: skip


def names() -> list[str]:
    """The functions of torch.cuda that exist here, dotted for submodules ("nvtx.range_push")."""
    return [function.name for function in FUNCTIONS]
