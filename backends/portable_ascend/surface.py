"""The functions of the device API that torch.npu has under torch.cuda's names.

Source: ``__all__`` of torch_npu/npu/__init__.py in the wheel torch-npu 2.13.0; a test compares the two. Left out although it is
there: ``get_device_capability``, which answers only what an environment variable says (see `portable_ascend.backend`).
"""

from __future__ import annotations

SURFACE: tuple[str, ...] = (
    "is_available", "is_initialized", "init", "device_count", "current_device", "set_device", "device", "device_of",
    "get_device_name", "get_device_properties", "can_device_access_peer", "synchronize", "is_bf16_supported",
    "Stream", "Event", "stream", "set_stream", "current_stream", "default_stream",
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "memory_summary",
    "memory_snapshot", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "mem_get_info", "empty_cache",
    "set_per_process_memory_fraction", "get_per_process_memory_fraction", "ipc_collect",
    "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed",
    "get_rng_state", "get_rng_state_all", "set_rng_state", "set_rng_state_all",
    "graph", "make_graphed_callables", "is_current_stream_capturing", "graph_pool_handle",
    "utilization",
)  # fmt: skip
