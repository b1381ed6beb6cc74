"""The API suite on the backend that the environment names; ``check_*`` files run in sessions (test_api_sessions.py)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import portable as pt

# What each backend of a session claims to be; nothing here runs on hardware other than the CPU.
EXECUTION = {"cpu": "hardware", "ascend": "vendor-package-on-host", "neuron": "emulated"}


@pytest.fixture(scope="session")
def name() -> str:
    """Name of the session's backend."""
    found = os.environ.get("PORTABLE_BACKEND", "cpu")
    assert found in EXECUTION, "run this file through test_api_sessions.py, or set PORTABLE_BACKEND"
    return found


@pytest.fixture(autouse=True)
def chosen(name: str) -> Any:
    """The session's backend, active."""
    pt.use(name)
    pt.init()
    found = pt.active()
    assert found.spec.name == name
    return found


@pytest.fixture
def device(chosen: Any) -> torch.device:
    return pt.device()
