"""Which kernel the vendor's scaled_dot_product_attention reached: recorded, not decided, here.

torch_npu's compiled code chooses, and calls one of its own operators through the dispatcher, or PyTorch's math path.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from portable.rehearsal.observing import attention_call
from portable_ascend import sdpa
from portable_ascend.host_acl.device import HostDevice

_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_reached = threading.local()
# Operator of the vendor to the name of the path.
_PATHS = {
    "npu::npu_fusion_attention": sdpa.TRAINING,
    "npu::npu_fusion_attention_v2": sdpa.TRAINING,
    "npu::npu_fusion_attention_v3": sdpa.TRAINING,
    "npu::npu_fused_infer_attention_score": sdpa.INFERENCE,
    "npu::npu_fused_infer_attention_score_v2": sdpa.INFERENCE,
    "npu::npu_prompt_flash_attention": sdpa.INFERENCE,
    "npu::npu_incre_flash_attention": sdpa.INFERENCE,
}


def reached(operator: Any) -> None:
    """Note that an operator of the vendor runs."""
    path = _PATHS.get(operator._name)
    if path is not None:
        _reached.path = path


def register(device: HostDevice) -> torch.library.Library:
    """Record each call; the library answered keeps the recording alive."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        kernel = torch.library.get_kernel(_OPERATOR, key)
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        library.impl("scaled_dot_product_attention", partial(_record, device, kernel, keys), key, allow_override=True)
    return library


def _record(device: HostDevice, kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    _reached.path = sdpa.MATH
    out = kernel.call_boxed(keys, *args, **kwargs)
    path = _reached.path
    tracing = torch._C._get_dispatch_mode(_FAKE) is not None  # Dynamo asks for shapes only
    if not (device.recorder.paused or tracing):
        call = attention_call(*args, **kwargs)
        reasons = () if path == sdpa.TRAINING else tuple(sdpa.reasons(call, device.soc))
        device.recorder.attention_call(path, reasons, f"q {tuple(call.query)}, k {tuple(call.key)}, v {tuple(call.value)}")
    return out
