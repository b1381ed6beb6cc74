"""Which operators have a kernel on a device, as a table over ATen's operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch


def base_name(operator: Any) -> str:
    """``aten::add_.Tensor`` to "add": the name that an operator's in-place and ``out=`` forms share."""
    name = str(operator._schema.name).partition("::")[2]
    return name if name.startswith("__") else name.rstrip("_")


@cache
def _tagged(tags: tuple[str, ...]) -> frozenset[str]:
    """Base names of ATen operators of which some overload carries one of PyTorch's tags (tags.yaml)."""
    wanted = {getattr(torch.Tag, tag) for tag in tags}
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace != "aten":
            continue
        packet, _, overload = rest.partition(".")
        try:
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue  # a scalar-only operator of TorchScript
        if wanted.intersection(operator.tags):
            found.add(base_name(operator))
    return frozenset(found)


@dataclass(frozen=True)
class KernelTable:
    """The operators that run on the device; every other one is computed by the CPU.

    Attributes:
        tags: PyTorch's operator tags whose bearers have kernels ("core", "pointwise").
        names: further base names with kernels ("native_layer_norm_backward").
        missing: base names without a kernel whatever the tags say, each with the reason.
    """

    tags: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict)

    def has(self, operator: Any) -> bool:
        """Whether the operator (an OpOverload) has a kernel. Views and allocations need none."""
        name = base_name(operator)
        if name in self.missing:
            return False
        return name in self.names or name in _tagged(self.tags)
