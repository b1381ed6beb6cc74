"""The generated documents are up to date, and what it says of each backend is true."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from portable_ascend.surface import SURFACE as NPU_SURFACE
from portable_neuron.surface import ABSENT as NEURON_ABSENT
from portable_neuron.surface import SURFACE as NEURON_SURFACE

from portable.catalogue import BY_NAME, FUNCTIONS
from portable.documents import DOCUMENTS
from portable.plugins import registry
from portable.support import lookup
from portable.support_table import chain, shipped_backends

ROOT = Path(__file__).parent.parent
WHEEL = ROOT / ".vendor" / "torch_npu"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == DOCUMENTS[name](), "run `make docs`"


def test_every_backend_has_a_cell_for_every_function_and_no_other() -> None:
    for backend in shipped_backends():
        assert set(backend.support) == set(BY_NAME), backend.spec.name


def test_every_cell_explains_itself() -> None:
    for backend in shipped_backends():
        for name, cell in backend.support.items():
            for part in chain(cell):
                if part.kind == "native":
                    assert part.path, (backend.spec.name, name)
                else:
                    assert len(part.note) > 3, (backend.spec.name, name)
                if part.kind == "unsupported":
                    assert len(part.alternative) > 8, (backend.spec.name, name)


def test_cuda_cells_exist_in_this_pytorch() -> None:
    """torch.cuda's Python surface is the same in builds without CUDA, so the claim can be checked on any machine."""
    for name, cell in registry().backends["cuda"].support.items():
        assert cell.kind == "native"
        assert lookup(cell.path, torch.cuda) is not None, f"torch.cuda has no {cell.path} (catalogue: {name})"


def test_catalogue_holds_what_training_code_calls() -> None:
    """The list of the specification, as torch.cuda spells it."""
    wanted = [
        "device_count", "current_device", "set_device", "device", "get_device_name", "get_device_properties",
        "get_device_capability", "synchronize", "Stream", "stream", "current_stream", "default_stream", "Event",
        "memory_allocated", "memory_reserved", "memory_stats", "memory_summary", "memory_snapshot", "max_memory_allocated",
        "max_memory_reserved", "reset_peak_memory_stats", "mem_get_info", "empty_cache", "set_per_process_memory_fraction",
        "OutOfMemoryError", "manual_seed", "manual_seed_all", "seed", "initial_seed", "get_rng_state", "get_rng_state_all",
        "set_rng_state", "set_rng_state_all", "is_bf16_supported", "utilization", "is_available", "ipc_collect",
        "can_device_access_peer", "CUDAGraph", "graph", "make_graphed_callables", "nvtx.range_push", "nvtx.range",
    ]  # fmt: skip
    assert set(wanted) <= set(BY_NAME)
    assert len(FUNCTIONS) == len(BY_NAME)


@pytest.fixture(scope="module")
def npu_names() -> set[str]:
    """``__all__`` of torch.npu in the vendor's wheel, read without importing it."""
    source = WHEEL / "npu" / "__init__.py"
    if not source.exists():
        pytest.skip("torch-npu's wheel is not unpacked in .vendor; `make test` does it (the wheel exists for Linux only)")
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError("torch_npu/npu/__init__.py has no __all__")


def test_ascend_cells_exist_in_the_vendor_wheel(npu_names: set[str]) -> None:
    for name, cell in registry().backends["ascend"].support.items():
        for part in chain(cell)[:1]:
            if part.kind == "native" and not part.path.startswith("torch."):
                assert part.path in npu_names, name


def test_ascend_surface_leaves_nothing_out_but_what_it_says(npu_names: set[str]) -> None:
    assert {name for name in BY_NAME if name in npu_names} - set(NPU_SURFACE) == {"get_device_capability"}


def test_neuron_cells_follow_the_documented_surface() -> None:
    """The documented names are called directly; the documented gaps never are without a way out."""
    support = registry().backends["neuron"].support
    for name in NEURON_SURFACE:
        assert support[name].kind == "native" and support[name].path == name and support[name].otherwise is None
    for name in NEURON_ABSENT:
        assert chain(support[name])[-1].kind != "native", name
    assert not set(NEURON_SURFACE) & set(NEURON_ABSENT)
