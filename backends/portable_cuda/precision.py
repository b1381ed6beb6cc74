"""Switches of cuBLAS and cuDNN (PyTorch notes, "CUDA semantics": TensorFloat-32, reduced precision reduction)."""

from __future__ import annotations

import os
from typing import Any

import torch

from portable.fp32_settings import common
from portable.switches import Control, Flag, to

_SOURCE = "PyTorch notes, 'CUDA semantics': TensorFloat-32 on Ampere and later devices"
_SUMS = "PyTorch notes, 'CUDA semantics': Reduced Precision Reduction in FP16 and BF16 GEMMs"
_SHOWN = {
    ("cuda", "matmul"): "torch.backends.cuda.matmul.fp32_precision",
    ("cuda", "conv"): "torch.backends.cudnn.conv.fp32_precision",
    ("cuda", "rnn"): "torch.backends.cudnn.rnn.fp32_precision",
}


def _forbidden() -> str | None:
    """NVIDIA's libraries read the variable when they start (NVIDIA blog, "Accelerating AI Training with TF32 Tensor Cores")."""
    return "float32 inputs stay whole: NVIDIA_TF32_OVERRIDE=0" if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0" else None


def _first(value: Any) -> bool:
    """Whether 16-bit sums are allowed: PyTorch answers (sums allowed, split-K allowed), older versions the first alone."""
    return bool(value[0]) if isinstance(value, tuple) else bool(value)


def _sums(kind: str) -> Flag:
    get = getattr(torch._C, f"_get_cublas_allow_{kind}_reduced_precision_reduction")
    put = getattr(torch._C, f"_set_cublas_allow_{kind}_reduced_precision_reduction")

    def off(before: Any) -> Any:
        return (False, *before[1:]) if isinstance(before, tuple) else False

    def on(before: Any) -> Any:
        # PyTorch refuses 16-bit sums without split-K (Context.cpp, get_reduction_option).
        return (True,) * len(before) if isinstance(before, tuple) else True

    return Flag(
        f"torch.backends.cuda.matmul.allow_{kind}_reduced_precision_reduction",
        "16-bit sums",
        (True, True),
        _SUMS,
        get=get,
        set=lambda value: put(*value) if isinstance(value, tuple) else put(value),
        levels={"strict": off, "default": on, "fast": on},
        text=lambda value: str(_first(value)),
        words={
            "True": f"parts of a {kind} product may be summed in {kind}, where cuBLAS splits the inner dimension",
            "False": f"parts of a {kind} product are summed in float32",
        },
    )


_ACCUMULATION = Flag(
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "16-bit sums",
    False,
    "PyTorch notes, 'CUDA semantics': Full FP16 Accumulation in FP16 GEMMs",
    get=lambda: torch._C._get_cublas_allow_fp16_accumulation(),
    set=lambda value: torch._C._set_cublas_allow_fp16_accumulation(value),
    # Not for "fast" either: a sum of float16 products leaves float16's range at 65,504.
    levels={"strict": to(False), "default": to(False), "fast": to(False)},
    words={"True": "float16 products are summed in float16 throughout", "False": "float16 products are summed in float32"},
)


def controls() -> tuple[Control, ...]:
    """What a precision level turns on a GPU."""
    return (*common(_SHOWN, _SOURCE, _forbidden), _sums("bf16"), _sums("fp16"), _ACCUMULATION)
