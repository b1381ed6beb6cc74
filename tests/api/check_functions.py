"""Every function of the device API, by both of its names, does what the backend's table says: works, does nothing, refuses."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import portable as pt
from portable import catalogue, selection

MIB = 2**20


def _pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, int) for part in value)


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _nothing(value: Any) -> bool:
    return value is None


# Arguments, and what the answer must be, for each function. Contents are tested in check_semantics.py.
CALLS: dict[str, tuple[Callable[[], tuple[Any, ...]], Callable[[Any], bool]]] = {
    "is_available": (tuple, lambda v: v is True),
    "is_initialized": (tuple, lambda v: v is True),
    "init": (tuple, _nothing),
    "device_count": (tuple, lambda v: v >= 1),
    "current_device": (tuple, lambda v: v == 0),
    "set_device": (lambda: (0,), _nothing),
    "device": (lambda: (0,), lambda v: hasattr(v, "__enter__")),
    "device_of": (lambda: (torch.ones(1, device=pt.device()),), lambda v: hasattr(v, "__enter__")),
    "get_device_name": (tuple, lambda v: isinstance(v, str) and bool(v)),
    "get_device_properties": (tuple, lambda v: v.total_memory > MIB and isinstance(v.name, str)),
    "get_device_capability": (tuple, _pair),
    "get_arch_list": (tuple, lambda v: isinstance(v, list)),
    "can_device_access_peer": (lambda: (0, 0), lambda v: isinstance(v, bool)),
    "synchronize": (tuple, _nothing),
    "is_bf16_supported": (tuple, lambda v: v is True),
    "is_tf32_supported": (tuple, lambda v: isinstance(v, bool)),
    "Stream": (tuple, lambda v: v.query() is True),
    "Event": (tuple, lambda v: v.query() is True),
    "stream": (lambda: (pt.Stream(),), lambda v: hasattr(v, "__enter__")),
    "set_stream": (lambda: (pt.default_stream(),), _nothing),
    "current_stream": (tuple, lambda v: v == pt.default_stream()),
    "default_stream": (tuple, lambda v: v.synchronize() is None),
    "memory_allocated": (tuple, _count),
    "max_memory_allocated": (tuple, _count),
    "memory_reserved": (tuple, _count),
    "max_memory_reserved": (tuple, _count),
    "memory_stats": (tuple, lambda v: v["allocated_bytes.all.current"] >= 0 and v["allocated_bytes.all.peak"] >= 0),
    "memory_summary": (tuple, lambda v: isinstance(v, str) and len(v) > 50),
    "memory_snapshot": (tuple, lambda v: v is not None),
    "reset_peak_memory_stats": (tuple, _nothing),
    "reset_accumulated_memory_stats": (tuple, _nothing),
    "mem_get_info": (tuple, lambda v: _pair(v) and 0 <= v[0] <= v[1]),
    "empty_cache": (tuple, _nothing),
    "set_per_process_memory_fraction": (lambda: (1.0,), _nothing),
    "get_per_process_memory_fraction": (tuple, lambda v: v == 1.0),
    "OutOfMemoryError": (lambda: ("full",), lambda v: isinstance(v, torch.OutOfMemoryError)),
    "ipc_collect": (tuple, _nothing),
    "manual_seed": (lambda: (3,), _nothing),
    "manual_seed_all": (lambda: (3,), _nothing),
    "seed": (tuple, lambda v: v is None or isinstance(v, int)),
    "seed_all": (tuple, lambda v: v is None or isinstance(v, int)),
    "initial_seed": (tuple, lambda v: isinstance(v, int)),
    "get_rng_state": (tuple, lambda v: v.dtype == torch.uint8),
    "get_rng_state_all": (tuple, lambda v: len(v) == pt.device_count()),
    "set_rng_state": (lambda: (pt.get_rng_state(),), _nothing),
    "set_rng_state_all": (lambda: (pt.get_rng_state_all(),), _nothing),
    "is_current_stream_capturing": (tuple, lambda v: v is False),
    "nvtx.range_push": (lambda: ("range",), lambda v: isinstance(v, int)),
    "nvtx.range_pop": (tuple, lambda v: isinstance(v, int)),
    "nvtx.range": (lambda: ("range",), lambda v: hasattr(v, "__enter__")),
    "nvtx.mark": (lambda: ("mark",), lambda v: True),
    "utilization": (tuple, lambda v: isinstance(v, int) and 0 <= v <= 100),
}
# What needs hardware even where a vendor has it: a graph's recording, sensors.
HARDWARE = {
    "CUDAGraph": (), "graph": (object(),), "make_graphed_callables": (len, ()), "graph_pool_handle": (), "memory_usage": (),
    "temperature": (), "power_draw": (), "clock_rate": (), "list_gpu_processes": (),
}  # fmt: skip


DOCUMENT = Path(__file__).parents[2] / "docs" / "device-api.md"


def documented(backend: str) -> dict[str, list[str]]:
    """Function of `portable` to the kinds that docs/device-api.md states for a backend, the preferred one first."""
    found: dict[str, list[str]] = {}
    column = 0
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "function":
            column = cells.index(backend)
        elif cells[0].startswith("`pt."):
            found[cells[0].split("`")[1].removeprefix("pt.")] = cells[column].split(" / ")
    return found


def vendors_own(chosen: Any, function: str) -> Any:
    """The object of PyTorch or the vendor's module that a native cell names, None if this release lacks it."""
    path = chosen.support[function].path
    target: Any = torch if path.startswith("torch.") else chosen.module()
    for part in path.removeprefix("torch.").split("."):
        target = getattr(target, part, None)
    return target


