"""Attention on the CPU: PyTorch's flash kernel where it takes the call, with what may be changed so that it does.

Source: aten/src/ATen/native/transformers/sdp_utils_cpp.cpp of PyTorch 2.13, use_flash_attention_cpp; tests/attn compares each
rule with what ``torch._fused_sdp_choice`` answers.
"""

from __future__ import annotations

from portable.attn import common
from portable.attn.adaptations import ADDITIVE, BOOLEAN, PAD_VALUE, WIDEN
from portable.attn.path import Path, constraint
from portable.attn.request import Request
from portable_cpu.facts import GENERATIONS

# A mask as a tensor is read from memory by every head; above this the blockwise path, which computes it, is faster (measured,
# docs/performance.md).
_MASK_BYTES = 64 * 2**20


def _emulated(r: Request) -> bool:
    """Whether the processor multiplies the dtype without instructions of its own."""
    known = GENERATIONS.get(r.generation)
    return known is not None and r.dtype in ("bfloat16", "float16") and r.dtype not in known.matmul


FLASH = Path(
    "flash",
    "PyTorch's fused CPU kernel",
    (
        common.NOT_FOUR,
        common.switched_off(0),
        constraint(lambda r: r.empty, "a size is 0"),
        constraint(lambda r: r.dropout > 0, "dropout {dropout:g} is not in the kernel"),
        # Measured on AVX2 (docs/performance.md): the backward pass in bfloat16 takes five times as long as in float32.
        constraint(
            lambda r: r.grad and _emulated(r),
            "training in {dtype} on {generation}, which has no instructions for it, is slower than in float32",
            WIDEN,
        ),
        constraint(lambda r: r.mask.learned, "gradients of the mask are wanted, which the kernel does not compute"),
        constraint(lambda r: r.lse, "the log-sum-exp is wanted, which PyTorch does not hand out"),
        common.STRIDED,
        constraint(lambda r: r.value_dim != r.head_dim, "value head_dim {value_dim} is not the key's {head_dim}", PAD_VALUE),
        constraint(
            lambda r: not r.mask.dense and r.mask_bytes > _MASK_BYTES and not (r.mask.trivial or r.mask.causal),
            lambda r: f"the mask as a tensor would take {r.mask_bytes / 2**20:.0f} MiB, which the blockwise path saves",
        ),
        constraint(
            lambda r: not (r.mask.trivial or r.mask.causal or r.mask.dense or r.mask.bias), "the mask is not a tensor", BOOLEAN
        ),
        constraint(
            lambda r: r.mask.bias and not (r.mask.dense and r.mask.kind == "additive tensor"),
            "mask and bias are not one tensor",
            ADDITIVE,
        ),
    ),
    common.sdpa,
    lambda r: r.batch * r.heads * r.queries * 4,
    "sdp_utils_cpp.cpp, use_flash_attention_cpp",
)

PATHS = (FLASH, common.BLOCKWISE, common.MATH)
