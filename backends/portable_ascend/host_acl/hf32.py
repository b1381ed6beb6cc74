"""HF32 on the host runtime: float32 matrix products with rounded inputs, when the program's switches ask for it.

The switches are the vendor's own. HF32 keeps 11 bits of the mantissa beside the implicit one (CANN: ATC's --allow_hf32),
rounded to the nearest, ties to even (Ascend C: SetHF32, transMode 0). Convolutions stay exact although their switch is
on by default: a rehearsal is to find a program's errors, not the device's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from portable.rehearsal.kernels import base_name
from portable_ascend.host_acl.device import HostDevice

_DROPPED = 23 - 11  # stored bits of float32's mantissa that HF32 does not have


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """The nearest HF32 numbers of a float32 tensor, ties to even; inf and nan stay."""
    if tensor.dtype != torch.float32:
        return tensor
    bits = tensor.contiguous().view(torch.int32)
    odd = (bits >> _DROPPED) & 1
    near = ((bits + (1 << (_DROPPED - 1)) - 1 + odd) >> _DROPPED) << _DROPPED
    return torch.where(torch.isfinite(tensor), near.view(torch.float32), tensor)


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().float() if tensor.dtype == torch.float32 else tensor


def _format() -> str | None:
    """What the switches allow, as CalcuOpUtil::GetCubeMathType combines them (op-plugin)."""
    get = importlib.import_module("torch_npu")._C._npu_getOption
    chosen = get("CUBE_MATH_TYPE")
    if chosen:
        return _CUBE_MATH_TYPES.get(chosen)
    if get("ALLOW_MATMUL_HF32") == b"enable":
        return "hf32"
    return "fp16" if get("ACL_PRECISION_MODE") == b"allow_fp32_to_fp16" else None


def install(device: HostDevice, operators: Sequence[Any]) -> None:
    """Let the matrix products of a device that has HF32 follow the switches.

    Args:
        operators: OpOverloads that the device computes.
    """

    def product(places: tuple[int, int], operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        format_ = _format()
        if format_ is not None:
            args = list(args)
            for place in places:  # the factors only: what is added, or written to, stays float32
                args[place] = _ROUND[format_](args[place])
        return operator(*args, **kwargs)

    for operator in operators:
        places = _FACTORS.get(base_name(operator))
        if places is not None and "dtype" not in operator._overloadname:
            device.override(operator, partial(product, places))


_ROUND: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"hf32": rounded, "fp16": _half}
# wheel: _CubeMathType. ALLOW_FP32_DOWN_PRECISION means HF32 from the 910B on (CANN: aclnnMm).
_CUBE_MATH_TYPES = {b"1": "hf32", b"2": "fp16", b"3": "hf32"}
# Positions of the factors among the arguments.
_FACTORS = {
    **dict.fromkeys(("mm", "bmm", "mv", "matmul", "linear"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), (1, 2)),
}