def both(name: str) -> list[Any]:
    return [attrgetter(catalogue.BY_NAME[name].public_name)(pt), attrgetter(name)(pt.cuda)]


def test_the_list_is_complete(chosen: Any) -> None:
    assert CALLS.keys() | HARDWARE.keys() == set(catalogue.BY_NAME) == set(chosen.support)
    assert not CALLS.keys() & HARDWARE.keys()


@pytest.mark.parametrize("function", catalogue.BY_NAME)
def test_the_documents_table_tells_the_truth(chosen: Any, name: str, function: str) -> None:
    """Native: the vendor's own object is called, with nothing in between; the others work, do nothing, or refuse."""
    kinds = documented(name)[catalogue.BY_NAME[function].public_name]
    own = vendors_own(chosen, function) if kinds[0] == "native" else None
    kind = kinds[0] if kinds[0] != "native" or own is not None else kinds[1]
    if kind == "native":
        assert selection.call(function) == own
    make, right = CALLS.get(function, (lambda: HARDWARE[function], lambda v: True))
    for call in both(function):
        if kind == "unsupported":
            with pytest.raises(pt.UnsupportedError) as caught:
                call(*make())
            error = caught.value
            assert (error.backend, error.function) == (name, function) and error.reason and error.alternative
            assert f"{function} is not available on the {name} backend: " in str(error) and "Instead: " in str(error)
        elif function in CALLS:
            answer = call(*make())
            assert right(answer), answer
            assert kind != "no-op" or answer is None


TAKES_DEVICE = [
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "memory_summary",
    "mem_get_info", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "get_device_name", "get_device_properties",
    "get_device_capability", "synchronize", "current_stream", "default_stream", "get_rng_state",
]  # fmt: skip


@pytest.mark.parametrize("function", TAKES_DEVICE)
def test_devices_of_every_form(chosen: Any, device: torch.device, function: str) -> None:
    for call in both(function):
        kind = type(call())
        for form in (None, 0, str(device), device, torch.device(device.type, 0), device.type):
            assert type(call(form)) is kind


@pytest.mark.parametrize(
    "function", ["memory_allocated", "get_device_name", "synchronize", "get_device_properties", "set_device"]
)
def test_devices_that_are_not_there(chosen: Any, function: str) -> None:
    """The vendor's own functions give the vendor's error."""
    own = chosen.support[function].kind != "native"
    for call in both(function):
        with pytest.raises(pt.PortableError if own else (IndexError, ValueError, RuntimeError, AssertionError)):
            call(99)
        with pytest.raises(pt.PortableError if own else (ValueError, RuntimeError, TypeError)):
            call("fpga")
