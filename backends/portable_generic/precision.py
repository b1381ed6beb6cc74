"""Switches of the devices that the generic backend serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from portable.fp32_settings import common
from portable.switches import Control, Flag, to

_SHOWN = {("mkldnn", op): f"torch.backends.mkldnn.{op}.fp32_precision" for op in ("matmul", "conv", "rnn")}


def _tf32() -> Any:
    return torch._C._get_onednn_allow_tf32()  # None in a build without Intel GPUs


_ONEDNN = Flag(
    "torch.backends.mkldnn.allow_tf32",
    "matrix products and convolutions",
    False,
    "torch: aten/src/ATen/Context.cpp, setAllowTF32OneDNN",
    get=_tf32,
    set=lambda value: torch._C._set_onednn_allow_tf32(value),
    levels={"strict": to(False), "default": to(False), "fast": to(True)},
    formats={"True": "tf32", "False": None},
)


def _xpu() -> tuple[Control, ...]:
    return (*common(_SHOWN, "torch: aten/src/ATen/native/mkldnn/xpu"), _ONEDNN)


CONTROLS: Mapping[str, Callable[[], tuple[Control, ...]]] = {"xpu": _xpu}
"""Device type to what a precision level turns there; the others have PyTorch's own switches only."""
