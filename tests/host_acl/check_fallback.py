"""Operators without an NPU kernel: the vendor's own fallback computes them on the CPU, and they are counted by line."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import torch


def _line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_fallbacks_are_counted_by_line(dev: torch.device, recorder: Any) -> None:
    x = torch.randn(4, 4)
    x = x @ x.T
    there = x.to(dev)
    recorder.reset()
    for _ in range(3):
        values = torch.linalg.eigvalsh(there)
    line = _line() - 1
    assert torch.equal(values.cpu(), torch.linalg.eigvalsh(x))
    found = {(op.split(".")[0], where.rsplit(":", 1)[-1]): n for (op, where), n in recorder.fallbacks.items()}
    assert found == {("aten::_linalg_eigh", str(line)): 3}


def test_operators_with_a_kernel_are_none(dev: torch.device, recorder: Any) -> None:
    x = torch.randn(4, 4, device=dev, requires_grad=True)
    torch.softmax(x @ x, -1).sum().backward()
    x.detach().topk(2)
    x.detach().sort()
    assert not recorder.fallbacks and recorder.ops["aten::mm"] + recorder.ops["aten::matmul"] >= 1


def test_gradients_through_a_fallback(dev: torch.device) -> None:
    x = torch.randn(3, 3, dtype=torch.float64)
    here, there = x.clone().requires_grad_(), x.to(dev).requires_grad_()
    torch.linalg.det(here).backward()
    torch.linalg.det(there).backward()
    assert there.grad is not None and here.grad is not None and torch.equal(there.grad.cpu(), here.grad)


def test_the_vendors_switch(rehearsal: Any) -> None:
    """TORCH_NPU_FALLBACK_CPU_DISABLE: torch_npu refuses instead, and what has a kernel still computes."""
    program = (
        "import torch, portable as pt\npt.use('ascend')\nx = torch.eye(2, device='npu')\nprint((x @ x).sum().item())\n"
        "try:\n    torch.linalg.eigvalsh(x)\nexcept (RuntimeError, NotImplementedError) as error:\n    print(error)"
    )
    for value in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TORCH_NPU_FALLBACK_CPU_DISABLE": value},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 and done.stdout.startswith("2.0"), done.stderr[-2000:]
        assert ("eigh" in done.stdout) == (value == "1"), done.stdout
