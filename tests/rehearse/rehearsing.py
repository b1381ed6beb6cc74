"""Running `portable rehearse` as a process, and finding marked lines."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from portable.rehearse import Finding, Result

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
_VENDOR = ROOT / ".vendor"
_LEFT_OUT = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("PORTABLE_BACKEND", "PORTABLE_NEURON_EMULATED", "PORTABLE_ASCEND_HOST"),
)


def vendor(backend: str) -> dict[str, str]:
    """The variables that a rehearsal on this backend needs; skips the test if the vendor's package is not here."""
    if backend != "ascend":
        return {}
    if (_VENDOR / "torch_npu").is_dir():
        return {"PORTABLE_ASCEND_HOST": f"1,path={_VENDOR}"}
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not here: make .vendor/torch_npu unpacks it")
    return {}


def rehearse(
    *arguments: str | Path,
    backend: str = "neuron",
    launcher: tuple[str, ...] = (),
    folder: Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder; the arguments come after ``--backend``."""
    environment = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
    command = [sys.executable, *launcher, "-m", "portable", "rehearse", "--backend", backend, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170, check=False)


def marked(script: str, mark: str) -> int:
    """Number of the line that carries a mark."""
    lines = (SCRIPTS / script).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# MARK {mark}"))
    return number


def at(result: Result, rule: str, line: int | None = None) -> Finding:
    """The one finding of a rule in the forward pass, at a line if one is given."""
    found = [f for f in result.findings if f.rule == rule and line in (None, f.line) and not f.backward]
    assert len(found) == 1, [(f.rule, f.line, f.what) for f in result.findings]
    return found[0]
