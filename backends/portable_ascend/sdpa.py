"""Which kernel torch_npu's scaled_dot_product_attention takes, predicted from shapes and dtypes alone.

Source: the vendor's operator library for torch_npu 2.13, op_plugin/ops/opapi/ScaledDotProductAttentionKernelNpuOpApi.cpp, and
what the compiled wheel was seen to do on the host runtime; tests/host_acl compares the two for every rule here. The vendor's
function also names a kernel for inference, npu_fused_infer_attention_score. No request was found that reaches it: whatever it
admits, the training kernel before it admits too, and serves inference as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from portable.rehearsal.profile import AttentionCall

TRAINING = "npu_fusion_attention"
INFERENCE = "npu_fused_infer_attention_score"
MATH = "math"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEADS = 2048
_MAX_HEAD_DIM = 512


@dataclass(frozen=True)
class Rule:
    """One condition of the training kernel.

    Attributes:
        broken: whether a call does not meet it.
        reason: why the call goes to the math path then.
    """

    broken: Callable[[AttentionCall], bool]
    reason: Callable[[AttentionCall], str]


def _four(call: AttentionCall) -> bool:
    return len(call.query) == len(call.key) == len(call.value) == 4


def _head_dims(call: AttentionCall) -> tuple[int, int, int]:
    return call.query[-1], call.key[-1], call.value[-1]


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype)[6:] for dtype in dtypes)


RULES = (
    Rule(
        lambda call: not _four(call),
        lambda call: (
            f"the inputs have {len(call.query)}, {len(call.key)} and {len(call.value)} dimensions, not 4: "
            "add the batch dimension with unsqueeze(0)"
        ),
    ),
    Rule(
        lambda call: call.dtypes[0] not in _DTYPES,
        lambda call: f"the dtype is {_names(call.dtypes[:1])}, not float16, bfloat16 or float32",
    ),
    Rule(
        lambda call: call.mask not in (None, torch.bool),
        lambda call: (
            f"the mask is {_names((call.mask,)) if call.mask else ''}, not boolean: pass mask == 0 if it is of 0 and -inf"
        ),
    ),
    Rule(
        lambda call: call.dtypes[0] == torch.float32 and any(size % 4 for size in _head_dims(call)),
        lambda call: f"head_dim is {_head_dims(call)} in float32, not a multiple of 4: pad it",
    ),
    Rule(
        lambda call: max(_head_dims(call)) > _MAX_HEAD_DIM,
        lambda call: f"head_dim {max(_head_dims(call))} is above {_MAX_HEAD_DIM}",
    ),
    Rule(
        lambda call: _four(call) and max(call.query[1], call.key[1]) > _MAX_HEADS,
        lambda call: f"{max(call.query[1], call.key[1])} heads are more than {_MAX_HEADS}",
    ),
    Rule(
        lambda call: _four(call) and (not call.key[1] or call.query[1] < call.key[1] or call.query[1] % call.key[1] != 0),
        lambda call: f"{call.query[1]} query heads are not a multiple of {call.key[1]} key heads",
    ),
)


def has_fused_kernels(soc: str) -> bool:
    """Whether the SoC has the fused kernels: 910B1 and later. "Ascend910B" alone belongs to the first series."""
    return re.match(r"Ascend(910B\d|910_93|910C|950)", soc) is not None


def reasons(call: AttentionCall, soc: str) -> list[str]:
    """Why a call takes the math path; empty if it takes the fused kernel.

    Args:
        call: query (batch, heads, Lq, head_dim), key and value (batch, key heads, Lk, head_dim).
        soc: name of the SoC, such as "Ascend910B2".
    """
    found = [] if has_fused_kernels(soc) else [f"{soc} has no fused attention kernel; Ascend910B1 and later have"]
    return found + [rule.reason(call) for rule in RULES if rule.broken(call)]


def path(call: AttentionCall, soc: str) -> str:
    """The path a call takes."""
    return MATH if reasons(call, soc) else TRAINING
