"""torch_npu on the host runtime in this process. ``check_*`` files run in sessions of their own (test_host_acl_sessions.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SWITCH = "PORTABLE_ASCEND_HOST"
sys.path.append(str(Path(__file__).parents[1] / "emulated"))  # operators.py and check_parity.py have what both share


@pytest.fixture(scope="session")
def rehearsal() -> Any:
    """torch_npu on this process's host runtime."""
    assert os.environ.get(SWITCH), f"run this file through test_host_acl_sessions.py, or set {SWITCH}=1,path=.vendor"
    import portable as pt
    from portable.rehearsal import current

    pt.use("ascend")
    return current()


@pytest.fixture
def recorder(rehearsal: Any) -> Iterator[Any]:
    """The recorder, empty."""
    rehearsal.recorder.reset()
    yield rehearsal.recorder
    rehearsal.recorder.reset()


@pytest.fixture
def dev(rehearsal: Any) -> torch.device:
    return torch.device("npu")
