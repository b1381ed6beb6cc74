"""NEURON_CC_FLAGS="--auto-cast=matmult --auto-cast-type=bf16": float32 matrix products are rounded, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from portable_neuron.profile import compiler_flags

import portable as pt
from portable.errors import ConfigurationError


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def test_products_are_rounded(dev: torch.device, rehearsal: Any) -> None:
    assert rehearsal.profile.matmul_dtype.value == torch.bfloat16
    torch.manual_seed(0)
    a, b, bias = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
    assert torch.equal((a.to(dev) @ b.to(dev)).cpu(), rounded(a) @ rounded(b))
    assert not torch.equal(rounded(a) @ rounded(b), a @ b)
    linear = F.linear(a.to(dev), b.t().to(dev), bias.to(dev)).cpu()
    torch.testing.assert_close(linear, rounded(a) @ rounded(b) + bias, atol=1e-2, rtol=1e-2)
    assert not torch.equal(linear, F.linear(a, b.t(), bias))


def test_the_policy_says_so_and_strict_is_refused(dev: torch.device) -> None:
    pt.use("neuron")
    assert [pt.mantissa_bits(name) for name in ("matmul", "bmm", "linear", "conv2d")] == [8] * 4  # type: ignore[arg-type]
    found = pt.precision()
    assert (found.matmul_bits, found.conv_bits) == (8, 8)
    (flags,) = [state for state in found.switches if state.fixed]
    assert flags.name == "NEURON_CC_FLAGS" and flags.bits == 8 and "bf16" in flags.meaning
    with pytest.raises(pt.ConfigurationError, match=r"'strict' cannot be had: NEURON_CC_FLAGS=.*to bf16.*start again"):
        pt.precision("strict").keep()
    with pt.precision("default"):
        assert pt.mantissa_bits() == 8
    assert pt.precision().level is None


def test_other_operators_are_exact(dev: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    for call in (torch.exp, lambda t: t * t, lambda t: F.layer_norm(t, (6,)), lambda t: t.sum(1), lambda t: F.softmax(t, -1)):
        assert torch.equal(call(x.to(dev)).cpu(), call(x))
    half = x.bfloat16()
    assert torch.equal((half.to(dev) @ half.t().to(dev)).cpu(), half @ half.t())


def test_convolutions_and_attention_are_rounded(dev: torch.device) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3)
    assert torch.equal(F.conv2d(x.to(dev), w.to(dev)).cpu(), F.conv2d(rounded(x), rounded(w)))
    q = torch.randn(1, 2, 512, 8)
    right = F.scaled_dot_product_attention(rounded(q), rounded(q), rounded(q))
    assert torch.equal(F.scaled_dot_product_attention(q.to(dev), q.to(dev), q.to(dev)).cpu(), right)


def test_flags() -> None:
    def read(flags: str) -> torch.dtype | None:
        return compiler_flags({"NEURON_CC_FLAGS": flags})

    assert read("") is None and read("--auto-cast=none") is None and read("--model-type transformer") is None
    assert read("--auto-cast matmult --auto-cast-type bf16") == torch.bfloat16
    assert read("--auto-cast=all") == torch.bfloat16 and read("--auto-cast=matmult --auto-cast-type=fp16") == torch.float16
    with pytest.raises(ConfigurationError, match="fp8_e4m3"):
        read("--auto-cast=matmult --auto-cast-type=fp8_e4m3")
