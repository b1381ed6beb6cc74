"""The tensor types of old programs: torch.cuda.FloatTensor and its siblings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from portable.compat.patching import Patches
from portable.compat.target import Target

_DTYPES: dict[str, torch.dtype] = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class _LegacyType(type):
    """``isinstance(x, torch.cuda.FloatTensor)``: a tensor of that dtype on the target."""

    dtype: torch.dtype
    target: Callable[[], Target]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype == cls.dtype and instance.device.type == cls.target().kind


def legacy_dtype(kind: Any) -> torch.dtype | None:
    """The dtype of a legacy CUDA type ("torch.cuda.FloatTensor" or the class), None for anything else."""
    if isinstance(kind, _LegacyType):
        return kind.dtype
    if isinstance(kind, str) and kind.startswith("torch.cuda."):
        return _DTYPES.get(kind.removeprefix("torch.cuda."))
    return None


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace the types and torch.set_default_tensor_type."""
    for name, dtype in _DTYPES.items():
        if hasattr(torch.cuda, name):
            patches.set(torch.cuda, name, _make(name, dtype, target))
    original = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        dtype = legacy_dtype(kind)
        if dtype is None:
            original(kind)
            return
        torch.set_default_dtype(dtype)
        torch.set_default_device(target().device("cuda", "torch.set_default_tensor_type"))

    patches.set(torch, "set_default_tensor_type", set_default_tensor_type)


def _make(name: str, dtype: torch.dtype, target: Callable[[], Target]) -> Any:
    def new(cls: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        where = target().device("cuda", f"torch.cuda.{name}")
        if args and all(isinstance(size, int) for size in args):
            return torch.empty(args, dtype=dtype, device=where)  # sizes, as in the legacy constructor
        if len(args) == 1 and isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=dtype, device=where)
        return torch.tensor(args[0] if args else [], dtype=dtype, device=where)

    return _LegacyType(name, (), {"__new__": new, "dtype": dtype, "target": staticmethod(target), "__module__": "torch.cuda"})
