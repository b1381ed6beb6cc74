"""`pt.mantissa_bits` against formats made here, what this CPU does, and what each generation is said to keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from portable_ascend.host_acl.hf32 import rounded

import portable as pt
from portable import mantissa
from portable.precision_docs import generations

pytestmark = pytest.mark.usefixtures("on_cpu")
OPERATIONS: Any = ("matmul", "bmm", "linear", "conv2d")


def tf32(x: torch.Tensor) -> torch.Tensor:
    """The first 10 stored bits, as tensor cores read them."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def two_bf16(x: torch.Tensor) -> torch.Tensor:
    high = x.bfloat16().float()
    return high + (x - high).bfloat16().float()


FORMATS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "float32": (lambda x: x, 24),
    "sum of two bfloat16": (two_bf16, 17),
    "hf32": (rounded, 12),
    "tf32": (tf32, 11),
    "float16": (lambda x: x.half().float(), 11),
    "bfloat16": (lambda x: x.bfloat16().float(), 8),
    "float8": (lambda x: x.to(torch.float8_e4m3fn).float(), 4),
}


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_probe(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds what a product keeps of either input."""
    to_format, bits = FORMATS[name]

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        left = a if side == "right" else to_format(a.contiguous())
        right = b if side == "left" else to_format(b.contiguous())
        return (left.double() @ right.double()).float()

    monkeypatch.setattr(mantissa, "_PRODUCTS", {"matmul": product})
    assert [pt.mantissa_bits(size=size) for size in (32, 57, 128)] == [bits] * 3


def test_bad_questions() -> None:
    with pytest.raises(pt.ConfigurationError, match=r"'einsum'.*'matmul'"):
        pt.mantissa_bits("einsum")  # type: ignore[arg-type]
    for size in (31, 0, -1, 64.0, True, "64"):
        with pytest.raises(pt.ConfigurationError, match="at least 32"):
            pt.mantissa_bits(size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["none", "ieee", "tf32", "bf16"])
def test_this_cpu_under_each_of_onednns_modes(mode: str) -> None:
    """AVX2 has no kernel that rounds: 24 bits. Elsewhere no fewer than declared; under strict always 24."""
    torch.backends.fp32_precision = mode
    try:
        found = pt.precision()
        assert found.matmul_bits is not None
        for size in (32, 64, 256):
            measured = [pt.mantissa_bits(name, size=size) for name in OPERATIONS]
            assert min(measured) >= found.matmul_bits
            if found.generation in ("avx2", "baseline"):
                assert measured == [24] * 4 and found.matmul_bits == 24
            with pt.precision("strict"):
                assert [pt.mantissa_bits(name, size=size) for name in OPERATIONS] == [24] * 4
        assert torch.backends.fp32_precision == mode
    finally:
        torch.backends.fp32_precision = "none"


def test_hf32_rounds_to_the_nearest_ties_to_even() -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(4000) * 2.0 ** torch.randint(-60, 60, (4000,)).float(), torch.tensor([0.0, -0.0, 1.0])])
    ties = (1 + torch.arange(64) * 2.0**-12).float()  # every second one lies half-way between two numbers of 12 bits
    x = torch.cat([x, ties, -ties])
    fraction, exponent = np.frexp(x.double().numpy())
    right = np.ldexp(np.rint(fraction * 2.0**12), exponent - 12)  # rint takes ties to even
    assert torch.equal(rounded(x).double(), torch.from_numpy(right))
    special = torch.tensor([float("inf"), -float("inf"), float("nan")])
    assert torch.equal(rounded(special), special) or torch.isnan(rounded(special)[2])
    assert rounded(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


# -- tables --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "generation", "autocast", "scaler", "default", "fast"),
    [  # (matmul, conv) bits at a level, by hand from the vendors' pages
        ("cuda", "7.0", "float16", True, (24, 24), (24, 24)),
        ("cuda", "7.5", "float16", True, (24, 24), (24, 24)),
        ("cuda", "8.0", "bfloat16", False, (24, 11), (11, 11)),
        ("cuda", "9.0", "bfloat16", False, (24, 11), (11, 11)),
        ("cuda", "gfx90a", "bfloat16", False, (24, 24), (24, 24)),
        ("ascend", "910A", "float16", True, (11, 11), (11, 11)),
        ("ascend", "910B2", "bfloat16", False, (24, 12), (12, 12)),
        ("neuron", "trn2", "bfloat16", False, (24, 24), (24, 24)),
        ("cpu", "amx", "bfloat16", False, (24, 24), (11, 11)),
        ("cpu", "avx2", "float32", False, (24, 24), (24, 24)),
    ],
)
def test_generations(
    backend: str, generation: str, autocast: str, scaler: bool, default: Any, fast: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NVIDIA_TF32_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "NEURON_CC_FLAGS"):
        monkeypatch.delenv(variable, raising=False)
    found = pt.precision(backend=backend, generation=generation)
    assert (found.autocast.dtype, found.scaler) == (autocast, scaler)
    rows = {(row.backend, row.generation): row for row in generations()}
    row = rows[found.backend, str(found.generation)]
    assert (row.bits["default"], row.bits["fast"]) == (default, fast)
    # The first series of Ascend has no float32 products at all.
    assert row.bits["strict"] == ((11, 11) if generation == "910A" else (24, 24))


def test_the_reasons_name_the_hardware() -> None:
    def reason(backend: str, generation: str) -> str:
        return pt.precision(backend=backend, generation=generation).autocast.reason

    assert "no bfloat16 matrix units: float16, with loss scaling" in reason("cuda", "7.5")
    assert reason("ascend", "910A") == "Ascend 910A has no bfloat16: float16, with loss scaling"
    assert "AMX-BF16 present" in reason("cpu", "amx") and "AVX512-BF16 present" in reason("cpu", "avx512_bf16")
    assert "refuses a loss scaler" in pt.precision(backend="neuron", generation="trn2").scaling


def test_a_variable_of_nvidias_libraries_forbids_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    found = pt.precision(backend="cuda", generation="8.0")
    assert (found.matmul_bits, found.conv_bits) == (24, 24)
    assert all("NVIDIA_TF32_OVERRIDE" in state.meaning for state in found.switches if state.bits)
