"""Trainium without the hardware: the diagnosis and the table bound to a module with the documented names.

Nothing here runs on a Trainium device.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from portable_neuron.backend import NeuronBackend
from portable_neuron.diagnosis import Found, diagnose
from portable_neuron.facts import GENERATIONS, SPEC
from portable_neuron.surface import ABSENT, SURFACE

from portable.compiling import explain_compile
from portable.errors import UnsupportedError
from portable.policy import precision_policy

GOOD = Found("2.13.3.0.99", False, "2.13.0+cpu", ("/dev/neuron0",), True, None)


@pytest.mark.parametrize(
    ("found", "reason", "next_step"),
    [
        (replace(GOOD, version=None), "torch-neuronx is not installed", "AWS's own package index"),
        (replace(GOOD, version=None, lite=True), "libtorch-neuronx-lite", "AWS's own package index"),
        (replace(GOOD, version="1.0"), "placeholder from PyPI", "uninstall it"),
        (replace(GOOD, version="2.9.0.2.15"), "PyTorch/XLA", "environment of its own"),
        (replace(GOOD, version="2.14.3.0.1"), "made for torch 2.14, but torch 2.13.0+cpu", "install torch 2.14"),
        (replace(GOOD, devices=(), driver=False), "kernel module is not loaded", "neuron-ls"),
        (replace(GOOD, devices=(), driver=True), "kernel module is loaded", "Trn2 or Trn3"),
        (replace(GOOD, visible_cores=""), "NEURON_RT_VISIBLE_CORES is set but empty", "unset"),
        (
            replace(GOOD, load_error="Failed to get Neuron instance information"),
            "Failed to get Neuron instance information",
            "neuron-ls",
        ),
    ],
)
def test_each_obstacle_is_named_with_its_next_step(found: Found, reason: str, next_step: str) -> None:
    answer = diagnose(found)
    assert answer is not None and not answer.available
    assert reason in answer.reason
    assert next_step in answer.next_step


def test_no_obstacle_where_everything_is_in_place() -> None:
    assert diagnose(GOOD) is None


class FakeNeuron:
    """torch.neuron with the documented names only."""

    __name__ = "torch.neuron"

    def __init__(self, family: str = "trn2", cores: int = 4) -> None:
        self.family, self.cores = family, cores
        for name in SURFACE:
            if not hasattr(self, name):
                setattr(self, name, lambda *args, _name=name, **kwargs: _name)

    def is_available(self) -> bool:
        return self.cores > 0

    def device_count(self) -> int:
        if not self.cores:
            raise RuntimeError("Logical Neuron Core(s) not available\nret=-16")
        return self.cores

    def get_device_properties(self, device: Any = 0) -> Any:
        return SimpleNamespace(name=self.family, total_memory=24 * 2**30)

    def memory_reserved(self, device: Any = None) -> int:
        return 2**30


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> NeuronBackend:
    found = NeuronBackend()
    monkeypatch.setattr(torch, "neuron", FakeNeuron(), raising=False)
    monkeypatch.setattr(found, "load", lambda: None)
    monkeypatch.setattr("portable_neuron.backend.look", lambda: GOOD)
    return found


def test_probe_counts_logical_cores(backend: NeuronBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.probe().device_count == 4
    monkeypatch.setattr(torch, "neuron", FakeNeuron(cores=0))
    answer = backend.probe()
    assert not answer.available
    assert answer.reason == "Logical Neuron Core(s) not available", "the runtime's own first line, not a bare False"


def test_documented_names_are_called_directly_and_gaps_are_filled(backend: NeuronBackend) -> None:
    table = backend.bind()
    assert table["memory_allocated"]() == "memory_allocated"
    assert table["mem_get_info"]() == (23 * 2**30, 24 * 2**30), "total less what this process reserved"
    assert table["get_device_capability"]() == (0, 0)
    assert table["ipc_collect"]() is None
    for name in ("CUDAGraph", "utilization", "set_per_process_memory_fraction"):
        with pytest.raises(UnsupportedError, match=f"{name} is not available on the neuron backend"):
            table[name]()


def test_a_later_version_with_the_function_is_used(backend: NeuronBackend) -> None:
    torch.neuron.get_rng_state_all = lambda: ["state"]  # type: ignore[attr-defined]
    assert backend.bind()["get_rng_state_all"]() == ["state"]
    assert "get_rng_state_all" in ABSENT


@pytest.mark.parametrize(("family", "name"), [("trn2", "trn2"), ("trn2u", "trn2"), ("trn3u", "trn3"), ("inf9", None)])
def test_instance_families_map_to_generations(
    backend: NeuronBackend, monkeypatch: pytest.MonkeyPatch, family: str, name: str | None
) -> None:
    monkeypatch.setattr(torch, "neuron", FakeNeuron(family))
    found = backend.generation()
    assert (found.name if found else None) == name


def test_a_logical_core_is_a_quarter_of_the_chip() -> None:
    """Chip figures of AWS's architecture pages: 96 GiB and 667 TFLOPS bf16 (Trn2), 144 GiB and 671 (Trn3)."""
    for name, gibibytes, teraflops in (("trn2", 96, 667), ("trn3", 144, 671)):
        generation = GENERATIONS[name]
        assert generation.memory == gibibytes * 2**30 / 4
        assert generation.peak["bfloat16"] == teraflops * 1e12 / 4


def test_policy_is_bfloat16_without_scaling(backend: NeuronBackend) -> None:
    policy = precision_policy(backend)
    assert (policy.autocast, policy.scaler) == ("bfloat16", False)


def test_compile_is_static_and_drops_modes(backend: NeuronBackend) -> None:
    choice = explain_compile(backend, mode="max-autotune", dynamic=True, fullgraph=True)
    assert choice.backend == "neuron"
    assert dict(choice.kwargs) == {"fullgraph": True, "dynamic": False}
    assert set(choice.dropped) == {"mode", "dynamic"}
    assert explain_compile(backend, dynamic=False).dropped == {}


def test_optimizers_avoid_operators_without_a_kernel() -> None:
    assert SPEC.optimizers["AdamW"].options == {"fused": True}
    assert SPEC.optimizers["SGD"].options == {"foreach": False}
