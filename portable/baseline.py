"""The support table that every backend starts from.

PyTorch asks of a device module (``torch.cuda``, ``torch.xpu``, that of a PrivateUse1 backend) that it carries torch.cuda's
names (PyTorch documentation, "Facilitating New Backend Integration by PrivateUse1"); ``torch.accelerator`` has a part of
them for every device. The baseline takes the module's own function where there is one, then ``torch.accelerator``'s, then a
plain equivalent from `portable.emulation`.
"""

from __future__ import annotations

from functools import cache

from portable.support import Support, emulated, native, noop, unsupported

NO_STREAMS = unsupported("the device has a single queue", "leave streams out: work runs in the order it is issued")
NO_GRAPHS = unsupported("the device records no graphs", "use pt.compile(model), or call the function directly")
NO_MONITOR = unsupported("PyTorch has no monitoring interface for the device", "use the vendor's command-line monitor")


def _or_accelerator(name: str, accelerator: str | None = None) -> Support:
    return native(name, native(f"torch.accelerator.{accelerator or name}"))


@cache
def baseline() -> dict[str, Support]:
    """The table; made on first use, because the emulations import torch."""
    from portable import emulation as e

    return {
        "is_available": _or_accelerator("is_available"),
        "is_initialized": native("is_initialized", emulated(e.constant(True), "a device that is usable is initialised")),
        "init": native("init", noop("the device starts at first use")),
        "device_count": _or_accelerator("device_count"),
        "current_device": _or_accelerator("current_device", "current_device_index"),
        "set_device": _or_accelerator("set_device", "set_device_index"),
        "device": native("device", native("torch.accelerator.device_index")),
        "device_of": native("device_of", emulated(e.device_of, "torch.accelerator.device_index of the tensor's device")),
        "get_device_name": native("get_device_name", unsupported("the device does not tell its name", "use str(pt.device())")),
        "get_device_properties": native(
            "get_device_properties",
            unsupported("the device does not describe itself", "use pt.memory.info() for the size of its memory"),
        ),
        "get_device_capability": emulated(e.constant((0, 0)), "(0, 0): the device has no CUDA compute capability"),
        "get_arch_list": emulated(e.constant([]), "empty: the device has no CUDA architectures"),
        "can_device_access_peer": native(
            "can_device_access_peer", emulated(e.constant(False), "False: no direct access between devices is known")
        ),
        "synchronize": _or_accelerator("synchronize"),
        "is_bf16_supported": native("is_bf16_supported", emulated(e.supports_bf16, "multiplies two bfloat16 matrices")),
        "is_tf32_supported": emulated(e.constant(False), "False: TF32 is a format of NVIDIA GPUs"),
        "Stream": native("Stream", native("torch.Stream")),
        "Event": native("Event", native("torch.Event")),
        "stream": native("stream", emulated(e.stream_context, "torch.accelerator.set_stream, restored at the end")),
        "set_stream": _or_accelerator("set_stream"),
        "current_stream": _or_accelerator("current_stream"),
        "default_stream": native("default_stream", native("torch.accelerator.current_stream")),
        "memory_allocated": _or_accelerator("memory_allocated"),
        "max_memory_allocated": _or_accelerator("max_memory_allocated"),
        "memory_reserved": _or_accelerator("memory_reserved"),
        "max_memory_reserved": _or_accelerator("max_memory_reserved"),
        "memory_stats": _or_accelerator("memory_stats"),
        "memory_summary": native("memory_summary", emulated(e.memory_summary, "torch.accelerator.memory_stats as text")),
        "memory_snapshot": native(
            "memory_snapshot",
            unsupported("the allocator does not list its blocks", "use pt.memory.stats() or pt.profile(profile_memory=True)"),
        ),
        "reset_peak_memory_stats": _or_accelerator("reset_peak_memory_stats"),
        "reset_accumulated_memory_stats": _or_accelerator("reset_accumulated_memory_stats"),
        "mem_get_info": _or_accelerator("mem_get_info", "get_memory_info"),
        "empty_cache": _or_accelerator("empty_cache"),
        "set_per_process_memory_fraction": native(
            "set_per_process_memory_fraction",
            unsupported("the allocator has no limit per process", "choose a smaller batch, or limit the process from outside"),
        ),
        "get_per_process_memory_fraction": native(
            "get_per_process_memory_fraction", emulated(e.constant(1.0), "1.0: no limit is in force")
        ),
        "OutOfMemoryError": native("torch.OutOfMemoryError", note="one class for every device"),
        "ipc_collect": native("ipc_collect", noop("the device's memory is not shared between processes")),
        "manual_seed": native("manual_seed", native("torch.manual_seed", note="seeds every device and the CPU")),
        "manual_seed_all": native("manual_seed_all", native("torch.manual_seed", note="seeds every device and the CPU")),
        "seed": native("seed", emulated(e.seed, "manual_seed_all with a seed from the system")),
        "seed_all": native("seed_all", emulated(e.seed, "manual_seed_all with a seed from the system")),
        "initial_seed": native("initial_seed", native("torch.initial_seed", note="the CPU generator's")),
        "get_rng_state": native("get_rng_state"),
        "get_rng_state_all": native("get_rng_state_all", emulated(e.get_rng_state_all, "get_rng_state of each device")),
        "set_rng_state": native("set_rng_state"),
        "set_rng_state_all": native("set_rng_state_all", emulated(e.set_rng_state_all, "set_rng_state of each device")),
        "CUDAGraph": NO_GRAPHS,
        "graph": NO_GRAPHS,
        "make_graphed_callables": NO_GRAPHS,
        "is_current_stream_capturing": emulated(e.constant(False), "False: nothing can be recorded"),
        "graph_pool_handle": NO_GRAPHS,
        "nvtx.range_push": emulated(e.range_push, "a torch.profiler range"),
        "nvtx.range_pop": emulated(e.range_pop, "a torch.profiler range"),
        "nvtx.range": emulated(e.profiler_range, "a torch.profiler range"),
        "nvtx.mark": emulated(e.mark, "a torch.profiler range of no length"),
        "utilization": native("utilization", NO_MONITOR),
        "memory_usage": native("memory_usage", NO_MONITOR),
        "temperature": native("temperature", NO_MONITOR),
        "power_draw": native("power_draw", NO_MONITOR),
        "clock_rate": native("clock_rate", NO_MONITOR),
        "list_gpu_processes": native("list_gpu_processes", NO_MONITOR),
    }
