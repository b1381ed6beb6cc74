"""Where a device's module under ``torch`` differs from torch.cuda, by device type, and how its generation is found.

Source: the modules themselves, PyTorch 2.13: torch/xpu, torch/mps, torch/mtia and torch/backends/mps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from portable.baseline import NO_GRAPHS, NO_MONITOR, NO_STREAMS
from portable.spec import Generation
from portable.support import Support, emulated, native, unsupported
from portable_generic.facts import HPU_GENERATIONS, MPS_GENERATIONS, XPU_GENERATIONS


def _watts_to_milliwatts(device: Any = None) -> int:
    return round(1000 * torch.xpu.power_draw(device))


def _mps_allocated(device: Any = None) -> int:
    return torch.mps.current_allocated_memory()


def _mps_reserved(device: Any = None) -> int:
    return torch.mps.driver_allocated_memory()


def _mps_memory(device: Any = None) -> tuple[int, int]:
    total = torch.mps.recommended_max_memory()
    return max(0, total - torch.mps.driver_allocated_memory()), total


def _mps_set_fraction(fraction: float, device: Any = None) -> None:
    torch.mps.set_per_process_memory_fraction(float(fraction))


def _mps_name(device: Any = None) -> str:
    return torch.backends.mps.get_name()


def _mps_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=_mps_name(),
        total_memory=torch.mps.recommended_max_memory(),
        multi_processor_count=torch.backends.mps.get_core_count(),
    )


def _mtia_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(**torch.mtia.get_device_properties(device))


_NO_PEAKS = unsupported("Metal's allocator keeps no counters", "sample pt.memory.allocated() where the peak is expected")

CHANGES: dict[str, Mapping[str, Support]] = {
    "xpu": {
        "get_arch_list": native("get_arch_list", note="names of Intel GPU architectures"),
        "is_tf32_supported": native("is_tf32_supported"),
        # torch.xpu has monitoring functions from PyTorch 2.13 on.
        "power_draw": emulated(_watts_to_milliwatts, "torch.xpu.power_draw answers watts; multiplied by 1000")
        if hasattr(torch.xpu, "power_draw")
        else NO_MONITOR,
        "CUDAGraph": native("XPUGraph", NO_GRAPHS),
        **{
            name: native(name, NO_GRAPHS)
            for name in ("graph", "make_graphed_callables", "is_current_stream_capturing", "graph_pool_handle")
        },
    },
    "mps": {
        "synchronize": native("torch.accelerator.synchronize", note="torch.mps.synchronize takes no device"),
        "get_device_name": emulated(_mps_name, "torch.backends.mps.get_name"),
        "get_device_properties": emulated(
            _mps_properties, "from torch.backends.mps; total_memory: Metal's recommended maximum"
        ),
        "memory_allocated": emulated(_mps_allocated, "torch.mps.current_allocated_memory"),
        "memory_reserved": emulated(_mps_reserved, "torch.mps.driver_allocated_memory"),
        "mem_get_info": emulated(_mps_memory, "Metal's recommended maximum, less what the driver allocated for this process"),
        "set_per_process_memory_fraction": emulated(
            _mps_set_fraction, "torch.mps.set_per_process_memory_fraction, which takes no device"
        ),
        **dict.fromkeys(
            (
                "max_memory_allocated",
                "max_memory_reserved",
                "memory_stats",
                "memory_summary",
                "reset_peak_memory_stats",
                "reset_accumulated_memory_stats",
            ),
            _NO_PEAKS,
        ),
        "manual_seed_all": native("manual_seed"),
        "seed_all": native("seed"),
        "Stream": NO_STREAMS,
        "set_stream": NO_STREAMS,
    },
    "mtia": {
        "get_device_properties": emulated(_mtia_properties, "torch.mtia answers a dictionary; made attributes"),
    },
}


def _xpu_generation(index: int) -> Generation:
    properties = torch.xpu.get_device_properties(index)
    return XPU_GENERATIONS["xe_matrix" if properties.has_subgroup_matrix_multiply_accumulate else "xe"]


GENERATION: dict[str, Callable[[int], Generation]] = {
    "xpu": _xpu_generation,
    "mps": lambda index: MPS_GENERATIONS["apple"],
    "hpu": lambda index: HPU_GENERATIONS["gaudi"],
}
