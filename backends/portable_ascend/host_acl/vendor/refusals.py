"""What the vendor's operators do not take, said in one form."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def refuse(operator: str, found: str, allowed: str) -> NoReturn:
    """Raise ValueError: what an operator was given, and what it takes."""
    raise ValueError(f"{operator} was given {found}. It takes {allowed}.")


def check_floats(operator: str, **tensors: Tensor | None) -> None:
    """Refuse dtypes other than float16, bfloat16 and float32.

    Raises:
        ValueError: a tensor has another one.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            refuse(operator, f"{name} of dtype {str(tensor.dtype)[6:]}", "float16, bfloat16 and float32")


def check_absent(operator: str, why: str, **arguments: Any) -> None:
    """Refuse arguments that are not computed here.

    Raises:
        NotImplementedError: one was passed.
    """
    for name, value in arguments.items():
        if value is not None and value is not False and value != []:
            raise NotImplementedError(
                f"{operator} was given {name}, which the host runtime does not compute: {why}. Leave it out, or use an Ascend "
                "device."
            )


def wide(tensor: Tensor) -> Tensor:
    """float32 for sixteen-bit tensors: the vendor's kernels compute these in float32 and round once (assumed throughout)."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
