"""Which operators the CPU computes, and which stay the vendor's.

- Allocation, views and metadata: the vendor's own kernels, which need no device code.
- Every other ATen operator that torch_npu has a kernel for: the CPU (`HostDevice.run`).
- ATen operators without one: the vendor's own fallback, counted.
- Operators of the vendor (``npu::``): those in `portable_ascend.host_acl.vendor`; the others stay the vendor's, and what they
  launch is refused by the runtime with the operator's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from portable.rehearsal.kernels import base_name
from portable.rehearsal.schemas import makes_view, overload
from portable_ascend.host_acl import attention
from portable_ascend.host_acl.device import HostDevice

_KEY = "PrivateUse1"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
_has = torch._C._dispatch_has_kernel_for_dispatch_key
# The vendor's kernels of these touch no element, or only call other operators.
KEPT = frozenset(
    {
        "empty", "empty_like", "empty_strided", "empty_with_format", "new_empty", "new_empty_strided", "resize", "resize_as",
        "set", "record_stream", "is_pinned", "_pin_memory", "pin_memory", "_has_compatible_shallow_copy_type", "contiguous",
        "is_set_to", "_unsafe_view", "lift", "lift_fresh", "detach", "flatten_dense_tensors", "unflatten_dense_tensors",
        "scaled_dot_product_attention", "as_strided", "t", "transpose", "swapaxes", "swapdims", "squeeze", "unsqueeze",
    }
)  # fmt: skip


# The vendor takes these above autograd, and goes on to its own kernels without asking the dispatcher again.
_DIRECT = ("max.out", "min.out", "nanmean.out", "one_hot.default")


class VendorKernels:
    """Which operators have an NPU kernel: what torch_npu has registered (see `portable.rehearsal.kernels.KernelTable`)."""

    def __init__(self) -> None:
        self._missing: frozenset[str] = frozenset()

    def learn(self, missing: frozenset[str]) -> None:
        """Take the names of the operators without a kernel."""
        self._missing = missing

    def has(self, operator: Any) -> bool:
        """Whether the operator (an OpOverload) has a kernel."""
        return str(operator._name) not in self._missing


def register(
    device: HostDevice,
    vendor: Mapping[str, Callable[..., Any]],
    in_place: Mapping[str, Callable[..., Any]],
    table: VendorKernels,
) -> tuple[torch.library.Library, ...]:
    """Give PyTorch the kernels; they last as long as the libraries answered.

    Args:
        vendor: the vendor's operators, as functions of CPU tensors.
        in_place: those that change the tensors in ``out``.
        table: learns which operators have no kernel.
    """
    aten = torch.library.Library("aten", "IMPL")
    missing = []
    for operator in operators("aten"):
        name = operator._name
        if _has(name, _KEY):
            if base_name(operator) not in KEPT and not makes_view(operator):
                aten.impl(name[6:], partial(device.run, operator), _KEY, allow_override=True)
        elif _falls_back(operator):
            missing.append(name)
            kernel = torch.library.get_kernel(operator, _KEY)
            aten.impl(name[6:], partial(_fall_back, device, operator, kernel), _KEY)
    for name, copy in _COPIES.items():
        aten.impl(name, copy, _KEY, allow_override=True)
    for name in _DIRECT:
        operator = overload(name)
        aten.impl(name.removesuffix(".default"), partial(device.run, operator), f"Autograd{_KEY}", allow_override=True)
    aten.impl("_to_copy", device.to_copy, _KEY, allow_override=True)
    table.learn(frozenset(missing))
    npu = torch.library.Library("npu", "IMPL")
    for operator in operators("npu"):
        if not _has(operator._name, _KEY):
            continue
        if operator._name in in_place:
            npu.impl(
                operator._name[5:], partial(_change, device, operator, in_place[operator._name]), _KEY, allow_override=True
            )
        elif operator._name in vendor:
            device.override(operator, partial(_call, vendor[operator._name]))
            npu.impl(operator._name[5:], partial(device.run, operator), _KEY, allow_override=True)
    return aten, npu


def _copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return dst.copy_(self, non_blocking)


def _copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    return dst.resize_(self.shape).copy_(self)


def _split_with_sizes_copy(
    self: torch.Tensor, split_sizes: Sequence[int], dim: int = 0, *, out: Sequence[torch.Tensor]
) -> None:
    for target, part in zip(out, self.split_with_sizes(split_sizes, dim), strict=True):
        target.resize_(part.shape).copy_(part)


# Copies by which the vendor's fallback brings results back, and those into a list of targets.
_COPIES = {
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "split_with_sizes_copy.out": _split_with_sizes_copy,
}


def _call(function: Callable[..., Any], operator: Any, args: Any, kwargs: Any) -> Any:
    attention.reached(operator)
    return function(*args, **kwargs)


def _change(device: HostDevice, operator: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run one of the vendor's operators that change the tensors in ``out``, and answer those."""
    low_args, low_kwargs = tree_map_only(torch.Tensor, device.host, (args, kwargs))
    function(*low_args, **low_kwargs)
    device.observer.observe(operator, args, kwargs)
    return tuple(kwargs["out"])


def operators(namespace: str) -> list[Any]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        owner, _, rest = name.partition("::")
        if owner != namespace:
            continue
        packet, _, overload = rest.partition(".")
        try:
            found.append(getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default"))
        except (AttributeError, RuntimeError):
            continue  # an operator of TorchScript
    return found


def _falls_back(operator: Any) -> bool:
    """Whether the vendor sends the operator to the CPU: the kernel found for the device is its fallback."""
    try:
        return "VariableFallbackKernel" in repr(torch.library.get_kernel(operator, _KEY))
    except RuntimeError:
        return False  # no kernel at all


def _fall_back(device: HostDevice, operator: Any, kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Count, and let the vendor's fallback do it: it copies to the CPU, computes and copies back."""
    device.observer.observe(operator, args, kwargs)
    with device.recorder.pause():  # its copies are part of the fallback
        return kernel.call_boxed(_KEYS, *args, **kwargs)
