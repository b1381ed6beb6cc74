"""The functions of the device API that torch.neuron has under torch.cuda's names.

Source: the public pre-release sources of torch_neuronx (``drop`` in `portable_neuron.facts`), whose module torch.neuron carries
these; the released package could not be had. Documented as absent there: ``mem_get_info``, ``get_device_capability``, the
``_all`` variants of the generator states, ``ipc_collect``, ``set_per_process_memory_fraction`` and graphs.
"""

from __future__ import annotations

SURFACE: tuple[str, ...] = (
    "is_available", "is_initialized", "init", "device_count", "current_device", "set_device", "device",
    "get_device_name", "get_device_properties", "synchronize", "is_bf16_supported",
    "Stream", "Event", "stream", "set_stream", "current_stream", "default_stream",
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "memory_summary",
    "reset_peak_memory_stats", "reset_accumulated_memory_stats", "empty_cache",
    "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state", "set_rng_state",
)  # fmt: skip

ABSENT: tuple[str, ...] = (
    "mem_get_info", "get_device_capability", "get_rng_state_all", "set_rng_state_all", "ipc_collect",
    "set_per_process_memory_fraction", "CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle",
)  # fmt: skip
