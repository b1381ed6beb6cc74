"""pt.cuda_compat on an accelerator other than CUDA: an emulated one with two devices, served by the generic backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCENARIO = Path(__file__).parent / "compat_accelerator.py"
ZERO, ONE = "widget:0", "widget:1"

EXPECTED: dict[str, Any] = {
    "backend": "generic",
    "to": [ZERO, ONE, ONE, ZERO, ZERO, ONE],
    "factories": [ONE, ONE, ZERO],
    "like": [ONE, ONE],
    "modules": [ONE, ZERO, ONE],
    "default": [ONE, ONE],
    "current": [1, ONE],
    "set": [1, ONE],
    "back": ["cpu", "cpu"],
    "values": True,
    # Unlike on the CPU, the tensor lies on a device, as a CUDA tensor does.
    "is_cuda": [True, False, True],
    "type": ["torch.cuda.FloatTensor", "torch.FloatTensor", True, False],
    "get_device": 1,
    "counts": [True, 2, 2],
    "accelerator": ["cuda", True],
    "accelerator stream": "widget",
    "streams": ["widget", True, "widget", True],
    "losses equal": True,
    "mm on device": True,
    "one id": [ONE, ONE],
    "function": [ONE],
    "autocast": "torch.float32",  # the generation of the device is not known
    "script": [ONE],
    "changed": [
        "AdamW(capturable=True)",
        "AdamW(fused=True)",
        "nn.DataParallel",
        "nn.parallel.data_parallel",
        "torch.autocast",
    ],
    "no equivalent": ["torch.cuda.CUDAGraph"],
    "details": ["widget", ZERO, ONE],
    "is_cuda after": False,
    "accelerator after": "widget",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "PORTABLE_BACKEND"}
    command = [sys.executable, "-W", "ignore", str(SCENARIO)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("question", EXPECTED)
def test_on_an_accelerator(found: dict[str, Any], question: str) -> None:
    assert found[question] == EXPECTED[question]


def test_an_ordinal_beyond_the_devices(found: dict[str, Any]) -> None:
    assert found["beyond"] == (
        "DeviceIndexError: the program asked for cuda:5, but the generic backend has 2 devices. "
        "Choose an ordinal below 2, or start fewer processes per machine."
    )
    assert found["graph"].startswith("UnsupportedError: CUDAGraph is not available on the generic backend: ")


def test_everything_asked_is_checked(found: dict[str, Any]) -> None:
    assert set(found) == {*EXPECTED, "beyond", "graph"}
