"""What the rehearsal on the host runtime follows. The vendor's own code decides almost everything; the rest stands here.

Short source names are those of `portable_ascend.facts`.
"""

from __future__ import annotations

import torch

from portable.rehearsal.profile import (
    AttentionRule,
    CollectiveRule,
    CompileRule,
    Profile,
    Refusals,
    Rule,
)
from portable.spec import Generation
from portable_ascend import sdpa
from portable_ascend.facts import GENERATIONS, generation_of
from portable_ascend.host_acl.kernels import VendorKernels
from portable_ascend.host_acl.settings import Settings

_OWN = "the vendor's own code runs"


def _missing(generation: Generation | None) -> frozenset[torch.dtype]:
    """dtypes that other generations compute in and this one does not."""
    everywhere = {name for other in GENERATIONS.values() for name in other.storage}
    missing = everywhere - generation.storage if generation else set()
    return frozenset(getattr(torch, name) for name in missing)


def profile(settings: Settings, kernels: VendorKernels) -> Profile:
    """The profile of the host runtime's devices."""
    soc = settings.soc.name
    generation = generation_of(soc)
    title = generation.title if generation else soc
    first_series = not sdpa.has_fused_kernels(soc)
    dtypes: tuple[torch.dtype, ...] = (torch.float16,) if first_series else (torch.float16, torch.bfloat16)
    return Profile(
        device_type="npu",
        title=f"{title}, torch_npu on the host runtime",
        family=Rule(soc, "torch.npu.get_device_name() is the SoC's name", _OWN),
        memory=Rule(settings.hbm, "bytes of memory of one device", "portable_ascend.facts, unless set by the user"),
        device_count=Rule(settings.devices, "as many as were asked for", assumed="set by the user of this run"),
        rounding=Rule((512, 2**63), "the vendor's caching allocator rounds to 512 bytes and pads by 32", _OWN),
        computes_in=Rule({}, "every dtype computes as labelled", assumed="which operators narrow float64 is not documented"),
        tuple_label=Rule({}, "outputs keep their labels", _OWN),
        refusals=Rule(
            Refusals(_missing(generation), frozenset()),
            "what torch_npu's own code refuses; tensors of bfloat16 on the first series, of float8 before the 950 series",
            "the vendor's own code runs; wheel (is_bf16_supported, get_amp_supported_dtype)",
            "at which call CANN refuses such a dtype is not documented: computing one is refused here. What its kernels refuse "
            "beyond that (complex matrix products) is not known",
        ),
        integer_matmul_bits=Rule(None, "integer matrix products are exact", assumed="not documented otherwise"),
        matmul_dtype=Rule(
            None,
            "float32 matrix products are exact, unless torch.npu.matmul.allow_hf32 (off by default), cube_math_type or "
            "ACL_PRECISION_MODE ask for less from the 910B on; convolutions are exact, although torch.npu.conv.allow_hf32 is "
            "on by default; so are products on the first series, which has float16 only",
            "wheel: npu_config.py; op-plugin: GetCubeMathType; CANN: aclnnMm",
        ),
        autocast_dtype=Rule(torch.float16, "autocast without a dtype gives float16", _OWN),
        autocast_dtypes=Rule(dtypes, "get_amp_supported_dtype()", _OWN),
        attention=Rule(
            AttentionRule(
                sdpa.TRAINING,
                sdpa.MATH,
                lambda call: sdpa.reasons(call, soc),
                lambda call: [],
            ),
            "the vendor's own dispatch decides; what it reached is recorded",
            _OWN,
        ),
        kernels=Rule(kernels, "operators that torch_npu registers a kernel for; the others take its fallback to the CPU", _OWN),  # type: ignore[arg-type]
        compile_per_shape=Rule(
            first_series,
            "operators are compiled for new shapes on the first series only (jit_compile); later ones carry binaries",
            "docs: torch.npu.set_compile_mode, jit_compile is off by default from the 910B on",
        ),
        compile=Rule(
            CompileRule("npu", ignored_modes=True, options=(), dynamic=True),
            "Dynamo's graphs are counted and run operator by operator",
            assumed="TorchAir, which the device has for them, needs CANN's graph engine: what it refuses is not seen here",
        ),
        random=Rule("own", "each device has a generator of seed and offset; the numbers are not the device's", _OWN),
        keeps_parameters=Rule(True, "Module.to changes parameters in place", _OWN),
        pinned=Rule(None, "is_pinned answers for memory of the vendor's pinned allocator", _OWN),
        collectives=Rule(
            CollectiveRule(
                "hccl",
                integer_bits=None,
                sum_broadcast=False,
                refused={},
                even_splits=False,
                barrier_default_group_only=False,
            ),
            "gloo carries what hccl would",
            assumed="HCCL's limits on dtypes are not emulated",
        ),
        surface=Rule((), "torch.npu is the vendor's module", _OWN),
    )
