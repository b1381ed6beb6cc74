"""The emulated device in this process. The ``check_*`` files here run in sessions of their own, started by test_sessions.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

SWITCH = "PORTABLE_NEURON_EMULATED"


@pytest.fixture(scope="session")
def rehearsal() -> Any:
    """The emulated Trainium of this process."""
    assert os.environ.get(SWITCH), f"run this file through test_sessions.py, or set {SWITCH}=1"
    import portable as pt
    from portable.rehearsal import current

    pt.use("neuron")
    return current()


@pytest.fixture
def recorder(rehearsal: Any) -> Iterator[Any]:
    """The recorder, empty."""
    rehearsal.recorder.reset()
    yield rehearsal.recorder
    rehearsal.recorder.reset()


@pytest.fixture
def dev(rehearsal: Any) -> torch.device:
    return torch.device("neuron")
