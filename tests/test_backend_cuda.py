"""The CUDA backend on any machine: the probe's answers, generations by name and capability, declared figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from portable_cuda.backend import CudaBackend
from portable_cuda.facts import CAPABILITIES, GENERATIONS, PRODUCTS

from portable.policy import precision_policy


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to be a CUDA build of PyTorch on some machine."""

    def pretend(*, count: int = 0, name: str = "", capability: tuple[int, int] = (0, 0), warning: str = "", **env: str) -> None:
        def available() -> bool:
            if warning:
                import warnings

                warnings.warn(warning, stacklevel=1)
            return count > 0

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: name)
        major, minor = capability
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index=0: SimpleNamespace(major=major, minor=minor, total_memory=8)
        )
        for key, value in env.items():
            monkeypatch.setenv(key, value)

    return pretend


def test_build_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    answer = CudaBackend().probe()
    assert not answer.available
    assert "built without CUDA and ROCm" in answer.reason and torch.__version__ in answer.reason


def test_devices_are_counted(machine: Any) -> None:
    machine(count=2)
    answer = CudaBackend().probe()
    assert (answer.available, answer.device_count, answer.reason) == (True, 2, "2 devices")


def test_hidden_devices(machine: Any) -> None:
    machine(CUDA_VISIBLE_DEVICES="")
    answer = CudaBackend().probe()
    assert "CUDA_VISIBLE_DEVICES is empty" in answer.reason and "unset" in answer.next_step


def test_the_drivers_complaint_is_passed_on(machine: Any) -> None:
    machine(warning="The NVIDIA driver on your system is too old (found version 11040).\nMore.")
    answer = CudaBackend().probe()
    assert answer.reason == "The NVIDIA driver on your system is too old (found version 11040)."
    assert "update the driver" in answer.next_step


def test_the_probe_leaves_the_environment_as_it_was(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    machine(count=1)
    CudaBackend().probe()
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


@pytest.mark.parametrize(
    ("name", "capability", "expected", "autocast", "scaler"),
    [
        ("Tesla V100-SXM2-32GB", (7, 0), "V100", "float16", True),
        ("Tesla T4", (7, 5), "T4", "float16", True),
        ("NVIDIA A100-SXM4-40GB", (8, 0), "A100-40GB", "bfloat16", False),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "A100", "bfloat16", False),
        ("NVIDIA A10", (8, 6), "A10", "bfloat16", False),
        ("NVIDIA L40S", (8, 9), "L40S", "bfloat16", False),
        ("NVIDIA L4", (8, 9), "L4", "bfloat16", False),
        ("NVIDIA L40", (8, 9), "sm_89", "bfloat16", False),
        ("NVIDIA A10G", (8, 6), "sm_86", "bfloat16", False),
        ("NVIDIA H100 80GB HBM3", (9, 0), "H100", "bfloat16", False),
        ("NVIDIA H100 PCIe", (9, 0), "sm_90", "bfloat16", False),
        ("NVIDIA GH200 480GB", (9, 0), "sm_90", "bfloat16", False),
        ("NVIDIA H200", (9, 0), "H200", "bfloat16", False),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5), "sm_75", "float16", True),
        ("NVIDIA GeForce RTX 5090", (12, 0), "sm_120", "bfloat16", False),
    ],
)
def test_generation_and_policy(
    machine: Any, name: str, capability: tuple[int, int], expected: str, autocast: str, scaler: bool
) -> None:
    machine(count=1, name=name, capability=capability)
    generation = CudaBackend().generation()
    assert generation is not None and generation.name == expected
    policy = precision_policy(CudaBackend())
    assert (policy.autocast, policy.scaler) == (autocast, scaler)


def test_unknown_device_falls_to_float32(machine: Any) -> None:
    machine(count=1, name="NVIDIA Future", capability=(99, 0))
    policy = precision_policy(CudaBackend())
    assert (policy.autocast, policy.scaler) == (None, False)
    assert "not known" in policy.reason


def test_declared_figures_are_consistent() -> None:
    for name, generation in PRODUCTS.items():
        assert generation.memory and generation.bandwidth, name
        assert generation.peak["float32"] < generation.peak["float16"], name
        assert set(generation.peak) - {"tf32"} <= generation.storage | generation.matmul, name
        assert any(generation.matmul == capability.matmul for capability in CAPABILITIES.values()), name
    assert set(GENERATIONS) == set(CAPABILITIES) | set(PRODUCTS)


def test_known_figures() -> None:
    """NVIDIA's H100 data sheet prints 1979 TFLOPS of bfloat16 with sparsity; dense is half of it."""
    assert GENERATIONS["H100"].peak["bfloat16"] == pytest.approx(1979e12 / 2, rel=0.001)
    assert GENERATIONS["A100"].bandwidth == 2039e9
