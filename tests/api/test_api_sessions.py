"""The API suite on the CPU, on torch_npu above the host runtime, and on the emulated Trainium: one process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

HERE = Path(__file__).parent
TESTS = HERE.parent
VENDOR = TESTS.parent / ".vendor"
SESSIONS = {
    "cpu": {"PORTABLE_BACKEND": "cpu"},
    "ascend": {"PORTABLE_BACKEND": "ascend", "PORTABLE_ASCEND_HOST": f"910B2,path={VENDOR}"},
    "neuron": {"PORTABLE_BACKEND": "neuron", "PORTABLE_NEURON_EMULATED": "1"},
}
SWITCHES = ("PORTABLE_BACKEND", "PORTABLE_ASCEND_HOST", "PORTABLE_NEURON_EMULATED", "ASCEND_RT_VISIBLE_DEVICES")
EXECUTION = {"cpu": "hardware", "ascend": "vendor-package-on-host", "neuron": "emulated"}


def python(session: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    environment |= {"OMP_NUM_THREADS": "1", **SESSIONS[session], **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


# All files in one process: each start of torch_npu costs more than most of them.
FILES = sorted(HERE.glob("check_*.py"))


@pytest.mark.parametrize("session", SESSIONS)
def test_session(session: str) -> None:
    done = python(session, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_session_with_two_devices() -> None:
    host = f"910B2,devices=2,path={VENDOR}"
    done = python("ascend", "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "two_devices.py", PORTABLE_ASCEND_HOST=host)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


sys.path.insert(0, str(TESTS / "distributed"))


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch was built without gloo")
@pytest.mark.parametrize("session", SESSIONS)
def test_two_processes_train_as_one(session: str, tmp_path: Path) -> None:
    """DDP and FSDP2 through pt.distributed.init(), against plain PyTorch in one process on whole batches."""
    import model as reference
    import torch

    net = reference.Net()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=False, foreach=False)
    losses = []
    for step in range(reference.STEPS):
        x, y = reference.batch(step)
        opt.zero_grad()
        loss = reference.loss_of(net(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    output = tmp_path / "losses.json"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = python(session, *launcher, TESTS / "distributed" / "train.py", output)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(output.read_text())
    assert found["world"] == 2
    for how, parameters in (("ddp", ["Parameter"]), ("fsdp", ["DTensor"])):
        assert found[how]["parameters"] == parameters
        # Trainium computes float64 in 32 bits.
        assert found[how]["losses"] == pytest.approx(losses, rel=1e-11 if session != "neuron" else 1e-5)


@pytest.mark.parametrize("session", SESSIONS)
def test_an_unedited_cuda_script(session: str, tmp_path: Path) -> None:
    """Loaders, DataParallel, streams, timing: tests/scripts/classify.py learns its two patterns on each backend."""
    report = tmp_path / "report.json"
    done = python(session, "-m", "portable", "run", "--backend", session, "--report", report, TESTS / "scripts" / "classify.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "accuracy 48/48, peak True"
    found = json.loads(report.read_text())
    assert (found["backend"], found["execution"]) == (session, EXECUTION[session])
    kinds = {entry["construct"]: entry["kind"] for entry in found["entries"]}
    assert kinds["nn.DataParallel"] == "changed" and "no equivalent" not in kinds.values()
    assert (EXECUTION[session] in done.stderr) == (session != "cpu")
