"""Giving PyTorch the kernels of an emulated device: which operators reach `Device.run`, and which stay PyTorch's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from portable.rehearsal import kernels
from portable.rehearsal.allocation import Allocation
from portable.rehearsal.device import Device
from portable.rehearsal.observing import SYNCS
from portable.rehearsal.schemas import makes_view, overload

_KEY = "PrivateUse1"
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_GENERIC = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_IMPLICIT = "CompositeImplicitAutograd"
# PyTorch's composite kernels of these work by metadata, or make a tensor and fill it through other operators.
_COMPOSITE = frozenset(
    {
        "_unsafe_view", "lift", "lift_fresh", "detach", "detach_", "as_strided_", "t_", "transpose_", "squeeze_",
        "unsqueeze_", "resize_as_", "set", "resize", "resize_as", "is_pinned", "_pin_memory", "empty_like", "zeros_like",
        "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty", "new_zeros", "new_ones",
        "new_full", "is_same_size", "is_coalesced", "sparse_dim", "dense_dim", "_has_same_storage_numel",
        "_new_zeros_with_same_feature_meta", "_assert_tensor_metadata", "_lazy_clone", "_functional_assert_scalar",
        "_functional_sym_constrain_range", "_functional_sym_constrain_range_for_size", "convolution_overrideable",
        "convolution_backward_overrideable", "_to_copy",
    }
)  # fmt: skip
# Generic kernels that refuse any device that they do not know by name, or every one.
_REFUSING = frozenset(
    {
        "mode", "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_fused_attention_overrideable_backward",
    }
)  # fmt: skip
# Kernels of the CPU that read nothing but metadata, so that they serve a tensor of any device: views, and new owners of memory.
_METADATA = (
    "as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "set_.source_Tensor",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "set_",
)  # fmt: skip


def register(device: Device) -> tuple[torch.library.Library, ...]:
    """Give PyTorch the device's kernels; they last as long as the libraries answered."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(device.run, _KEY)
    aten = torch.library.Library("aten", "IMPL")

    def give(name: str, kernel: Any, key: str = _KEY) -> None:
        aten.impl(overload(name)._name[6:], kernel, key)

    for operator in _taken_apart(device.profile.kernels.value):
        aten.impl(operator._name[6:], partial(device.run, operator), _KEY)
    for name in _METADATA:
        give(name, partial(overload(name).redispatch, _CPU_KEYS))

    def view_as_complex(tensor: torch.Tensor) -> torch.Tensor:
        device.check_dtype(tensor.dtype.to_complex())
        return overload("view_as_complex").redispatch(_CPU_KEYS, tensor)

    give("view_as_complex", view_as_complex)
    allocation = Allocation(device)
    for name in ("empty.memory_format", "empty_strided"):
        give(name, partial(allocation.empty, overload(name)))
    give("_efficientzerotensor", allocation.zeros)
    give("resize_", allocation.resize)
    give("_to_copy", allocation.to_copy)

    # Or Module.to would make new parameters, and weights that two layers share would come apart.
    def keeps_parameters(tensor: torch.Tensor, other: torch.Tensor) -> bool:
        return tensor.device.type == other.device.type or device.profile.keeps_parameters.value

    for key in (_KEY, "AutogradPrivateUse1"):
        give("_has_compatible_shallow_copy_type", keeps_parameters, key)
    return rest, aten


def _taken_apart(table: kernels.KernelTable) -> list[Any]:
    """Operators which PyTorch would take apart on the device, but which the device has kernels for.

    PyTorch registers a generic kernel for them ("CompositeExplicitAutograd" in native_functions.yaml, or for three operators
    "CompositeImplicitAutograd" beside a kernel for the CPU). It goes before a device's fallback to the CPU
    (OperatorEntry::computeDispatchTableEntryWithDebug in c10), so a written one without a kernel on the device, as
    _foreach_addcdiv_, becomes its parts there and not a fallback. Kernels that PyTorch's generator made ("NonFunctional", and
    functional forms of operators that write) only call another form of the same operator, which falls back.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        generic = [key for key in _GENERIC if has(name, key)]
        if not name.startswith("aten::") or not (generic or (has(name, "CPU") and has(name, _IMPLICIT))):
            continue
        try:
            operator = overload(name[6:])
        except (AttributeError, RuntimeError):
            continue  # an operator of TorchScript
        schema = operator._schema
        takes_tensor = any("Tensor" in str(argument.type) for argument in schema.arguments)
        # Its out= form was made by PyTorch's generator from the functional one, which is given already.
        generated = schema.overload_name.endswith("out") and _GENERIC[0] in generic
        own = {name[6:].partition(".")[0], kernels.base_name(operator)} & _COMPOSITE
        written = generic == [_GENERIC[0]] and torch.Tag.generated not in operator.tags
        # What waits for the device is counted by its own name, not by the ``item`` that it is made of.
        whole = kernels.base_name(operator) in _REFUSING or kernels.base_name(operator) in SYNCS
        falls_apart = written and not whole and not table.has(operator)
        if takes_tensor and not makes_view(operator) and not generated and not own and not falls_apart:
            found.append(operator)
    return found
