"""Each ``check_*`` file in a pytest session of its own: a process has torch_npu once, with one kind of device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
VENDOR = HERE.parents[1] / ".vendor"
MODES = {
    "check_attention_910a": "910A",
    "check_attention_910c": "910C",
    "check_attention_950": "950",
    "check_first_series": "910A",
    "check_memory": "910B2,hbm=256MiB",
    "check_two_devices": "910B2,devices=2",
}
FILES = {name: name.rsplit("_", 1)[0] for name in MODES if name.startswith("check_attention_")}
NAMES = sorted({path.stem for path in HERE.glob("check_*.py")} | FILES.keys())


@pytest.mark.parametrize("name", NAMES)
def test_session(name: str) -> None:
    assert (VENDOR / "torch_npu").is_dir(), "make test unpacks torch-npu into .vendor; run it through that"
    environment = {
        **os.environ,
        "PORTABLE_ASCEND_HOST": f"{MODES.get(name, '910B2')},path={VENDOR}",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PORTABLE_BACKEND", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", str(HERE / f"{FILES.get(name, name)}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
