"""pt.precision on every backend: the policy, the levels as measured, float16 training that overflows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

import portable as pt

OPERATIONS = ("matmul", "bmm", "linear", "conv2d")


def test_the_policy_and_its_subset(chosen: Any) -> None:
    found = pt.precision()
    assert isinstance(found, pt.Precision) and found.policy == pt.precision_policy()
    generation = pt.generation()
    assert generation is not None and (found.generation, found.source) == (generation.name, generation.source)
    assert found.autocast.dtype == (generation.autocast[0] if generation.autocast else "float32")
    assert found.parameters.dtype == found.reduction.dtype == found.optimizer.dtype == "float32"
    reasons = [part.reason for part in (found.parameters, found.autocast, found.reduction, found.optimizer)]
    assert all(len(reason) > 20 for reason in [*reasons, found.scaling])
    assert (found.matmul_bits, found.level) == (24, None)
    assert pt.precision(backend=chosen.spec.name) == pt.precision(backend=chosen, generation=found.generation) == found
    data = json.loads(json.dumps(found.as_dict()))
    assert data["schema"] == "portable.precision/1" and len(data["switches"]) == len(found.switches) > 0
    assert all(state.name in str(found) for state in found.switches if len(state.name) < 40)
    assert all(state.value is not None and state.meaning and state.source for state in found.switches)


def test_the_command_line_says_the_same(chosen: Any) -> None:
    found = pt.precision()
    generation = ("--generation", str(found.generation))
    command = [sys.executable, "-m", "portable", "explain", "precision", "--backend", chosen.spec.name, *generation, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    for name in ("backend", "generation", "autocast", "scaler", "scaling", "matmul_bits", "conv_bits"):
        assert data[name] == json.loads(json.dumps(found.as_dict()))[name], name


# -- levels -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_the_probe_tells_formats_apart(device: torch.device, dtype: torch.dtype, bits: int) -> None:
    with pt.autocast(dtype):
        assert [pt.mantissa_bits(name) for name in OPERATIONS] == [bits] * 4  # type: ignore[arg-type]


def _reduce(name: str) -> Callable[[], Any]:
    """Let float32 products be rounded, as a program would; answers what undoes it."""
    stack = ExitStack()
    if name == "ascend":
        npu: Any = torch.npu  # type: ignore[attr-defined]
        npu.matmul.allow_hf32 = True
        stack.callback(setattr, npu.matmul, "allow_hf32", False)
    else:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
        torch.backends.mkldnn.conv.fp32_precision = "bf16"  # type: ignore[attr-defined]
        stack.callback(setattr, torch.backends.mkldnn.matmul, "fp32_precision", "none")  # type: ignore[attr-defined]
        stack.callback(setattr, torch.backends.mkldnn.conv, "fp32_precision", "none")  # type: ignore[attr-defined]
    return stack.close


def test_strict_is_24_bits_whatever_was_set_before(name: str) -> None:
    undo = _reduce(name)
    try:
        before, declared = [pt.mantissa_bits(op) for op in OPERATIONS], pt.precision()  # type: ignore[arg-type]
        assert declared.matmul_bits is not None and min(before[:3]) >= declared.matmul_bits
        if name == "ascend":  # HF32, by the vendor's own switch
            assert before[:3] == [12] * 3 and declared.matmul_bits == 12
        for size in (32, 64, 200):
            with pt.precision("strict"):
                inside = pt.precision()
                assert (inside.level, inside.matmul_bits, inside.conv_bits) == ("strict", 24, 24)
                assert [pt.mantissa_bits(op, size=size) for op in OPERATIONS] == [24] * 4  # type: ignore[arg-type]
        assert [pt.mantissa_bits(op) for op in OPERATIONS] == before  # type: ignore[arg-type]
        assert pt.precision() == declared
    finally:
        undo()


def test_fast_keeps_11_bits_and_everything_is_taken_back(name: str) -> None:
    start = pt.precision()
    with pt.precision("fast"):
        bits = pt.mantissa_bits()
        assert bits >= 11 and pt.precision().level == "fast"
        if name == "ascend":
            assert bits == 12 and pt.precision().matmul_bits == 12
        inside = []
        with pytest.raises(ZeroDivisionError), pt.precision("strict"):
            inside.append(pt.mantissa_bits() // len(inside))
        with pt.precision("strict"):
            assert pt.mantissa_bits() == 24
        assert pt.mantissa_bits() == bits and pt.precision().level == "fast"
    assert pt.precision() == start


def test_blocks_that_end_in_another_order(name: str) -> None:
    start = pt.precision()
    first, second = pt.precision("fast"), pt.precision("strict")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert pt.mantissa_bits() == 24 and pt.precision().level == "strict"
    second.__exit__(None, None, None)
    assert pt.precision() == start


def test_a_decorated_function(name: str) -> None:
    @pt.precision("strict")
    def measured() -> tuple[int, Any]:
        return pt.mantissa_bits(), pt.precision().level

    assert isinstance(pt.precision("fast"), pt.PrecisionLevel)

    undo = _reduce(name)
    try:
        assert measured() == measured() == (24, "strict")
        assert pt.precision().level is None
    finally:
        undo()


# -- float16 that overflows ---------------------------------------------------------------------------------------------------

KINDS = ["SGD", "AdamW", "Adam foreach", "AdamW fused", "SGD fused"]
KINDS += ["Adagrad fused"] if os.environ.get("PORTABLE_BACKEND", "cpu") == "cpu" else []
START, RATE = 2.0**17, 2.0**-3
# 2^17 and 2^16 leave float16's range (65,504), 2^15 does not; after three good steps the scale doubles, and overflows again.
TAKEN = [False, False, True, True, True, False, True]
SCALES = [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**16, 2.0**15, 2.0**15]


def _optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.5),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=RATE, foreach=False, fused=False),
        "Adam foreach": lambda p: torch.optim.Adam(p, lr=RATE, foreach=True),
    }
    made["AdamW fused"] = lambda p: torch.optim.AdamW(p, lr=RATE, fused=True)
    made["Adagrad fused"] = lambda p: torch.optim.Adagrad(p, lr=RATE, fused=True)
    made["SGD fused"] = lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.5, fused=True)
    return made


def _state(opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v.detach().cpu().clone() for s in opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("kind", KINDS)
def test_float16_training_that_overflows(kind: str, name: str, device: torch.device) -> None:
    """The gradient of the layer is 1 for each weight; scaled, it passes through float16 on the way."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 2, bias=False)
    weight = nn.Parameter(layer.weight.detach().double())  # reference: the same optimizer in float64, given the gradient
    plain: dict[str, Any] = {"foreach": False, "fused": False, "lr": RATE, **({"momentum": 0.5} if "SGD" in kind else {})}
    reference = getattr(torch.optim, kind.split()[0])([weight], **plain)
    layer.to(device)
    opt = _optimizers()[kind](layer.parameters())
    scaler = pt.GradScaler(dtype=torch.float16, init_scale=START, growth_interval=3)
    assert scaler.is_enabled()
    taken, scales = [], []
    for wanted in TAKEN:
        before, state = layer.weight.detach().cpu().clone(), _state(opt)
        opt.zero_grad()
        with pt.autocast(torch.float16):
            out = layer(torch.full((2, 4), 0.5, device=device))
        assert out.dtype == torch.float16
        scaler.scale(out.float().sum()).backward()
        assert bool(torch.isfinite(layer.weight.grad).all().item()) == wanted, "the overflow is the device's own"
        if name == "neuron" and "fused" in kind:
            with pytest.raises(RuntimeError, match=r"refuses.*fused=False"):
                scaler.step(opt)
            return
        scaler.step(opt)
        scaler.update()
        after = layer.weight.detach().cpu()
        taken.append(not torch.equal(before.view(torch.int32), after.view(torch.int32)))
        scales.append(scaler.get_scale())
        if not wanted:  # nothing of the optimizer's own moves either, once it is there
            assert not state or all(torch.equal(a, b) for a, b in zip(state, _state(opt), strict=True))
            continue
        weight.grad = torch.ones_like(weight)
        reference.step()
        torch.testing.assert_close(after.double(), weight.detach(), atol=2e-6, rtol=1e-6)
    assert (taken, scales) == (TAKEN, SCALES)


def test_scaler_and_autocast_follow_the_policy(device: torch.device) -> None:
    policy = pt.precision().policy
    assert pt.GradScaler().is_enabled() == policy.scaler
    assert pt.GradScaler(dtype=torch.float16).is_enabled() and not pt.GradScaler(dtype=torch.bfloat16).is_enabled()
    assert not pt.GradScaler(False, dtype=torch.float16).is_enabled()
    ones = torch.ones(4, 4, device=device)
    with pt.autocast():
        assert (ones @ ones).dtype == getattr(torch, policy.autocast or "float32")
    for wrong in (torch.int8, torch.float64, "float16"):
        with pytest.raises(pt.ConfigurationError, match=r"torch\.bfloat16 or torch\.float16"):
            pt.autocast(wrong)  # type: ignore[arg-type]
