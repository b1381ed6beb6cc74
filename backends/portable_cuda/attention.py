"""Attention on NVIDIA and AMD GPUs: PyTorch's own kernels by declared rules, so that a choice can be explained without a GPU.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of PyTorch 2.13. Checked against no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch.nn.attention import SDPBackend, sdpa_kernel

from portable.attn import common
from portable.attn.adaptations import ADDITIVE, BOOLEAN, GUARD_ROWS, PAD_VALUE, REPEAT_HEADS, pad_head_dim
from portable.attn.path import Answer, Arguments, Path, constraint
from portable.attn.request import Request


def capability(r: Request) -> tuple[int, int]:
    """(major, minor) of a generation such as "sm_80"; (9, 0) where it is not known."""
    found = re.fullmatch(r"sm_(\d+)(\d)", r.generation)
    return (int(found[1]), int(found[2])) if found else (9, 0)


def _with(backend: SDPBackend) -> Callable[[Arguments], Answer]:
    def call(a: Arguments) -> Answer:
        with sdpa_kernel(backend):
            return common.sdpa(a)

    return call


_HALF = ("float16", "bfloat16")
_FLASH_ONLY = constraint(
    lambda r: not (r.mask.trivial or (r.mask.causal and r.queries == r.keys)),
    lambda r: f"its masks are none and causal with Lq = Lk, not {r.mask.kind}",
)

CUDNN = Path(
    "cudnn",
    "cuDNN's fused attention, through F.scaled_dot_product_attention",
    (
        common.NOT_FOUR,
        common.switched_off(2),
        constraint(lambda r: r.empty, "a size is 0"),
        constraint(lambda r: capability(r) < (9, 0), "{generation} is older than sm_90, where it is not the faster one"),
        constraint(lambda r: r.dtype not in _HALF, "the dtype is {dtype}, not float16 or bfloat16"),
        common.NO_LSE,
        constraint(lambda r: r.mask.bias and r.grad, "it has no gradient with a bias here"),
        common.STRIDED,
        constraint(lambda r: r.value_dim != r.head_dim, "value head_dim {value_dim} is not the key's {head_dim}", PAD_VALUE),
        constraint(lambda r: r.head_dim > 128, "head_dim {head_dim} is above 128"),
        constraint(lambda r: r.head_dim % 8 != 0, "head_dim {head_dim} is not a multiple of 8", pad_head_dim(8)),
        constraint(lambda r: r.deterministic and r.grad, "its backward pass is not deterministic"),
        _FLASH_ONLY,
    ),
    _with(SDPBackend.CUDNN_ATTENTION),
    lambda r: r.batch * r.heads * r.queries * 4,
    "sdp_utils.cpp, can_use_cudnn_attention",
)

FLASH = Path(
    "flash",
    "FlashAttention-2 inside PyTorch",
    (
        common.NOT_FOUR,
        common.switched_off(0),
        constraint(lambda r: r.empty, "a size is 0"),
        constraint(lambda r: capability(r) < (8, 0), "{generation} is older than sm_80"),
        constraint(lambda r: r.dtype not in _HALF, "the dtype is {dtype}, not float16 or bfloat16"),
        common.NO_LSE,
        _FLASH_ONLY,
        common.STRIDED,
        constraint(lambda r: r.value_dim != r.head_dim, "value head_dim {value_dim} is not the key's {head_dim}", PAD_VALUE),
        constraint(lambda r: r.head_dim > 256, "head_dim {head_dim} is above 256"),
        constraint(lambda r: r.head_dim % 8 != 0, "head_dim {head_dim} is not a multiple of 8", pad_head_dim(8)),
    ),
    _with(SDPBackend.FLASH_ATTENTION),
    lambda r: r.batch * r.heads * r.queries * 4,
    "sdp_utils.cpp, can_use_flash_attention",
)

EFFICIENT = Path(
    "efficient",
    "xFormers' memory-efficient attention inside PyTorch",
    (
        common.NOT_FOUR,
        common.switched_off(1),
        constraint(lambda r: r.empty, "a size is 0"),
        constraint(lambda r: capability(r) < (5, 0), "{generation} is older than sm_50"),
        constraint(lambda r: r.dtype == "float64", "the dtype is float64"),
        constraint(lambda r: r.dtype == "bfloat16" and capability(r) < (8, 0), "{generation} has no bfloat16 in it"),
        common.NO_LSE,
        constraint(lambda r: r.mask.learned and r.deterministic, "gradients of the mask are not deterministic"),
        constraint(lambda r: r.heads != r.key_heads, "it has no grouped heads", REPEAT_HEADS),
        common.STRIDED,
        constraint(
            lambda r: (
                r.head_dim % (4 if r.dtype == "float32" else 8) != 0 or r.value_dim % (4 if r.dtype == "float32" else 8) != 0
            ),
            "head_dim {head_dim} is not aligned",
            pad_head_dim(8),
        ),
        constraint(
            lambda r: r.mask.boolean and not (r.mask.trivial or r.mask.causal or r.mask.dense), "the mask is no tensor", BOOLEAN
        ),
        constraint(lambda r: r.mask.bias and r.mask.kind != "additive tensor", "mask and bias are not one tensor", ADDITIVE),
        constraint(
            lambda r: r.mask.empty_rows,
            "rows that see no key are not zeros in it",
            GUARD_ROWS,
        ),
    ),
    _with(SDPBackend.EFFICIENT_ATTENTION),
    lambda r: r.batch * r.heads * r.queries * 4,
    "sdp_utils.cpp, can_use_mem_efficient_attention",
)

PATHS = (CUDNN, FLASH, EFFICIENT, common.BLOCKWISE, common.MATH)
