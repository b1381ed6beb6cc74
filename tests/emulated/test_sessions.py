"""Each ``check_*`` file in a pytest session of its own: a process can have one device from outside, and this one has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODES = {"check_memory": "trn2,memory=8MiB", "check_two_devices": "trn2,devices=2"}


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("check_*.py")))
def test_session(name: str) -> None:
    environment = {**os.environ, "PORTABLE_NEURON_EMULATED": MODES.get(name, "1"), "OMP_NUM_THREADS": "1"}
    environment.pop("PORTABLE_BACKEND", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", str(HERE / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
