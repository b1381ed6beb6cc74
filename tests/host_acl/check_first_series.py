"""Precision on the first series (910A): float16 only, and overflow that saturates."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import portable as pt


@pytest.fixture(autouse=True)
def ascend() -> Any:
    with pt.use("ascend") as backend:
        yield backend


def test_the_policy() -> None:
    found = pt.precision()
    assert found.generation == "Ascend910A" and found.policy == pt.precision_policy()
    assert (found.autocast.dtype, found.scaler) == ("float16", True) and "no bfloat16" in found.autocast.reason
    assert "saturates" in found.scaling
    # The host computes float32; the device has no float32 products.
    assert (found.matmul_bits, found.conv_bits) == (11, 11)


def test_the_scaler_is_the_vendors_and_skips_an_overflow() -> None:
    from torch_npu.npu.amp import GradScaler

    device = pt.device()
    scaler = pt.GradScaler(init_scale=2.0**17, growth_interval=2)
    assert isinstance(scaler, GradScaler) and isinstance(scaler, torch.amp.GradScaler)
    assert not isinstance(pt.GradScaler(enabled=False), GradScaler)
    layer = nn.Linear(4, 2, bias=False).to(device)
    opt = torch.optim.SGD(layer.parameters(), lr=0.125)
    before = layer.weight.detach().cpu().clone()
    seen = []
    for _ in range(5):
        opt.zero_grad()
        with pt.autocast():
            out = layer(torch.full((2, 4), 0.5, device=device))
        assert out.dtype == torch.float16
        scaler.scale(out.float().sum()).backward()
        scaler.step(opt)
        scaler.update()
        seen.append((scaler.get_scale(), round((before - layer.weight.detach().cpu()).max().item() / 0.125)))
    # 2^17 and 2^16 leave float16's range, 2^15 does not; after two good steps the scale grows, and overflows again.
    assert seen == [(2.0**16, 0), (2.0**15, 0), (2.0**15, 1), (2.0**16, 2), (2.0**15, 2)]


def test_strict_says_what_it_cannot_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="portable")
    torch.npu.set_option({"ACL_PRECISION_MODE": "allow_fp32_to_fp16"})  # type: ignore[attr-defined]
    with pt.precision("strict"), pt.precision("strict"):
        (mode,) = [state for state in pt.precision().switches if "ACL_PRECISION_MODE" in state.name]
        # CANN would refuse every float32 product under must_keep_origin_dtype.
        assert mode.value == "allow_fp32_to_fp16" and mode.bits == 11
    said = [record.getMessage() for record in caplog.records if "cube unit" in record.getMessage()]
    assert len(said) == 1 and "multiplies no float32" in said[0]
