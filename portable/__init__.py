"""One device API for PyTorch on NVIDIA/AMD GPUs, AWS Trainium, Huawei Ascend and CPU.

``import portable as pt`` costs next to nothing and imports neither torch nor a vendor's package: names are looked up when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Module to the public names it provides. The imports for type checkers below say the same; a test compares the two.
_EXPORTS: dict[str, tuple[str, ...]] = {
    "selection": ("active", "backends", "use"),
    "devices": (
        "can_device_access_peer", "clock_rate", "current_device", "device", "device_count", "device_index", "device_of",
        "generation", "get_arch_list", "get_device_capability", "get_device_name", "get_device_properties", "init",
        "ipc_collect", "is_available", "is_bf16_supported", "is_initialized", "is_out_of_memory", "is_tf32_supported",
        "list_gpu_processes", "memory_usage", "power_draw", "set_device", "synchronize", "temperature", "utilization",
    ),
    "streams": ("Event", "Stream", "current_stream", "default_stream", "set_stream", "stream"),
    "memory": (
        "empty_cache", "get_per_process_memory_fraction", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
        "memory_allocated", "memory_reserved", "memory_snapshot", "memory_stats", "memory_summary",
        "reset_accumulated_memory_stats", "reset_peak_memory_stats", "set_per_process_memory_fraction",
    ),
    "random": (
        "fork_rng", "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all", "seed",
        "seed_all", "seed_everything", "set_rng_state", "set_rng_state_all",
    ),
    "graphs": (
        "CUDAGraph", "Graph", "graph", "graph_pool_handle", "is_current_stream_capturing", "make_graphed_callables",
    ),
    "amp": ("GradScaler", "autocast", "custom_bwd", "custom_fwd"),
    "policy": ("PrecisionPolicy", "precision_policy"),
    "numerics": ("Precision", "precision"),
    "levels": ("PrecisionLevel",),
    "mantissa": ("mantissa_bits",),
    "compiling": ("CompileChoice", "compile", "explain_compile"),
    "optimizers": ("explain_optimizer", "optimizer_options"),
    "prefetching": ("prefetch",),
    "determinism": ("deterministic",),
    "profiling": ("profile",),
    "provenance": ("execution",),
    "compat": ("cuda_compat",),
    "attn.api": ("attention",),
    "attn.explain": ("explain_attention",),
    "attn.masks": (
        "ALiBi", "Causal", "CausalBottomRight", "Document", "Mask", "Padding", "PrefixLM", "SlidingWindow", "alibi_slopes",
    ),
    "attn.policy": ("attention_policy",),
    "errors": (
        "BackendNotFound", "BackendUnavailable", "ConfigurationError", "DeviceIndexError", "PluginError", "PortableError",
        "UnsupportedError",
    ),
}  # fmt: skip
_MODULES = ("amp", "cuda", "distributed", "errors", "graphs", "hookspecs", "memory", "nvtx", "random", "streams")
_HOME = {name: module for module, names in _EXPORTS.items() for name in names}

if TYPE_CHECKING:
    from torch import OutOfMemoryError as OutOfMemoryError

    from portable import (
        amp as amp,
    )
    from portable import (
        cuda as cuda,
    )
    from portable import (
        distributed as distributed,
    )
    from portable import (
        errors as errors,
    )
    from portable import (
        graphs as graphs,
    )
    from portable import (
        hookspecs as hookspecs,
    )
    from portable import (
        memory as memory,
    )
    from portable import (
        nvtx as nvtx,
    )
    from portable import (
        random as random,
    )
    from portable import (
        streams as streams,
    )
    from portable.amp import (
        GradScaler as GradScaler,
    )
    from portable.amp import (
        autocast as autocast,
    )
    from portable.amp import (
        custom_bwd as custom_bwd,
    )
    from portable.amp import (
        custom_fwd as custom_fwd,
    )
    from portable.attn.api import (
        attention as attention,
    )
    from portable.attn.explain import (
        explain_attention as explain_attention,
    )
    from portable.attn.masks import (
        ALiBi as ALiBi,
    )
    from portable.attn.masks import (
        Causal as Causal,
    )
    from portable.attn.masks import (
        CausalBottomRight as CausalBottomRight,
    )
    from portable.attn.masks import (
        Document as Document,
    )
    from portable.attn.masks import (
        Mask as Mask,
    )
    from portable.attn.masks import (
        Padding as Padding,
    )
    from portable.attn.masks import (
        PrefixLM as PrefixLM,
    )
    from portable.attn.masks import (
        SlidingWindow as SlidingWindow,
    )
    from portable.attn.masks import (
        alibi_slopes as alibi_slopes,
    )
    from portable.attn.policy import (
        attention_policy as attention_policy,
    )
    from portable.compat import (
        cuda_compat as cuda_compat,
    )
    from portable.compiling import (
        CompileChoice as CompileChoice,
    )
    from portable.compiling import (
        compile as compile,
    )
    from portable.compiling import (
        explain_compile as explain_compile,
    )
    from portable.determinism import (
        deterministic as deterministic,
    )
    from portable.devices import (
        can_device_access_peer as can_device_access_peer,
    )
    from portable.devices import (
        clock_rate as clock_rate,
    )
    from portable.devices import (
        current_device as current_device,
    )
    from portable.devices import (
        device as device,
    )
    from portable.devices import (
        device_count as device_count,
    )
    from portable.devices import (
        device_index as device_index,
    )
    from portable.devices import (
        device_of as device_of,
    )
    from portable.devices import (
        generation as generation,
    )
    from portable.devices import (
        get_arch_list as get_arch_list,
    )
    from portable.devices import (
        get_device_capability as get_device_capability,
    )
    from portable.devices import (
        get_device_name as get_device_name,
    )
    from portable.devices import (
        get_device_properties as get_device_properties,
    )
    from portable.devices import (
        init as init,
    )
    from portable.devices import (
        ipc_collect as ipc_collect,
    )
    from portable.devices import (
        is_available as is_available,
    )
    from portable.devices import (
        is_bf16_supported as is_bf16_supported,
    )
    from portable.devices import (
        is_initialized as is_initialized,
    )
    from portable.devices import (
        is_out_of_memory as is_out_of_memory,
    )
    from portable.devices import (
        is_tf32_supported as is_tf32_supported,
    )
    from portable.devices import (
        list_gpu_processes as list_gpu_processes,
    )
    from portable.devices import (
        memory_usage as memory_usage,
    )
    from portable.devices import (
        power_draw as power_draw,
    )
    from portable.devices import (
        set_device as set_device,
    )
    from portable.devices import (
        synchronize as synchronize,
    )
    from portable.devices import (
        temperature as temperature,
    )
    from portable.devices import (
        utilization as utilization,
    )
    from portable.errors import (
        BackendNotFound as BackendNotFound,
    )
    from portable.errors import (
        BackendUnavailable as BackendUnavailable,
    )
    from portable.errors import (
        ConfigurationError as ConfigurationError,
    )
    from portable.errors import (
        DeviceIndexError as DeviceIndexError,
    )
    from portable.errors import (
        PluginError as PluginError,
    )
    from portable.errors import (
        PortableError as PortableError,
    )
    from portable.errors import (
        UnsupportedError as UnsupportedError,
    )
    from portable.graphs import (
        CUDAGraph as CUDAGraph,
    )
    from portable.graphs import (
        Graph as Graph,
    )
    from portable.graphs import (
        graph as graph,
    )
    from portable.graphs import (
        graph_pool_handle as graph_pool_handle,
    )
    from portable.graphs import (
        is_current_stream_capturing as is_current_stream_capturing,
    )
    from portable.graphs import (
        make_graphed_callables as make_graphed_callables,
    )
    from portable.levels import (
        PrecisionLevel as PrecisionLevel,
    )
    from portable.mantissa import (
        mantissa_bits as mantissa_bits,
    )
    from portable.memory import (
        empty_cache as empty_cache,
    )
    from portable.memory import (
        get_per_process_memory_fraction as get_per_process_memory_fraction,
    )
    from portable.memory import (
        max_memory_allocated as max_memory_allocated,
    )
    from portable.memory import (
        max_memory_reserved as max_memory_reserved,
    )
    from portable.memory import (
        mem_get_info as mem_get_info,
    )
    from portable.memory import (
        memory_allocated as memory_allocated,
    )
    from portable.memory import (
        memory_reserved as memory_reserved,
    )
    from portable.memory import (
        memory_snapshot as memory_snapshot,
    )
    from portable.memory import (
        memory_stats as memory_stats,
    )
    from portable.memory import (
        memory_summary as memory_summary,
    )
    from portable.memory import (
        reset_accumulated_memory_stats as reset_accumulated_memory_stats,
    )
    from portable.memory import (
        reset_peak_memory_stats as reset_peak_memory_stats,
    )
    from portable.memory import (
        set_per_process_memory_fraction as set_per_process_memory_fraction,
    )
    from portable.numerics import (
        Precision as Precision,
    )
    from portable.numerics import (
        precision as precision,
    )
    from portable.optimizers import (
        explain_optimizer as explain_optimizer,
    )
    from portable.optimizers import (
        optimizer_options as optimizer_options,
    )
    from portable.policy import (
        PrecisionPolicy as PrecisionPolicy,
    )
    from portable.policy import (
        precision_policy as precision_policy,
    )
    from portable.prefetching import (
        prefetch as prefetch,
    )
    from portable.profiling import (
        profile as profile,
    )
    from portable.provenance import (
        execution as execution,
    )
    from portable.random import (
        fork_rng as fork_rng,
    )
    from portable.random import (
        get_rng_state as get_rng_state,
    )
    from portable.random import (
        get_rng_state_all as get_rng_state_all,
    )
    from portable.random import (
        initial_seed as initial_seed,
    )
    from portable.random import (
        manual_seed as manual_seed,
    )
    from portable.random import (
        manual_seed_all as manual_seed_all,
    )
    from portable.random import (
        seed as seed,
    )
    from portable.random import (
        seed_all as seed_all,
    )
    from portable.random import (
        seed_everything as seed_everything,
    )
    from portable.random import (
        set_rng_state as set_rng_state,
    )
    from portable.random import (
        set_rng_state_all as set_rng_state_all,
    )
    from portable.selection import (
        active as active,
    )
    from portable.selection import (
        backends as backends,
    )
    from portable.selection import (
        use as use,
    )
    from portable.streams import (
        Event as Event,
    )
    from portable.streams import (
        Stream as Stream,
    )
    from portable.streams import (
        current_stream as current_stream,
    )
    from portable.streams import (
        default_stream as default_stream,
    )
    from portable.streams import (
        set_stream as set_stream,
    )
    from portable.streams import (
        stream as stream,
    )


def __getattr__(name: str) -> Any:
    if name in _HOME or name in _MODULES or name == "OutOfMemoryError":
        from portable._loading import ensure_torch

        ensure_torch()
        if name in _MODULES:
            return importlib.import_module(f"portable.{name}")
        home = importlib.import_module(f"portable.{_HOME[name]}" if name in _HOME else "torch")
        value = globals()[name] = getattr(home, name)
        return value
    raise AttributeError(f"module 'portable' has no attribute {name!r}; `dir(portable)` lists what it has")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES, "OutOfMemoryError"})
