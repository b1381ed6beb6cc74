"""The vendor's operators, computed on the CPU from the vendor's documentation.

`OPERATORS` maps an operator's name with overload to a function of the operator's own arguments, on CPU tensors, that answers
CPU tensors; those in `IN_PLACE` change the tensors in ``out`` instead. `portable_ascend.host_acl.kernels` registers them for
NPU tensors. An operator that is not here stays the vendor's, and the host runtime refuses what it launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from portable_ascend.host_acl.vendor import (
    activations,
    dropout,
    fusion_attention,
    grouped_matmul,
    inference_attention,
    losses,
    moe_gating,
    moe_permutation,
    moe_routing,
    norms,
    optimizers,
    rotary,
    shapes,
)

OPERATORS: Mapping[str, Callable[..., Any]] = {
    **fusion_attention.OPERATORS,
    **inference_attention.OPERATORS,
    **norms.OPERATORS,
    **rotary.OPERATORS,
    **activations.OPERATORS,
    **dropout.OPERATORS,
    **losses.OPERATORS,
    **shapes.OPERATORS,
    **grouped_matmul.OPERATORS,
    **moe_gating.OPERATORS,
    **moe_routing.OPERATORS,
    **moe_permutation.OPERATORS,
}
IN_PLACE: Mapping[str, Callable[..., Any]] = optimizers.IN_PLACE
