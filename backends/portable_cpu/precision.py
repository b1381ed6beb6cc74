"""Switches of the CPU's matrix products: oneDNN's.

Measured on AVX2 (AMD Zen 1, PyTorch 2.13): whatever the switches say, products, convolutions and recurrent layers keep 24 bits
(tests/test_precision_measured.py); oneDNN has no kernel there that rounds.
"""

from __future__ import annotations

import torch

from portable.fp32_settings import common
from portable.switches import Control, Environment, Flag, to

_SOURCE = "PyTorch docs, torch.backends; aten/src/ATen/native/mkldnn/Linear.cpp (bf16 where oneDNN has it, tf32 with AMX-FP16)"
_SHOWN = {("mkldnn", op): f"torch.backends.mkldnn.{op}.fp32_precision" for op in ("matmul", "conv", "rnn")}
_FORMATS = {"strict": None, "bf16": "bf16", "f16": "fp16", "tf32": "tf32", "any": "bf16"}


def _mode(key: str) -> Environment:
    return Environment(
        key,
        "oneDNN's kernels",
        "oneDNN developer guide, 'Primitive Attributes: floating-point math mode'",
        lambda text: _FORMATS.get(text.strip().lower()),
        f"Unset {key} and start again.",
    )


_HALF = Flag(
    "torch._C._set_cpu_allow_fp16_reduced_precision_reduction",  # PyTorch gives it no public name
    "16-bit sums",
    False,
    "torch: aten/src/ATen/Context.h, allow_fp16_reduction_cpu",
    get=lambda: torch._C._get_cpu_allow_fp16_reduced_precision_reduction(),  # type: ignore[attr-defined]
    set=lambda value: torch._C._set_cpu_allow_fp16_reduced_precision_reduction(value),  # type: ignore[attr-defined]
    levels={"strict": to(False), "default": to(False), "fast": to(False)},
    words={"False": "products of float16 vectors are summed in float32", "True": "on Arm they may be summed in float16"},
)


def controls() -> tuple[Control, ...]:
    """What a precision level turns on the CPU."""
    return (*common(_SHOWN, _SOURCE), _HALF, _mode("ONEDNN_DEFAULT_FPMATH_MODE"), _mode("DNNL_DEFAULT_FPMATH_MODE"))
