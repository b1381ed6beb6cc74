"""The vendor's operators, computed on the CPU from the vendor's documentation.

`OPERATORS` maps an operator's name with overload to a function of the operator's own arguments, on CPU tensors, that answers
CPU tensors. `portable_ascend.host_acl.kernels` registers them for NPU tensors. An operator that is not here stays the vendor's,
and the host runtime refuses what it launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from portable_ascend.host_acl.vendor import fusion_attention

OPERATORS: Mapping[str, Callable[..., Any]] = {
    "npu::npu_fusion_attention": fusion_attention.npu_fusion_attention,
    "npu::npu_fusion_attention_grad": fusion_attention.npu_fusion_attention_grad,
    "npu::npu_fusion_attention_v3": fusion_attention.npu_fusion_attention_v3,
    "npu::npu_fusion_attention_grad_v3": fusion_attention.npu_fusion_attention_grad_v3,
}
