"""Switches of the cube unit: HF32, and float16 in float32's place.

Sources: ``wheel`` torch_npu/npu/npu_config.py of torch-npu 2.13.0; ``docs`` Huawei's pages torch_npu.npu.matmul.allow_hf32
(default False), torch_npu.npu.conv.allow_hf32 (default True), aclnnMm (cubeMathType); ``op-plugin`` the public sources, whose
CalcuOpUtil::GetCubeMathType combines the HF32 switch with ACL_PRECISION_MODE.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from portable.fp32_settings import common
from portable.spec import Generation
from portable.switches import Ask, Control, Flag, Level, State, to

_MODE = "ACL_PRECISION_MODE"


def _npu() -> Any:
    """torch.npu, None while torch_npu is not loaded."""
    return getattr(torch, "npu", None) if "torch_npu" in sys.modules else None


def _hf32(unit: str, governs: str, default: bool) -> Flag:
    def get() -> Any:
        npu = _npu()
        return None if npu is None else getattr(npu, unit).allow_hf32

    def put(value: bool) -> None:
        getattr(_npu(), unit).allow_hf32 = value

    return Flag(
        f"torch.npu.{unit}.allow_hf32",
        governs,
        default,
        f"docs: torch_npu.npu.{unit}.allow_hf32",
        get=get,
        set=put,
        levels={"strict": to(False), "default": to(default), "fast": to(True)},
        formats={"True": "hf32", "False": None},
    )


# The names of torch_npu.npu.npu_config._CubeMathType; "not set" leaves the choice to the two other switches.
_UNSET = "not set"
_REDUCING = {"ALLOW_FP32_DOWN_PRECISION": "hf32", "USE_FP16": "fp16", "USE_HF32": "hf32"}


def _keep(before: Any) -> Any:
    if before == _UNSET or before.name not in _REDUCING:
        return before
    return type(before).KEEP_DTYPE


def _cube_math_type() -> Any:
    npu = _npu()
    if npu is None:
        return None
    value = npu.matmul.cube_math_type  # absent in wheels for older CANN: answers None, as when it is not set
    return _UNSET if value is None else value


def _set_cube_math_type(value: Any) -> None:
    if value == _UNSET:  # a program set it inside the block; the option itself takes "" for not set, as it starts
        importlib.import_module("torch_npu")._C._npu_setOption({"CUBE_MATH_TYPE": ""})
    else:
        _npu().matmul.cube_math_type = value


_CUBE = Flag(
    "torch.npu.matmul.cube_math_type",
    "matrix products",
    _UNSET,
    "wheel: npu_config.py; CANN: aclnnMm, cubeMathType",
    get=_cube_math_type,
    set=_set_cube_math_type,
    levels={"strict": _keep, "default": _keep, "fast": _keep},
    formats=_REDUCING,
    text=lambda value: value if value == _UNSET else value.name,
)


def _precision_mode() -> Any:
    if _npu() is None:
        return None
    found = importlib.import_module("torch_npu")._C._npu_getOption(_MODE)
    return found.decode() if found else _UNSET


def _keep_mode(before: Any) -> Any:
    return "must_keep_origin_dtype" if before == "allow_fp32_to_fp16" else before


def _set_mode(value: Any) -> None:
    # "Not set" means must_keep_origin_dtype from the 910B on (op-plugin: IsAllowFP32ToFP16), and CANN takes no empty value.
    _npu().set_option({_MODE: "must_keep_origin_dtype" if value == _UNSET else value})


def _multiplies_float32(ask: Ask) -> bool:
    """On the first series keeping the dtype makes CANN refuse every float32 product, so the mode stays."""
    generation = ask()
    return generation is None or "float32" in generation.matmul


_ORIGIN = Flag(
    f'torch.npu.set_option({{"{_MODE}": ...}})',
    "matrix products and convolutions",
    _UNSET,
    "op-plugin: CalcuOpUtil::GetCubeMathType; docs: torch_npu.npu.set_option",
    get=_precision_mode,
    set=_set_mode,
    levels={"strict": _keep_mode, "default": _keep_mode, "fast": _keep_mode},
    formats={"allow_fp32_to_fp16": "fp16"},
    text=lambda value: value,
    applies=_multiplies_float32,
)


class _FirstSeries(Control):
    """The hardware without float32 products, which no switch changes."""

    key = "cube unit"

    def states(self, generation: Generation | None) -> Sequence[State]:
        return ()

    def remains(self, ask: Ask) -> str | None:
        if _multiplies_float32(ask):
            return None
        generation = ask()
        assert generation is not None
        return (
            f"the cube unit of {generation.title} multiplies no float32, inputs become float16 (11 mantissa bits) still. "
            "Compute on the CPU what needs more."
        )

    def apply(self, level: Level, ask: Ask) -> Any:
        return None

    def restore(self, saved: Any) -> None:
        pass


_MATMUL, _CONV = _hf32("matmul", "matrix products", False), _hf32("conv", "convolutions", True)


def controls() -> tuple[Control, ...]:
    """What a precision level turns on an NPU."""
    return (*common(), _MATMUL, _CONV, _CUBE, _ORIGIN, _FirstSeries())
