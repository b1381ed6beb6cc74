"""`pt.mantissa_bits`: how precise the device's float32 matrix products really are, measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch

from portable.devices import device as chosen_device
from portable.errors import ConfigurationError
from portable.switches import FULL

Operation = Literal["matmul", "bmm", "linear", "conv2d"]


def _conv2d(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # A 1x1 convolution of one image of height 1: the columns of a as channels, its rows as pixels.
    image = a.t().reshape(1, a.shape[1], 1, a.shape[0])
    out = torch.nn.functional.conv2d(image, b.t().reshape(b.shape[1], b.shape[0], 1, 1))
    return out.reshape(b.shape[1], a.shape[0]).t()


_PRODUCTS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "matmul": torch.matmul,
    "bmm": lambda a, b: torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[1],
    "linear": lambda a, b: torch.nn.functional.linear(a, b.t().contiguous()),
    "conv2d": _conv2d,
}


def mantissa_bits(operation: Operation = "matmul", *, device: Any = None, size: int = 64) -> int:
    """Mantissa bits of its float32 inputs that a product really uses here, the implicit one counted.

    24 is float32, 12 HF32, 11 TF32 or float16, 8 bfloat16; about 17 the sum of two bfloat16 numbers. Autocast, if on, is part
    of what is measured.

    The probe: for each k, an input ``1 + f`` times 1, less 1, where ``f`` has every second bit set down to bit k. The answer is
    ``f`` exactly if the input kept its bit k. (More than one bit is set, since a sum of two short numbers holds ``1 + 2^-k``
    for any k.) Other elements are 0 and no sum rounds, so the order of summation does not matter. Both inputs are tried; the
    one that keeps less counts.

    Args:
        operation: "matmul", "bmm", "linear", "conv2d".
        device: what `pt.device` takes; the current device of the active backend by default.
        size: rows, columns and inner dimension, at least 32: kernels for small and large products may differ.

    Raises:
        ConfigurationError: an unknown operation or a size that is too small.
    """
    if operation not in _PRODUCTS:
        raise ConfigurationError(
            f"mantissa_bits({operation!r}) was called. Use one of {', '.join(map(repr, get_args(Operation)))}."
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 32:
        raise ConfigurationError(f"mantissa_bits was called with size={size!r}. Give a whole number of at least 32.")
    target = chosen_device(device)
    product = _PRODUCTS[operation]
    probe, ones = torch.zeros(size, size), torch.zeros(size, size)
    right = torch.tensor([sum(2.0**-bit for bit in range(last, 0, -2)) for last in range(1, FULL)])
    probe[1:FULL, 0] = 1 + right
    probe[:, 1] = -1
    ones[:2] = 1
    with torch.no_grad():
        left = product(probe.to(target), ones.to(target)).float().cpu()[1:FULL]
        second = product(ones.t().contiguous().to(target), probe.t().contiguous().to(target)).float().cpu()[:, 1:FULL].t()
    kept = [(answer == right[:, None]).all(dim=1) for answer in (left, second)]
    both = (kept[0] & kept[1]).tolist()
    return 1 + (both.index(False) if False in both else len(both))
