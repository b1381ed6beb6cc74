"""The vendors' own packages on the path of a machine without their hardware: what `portable` says, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

VENDOR = Path(__file__).parent.parent / ".vendor"
RELEASE = torch.__version__.split("+")[0]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(VENDOR.resolve()), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = {key: value for key, value in os.environ.items() if key not in ("PORTABLE_BACKEND", "TORCH_DEVICE_BACKEND_AUTOLOAD")}
    env |= {"PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def info() -> dict[str, Any]:
    if not (VENDOR / "torch_npu").exists():
        pytest.skip("the vendors' packages are not unpacked in .vendor; `make test` does it (they exist for Linux only)")
    done = python("-m", "portable", "info", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pytorch_itself_does_not_start_with_the_package_there(info: dict[str, Any]) -> None:
    """What users see without `portable`; if a later PyTorch survives this, the loading in portable._loading can go."""
    done = python("-c", "import torch")
    assert done.returncode != 0
    assert "Failed to load the backend extension: torch_npu" in done.stderr


def test_missing_cann_is_named(info: dict[str, Any]) -> None:
    ascend = next(backend for backend in info["backends"] if backend["name"] == "ascend")
    assert not ascend["available"]
    if torch.version.cuda:
        assert "build" in ascend["reason"] or "needs torch" in ascend["reason"]
    elif RELEASE == "2.13.0":
        assert "libhccl.so was not found" in ascend["reason"]
        assert "set_env.sh" in ascend["next_step"]
    else:
        assert f"needs torch 2.13.0, but torch {torch.__version__}" in ascend["reason"]


def test_the_failed_load_is_shown_and_the_cpu_works(info: dict[str, Any]) -> None:
    assert info["active"] == "cpu"
    assert any("torch_npu" in name and "failed to load" in text for name, text in info["versions"].items())


def test_placeholder_is_recognised(info: dict[str, Any]) -> None:
    neuron = next(backend for backend in info["backends"] if backend["name"] == "neuron")
    assert neuron["reason"] == "torch-neuronx 1.0 is the placeholder from PyPI, not the real package"
    assert "uninstall it" in neuron["next_step"]


def test_asking_for_the_backend_gives_one_message_and_a_non_zero_exit(info: dict[str, Any]) -> None:
    done = python("-c", "import portable as pt; pt.device()", PORTABLE_BACKEND="npu")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "backend 'npu' was asked for by the environment variable PORTABLE_BACKEND" in last
    assert "Next step:" in last
