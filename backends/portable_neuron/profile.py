"""What the emulated Trainium follows, rule by rule.

Short source names are those of `portable_neuron.facts`. Where they conflict, the newer source and the safer behaviour stand.
Nothing here ran on a Trainium device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from portable.errors import ConfigurationError
from portable.rehearsal.kernels import KernelTable
from portable.rehearsal.profile import (
    AttentionCall,
    AttentionRule,
    CollectiveRule,
    CompileRule,
    Profile,
    Refusals,
    Rule,
)
from portable_neuron.emulated import VARIABLE, Options
from portable_neuron.facts import GENERATIONS
from portable_neuron.precision import auto_cast
from portable_neuron.surface import SURFACE

_TILE = 512  # tokens: the flash kernel's block
_HEAD = 128  # numbers in a head that one pass of the matrix unit holds

# Beyond PyTorch's own tags: operators of training that are neither core nor pointwise.
_KERNELS = frozenset(
    {
        # drop: the package registers these.
        "_foreach_norm", "_foreach_add", "_foreach_mul", "_fused_adamw", "_grouped_mm", "_scaled_mm",
        "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_fused_attention_overrideable_backward",
        # Forward and backward of layers that AWS's own examples train with.
        "native_layer_norm_backward", "native_dropout", "native_dropout_backward", "nll_loss_forward", "nll_loss_backward",
        "_log_softmax_backward_data", "_softmax_backward_data", "_safe_softmax", "embedding_dense_backward",
        "convolution_backward", "native_batch_norm", "native_batch_norm_backward", "native_group_norm_backward",
        "gelu_backward", "silu_backward", "max_pool2d_with_indices_backward", "avg_pool2d_backward",
        "_adaptive_avg_pool2d_backward", "threshold_backward", "tanh_backward", "sigmoid_backward", "mse_loss",
        "mse_loss_backward", "baddbmm", "addmv", "mv", "dot", "stack", "cat", "linalg_vector_norm", "norm", "masked_fill",
        "one_hot", "tril", "triu", "eye", "zero", "fill", "uniform", "bernoulli", "random", "_index_put_impl",
        "slice_backward", "select_backward", "bincount", "_fused_rms_norm", "std", "argsort",
    }
)  # fmt: skip
_UNKNOWN_TABLE = "the package's own table of operators could not be read; a published sweep of 2026 saw only normal_ fall back"


def flash_gate(call: AttentionCall) -> list[str]:
    """Why a call does not get the flash kernel (drop: its gate in eager mode; measured: the same in a 2.12 beta)."""
    reasons = []
    length, keys, size = call.query[-2], call.key[-2], call.query[-1]
    if call.key != call.value:
        reasons.append(f"key and value differ in shape ({tuple(call.key)}, {tuple(call.value)})")
    if length % _TILE or keys % _TILE:
        reasons.append(f"the lengths {length} and {keys} are not both multiples of {_TILE}")
    if size > _HEAD:
        reasons.append(f"head_dim {size} is above {_HEAD}")
    if call.mask is not None:
        reasons.append("a mask is given")
    if call.dropout:
        reasons.append(f"dropout_p is {call.dropout}, not 0")
    if len(set(call.dtypes)) > 1 or call.dtypes[0] not in (torch.float32, torch.float16, torch.bfloat16):
        reasons.append(f"dtypes are {', '.join(str(d)[6:] for d in call.dtypes)}, not one of float32, float16, bfloat16")
    if len(call.query) == 4 and call.query[1] % call.key[1]:
        reasons.append(f"{call.query[1]} query heads are no multiple of {call.key[1]} key heads")
    if os.environ.get("TORCH_NEURONX_ENABLE_NKI_SDPA") == "0":
        reasons.append("TORCH_NEURONX_ENABLE_NKI_SDPA is 0")
    return reasons


def attention_hazards(call: AttentionCall) -> list[str]:
    """What may come out wrong on the device without a word."""
    if call.causal and call.query[-2] != call.key[-2]:
        hazard = (
            f"is_causal with {call.query[-2]} queries and {call.key[-2]} keys: the package's paths align the mask differently "
            "(top left, bottom right); pass an explicit mask"
        )
        return [hazard]
    return []


def compiler_flags(environment: Mapping[str, str]) -> torch.dtype | None:
    """dtype to which neuronx-cc casts float32 matrix products, from NEURON_CC_FLAGS (compiler: --auto-cast)."""
    kind = auto_cast(environment.get("NEURON_CC_FLAGS", ""))
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": None, None: None}
    if kind not in kinds:
        raise ConfigurationError(
            f"NEURON_CC_FLAGS asks for --auto-cast-type {kind}, which the emulated device does not follow: use bf16 or fp16"
        )
    return kinds[kind]


def profile(chosen: Options = Options(), environment: Mapping[str, str] = os.environ) -> Profile:  # noqa: B008 - frozen
    """The profile of an emulated Trainium.

    Args:
        chosen: generation and memory.
        environment: where NEURON_CC_FLAGS is looked up.
    """
    generation = GENERATIONS[chosen.generation]
    assert generation.memory is not None
    flags = compiler_flags(environment)
    own_memory = chosen.memory is not None
    return Profile(
        device_type="neuron",
        title=f"{generation.title}, emulated",
        family=Rule(generation.name, "get_device_properties().name is the instance family", "drop"),
        memory=Rule(
            chosen.memory or generation.memory,
            "bytes of one logical core: a quarter of the chip",
            "" if own_memory else "arch",
            f"set by {VARIABLE}" if own_memory else "",
        ),
        device_count=Rule(
            chosen.devices,
            "one process drives one logical core",
            assumed="measured and drop say so; whether device_count() counts the others is not stated",
        ),
        rounding=Rule(
            (256, 16 * 2**20),
            "allocations below 16 MB are rounded up, to 256 bytes at least; larger ones are not",
            assumed="torch: memory guidelines name the limits but not the size classes; multiples of 256 are taken",
        ),
        computes_in=Rule(
            {torch.float64: torch.float32, torch.int64: torch.int32},
            "float64 and int64 keep their label and compute in 32 bits; int64 wraps around",
            assumed="drop for both; whether 2.33 passes --native-int64 to the compiler is unknown",
        ),
        tuple_label=Rule(
            {torch.float64: torch.float32},
            "operators with several outputs answer float32 where the CPU answers float64",
            assumed="drop; not confirmed for 2.33",
        ),
        refusals=Rule(
            Refusals(
                dtypes=frozenset({torch.complex32, torch.complex64, torch.complex128}),
                out=frozenset({torch.float64}),
                scaler_with_fused=True,
            ),
            "no complex tensors; no float64 out= without a float64 input; no loss scaler with fused AdamW",
            assumed="drop for out= and AdamW; complex has no positive evidence, and refusing it is safer than guessing",
        ),
        integer_matmul_bits=Rule(24, "integer matrix products go through float32: exact to 2^24", "types"),
        matmul_dtype=Rule(
            flags,
            "float32 matrix products are exact, unless NEURON_CC_FLAGS sets --auto-cast (then rounded to --auto-cast-type)",
            "compiler (default none); drop compiles eager operators with --auto-cast=none",
        ),
        autocast_dtype=Rule(
            torch.float16, "autocast without a dtype gives float16", assumed="drop (its tests); torch always passes a dtype"
        ),
        autocast_dtypes=Rule((torch.float32, torch.float16, torch.bfloat16), "get_amp_supported_dtype()", "drop"),
        attention=Rule(
            AttentionRule("NKI flash", "math, O(L^2) memory", flash_gate, attention_hazards),
            "flash only if K and V have one shape, both lengths are multiples of 512, head_dim <= 128, no mask, no dropout; "
            "else a decomposition that holds all scores, silently",
            assumed="drop (eager gate), measured on a 2.12 beta; the gate of 2.33 is not published",
        ),
        kernels=Rule(
            KernelTable(("core", "pointwise"), _KERNELS, {"normal": "measured: the one operator of a sweep that fell back"}),
            "operators that PyTorch tags core or pointwise, and those of common layers, have kernels; of the others those for "
            "which PyTorch has a generic kernel become their parts, and the CPU runs the rest, silently",
            assumed=_UNKNOWN_TABLE,
        ),
        compile_per_shape=Rule(
            True,
            "each operator with new shapes, dtypes or non-float arguments is compiled",
            "torch: best practices",
        ),
        compile=Rule(
            CompileRule("neuron", ignored_modes=True, options=("model_name",)),
            "backend neuron; dynamic=True is rejected; modes are ignored with a warning",
            "torch: compile reference",
        ),
        random=Rule(
            "cpu",
            "random operators draw from the CPU's generator; torch.Generator(device) does not exist",
            assumed="drop (torch.randn consumed the CPU's generator); not confirmed for 2.33 (16 bytes of Philox)",
        ),
        keeps_parameters=Rule(
            True,
            "Module.to changes parameters in place, so that shared weights stay shared",
            assumed="PyTorch lets a device from outside choose (c10/core/TensorImpl.h); training needs this choice",
        ),
        pinned=Rule(True, "is_pinned() answers True for every CPU tensor", assumed="drop; not confirmed for 2.33"),
        collectives=Rule(
            CollectiveRule(
                "neuron",
                integer_bits=24,
                sum_broadcast=True,
                refused={
                    "send": "the backend has no point-to-point operations",
                    "recv": "the backend has no point-to-point operations",
                    "recv_anysource": "the backend has no point-to-point operations",
                    "monitored_barrier": "the backend has none",
                    "reduce_scatter_coalesced": "the backend has none for several tensors at once",
                },
                even_splits=True,
                barrier_default_group_only=True,
            ),
            "integer sums go through float32 (exact to 2^24); broadcast is a sum; no send or recv; even all_to_all only",
            assumed="types for the sums; drop for the rest; 2.33 mentions pipeline parallelism, so send and recv may have come",
        ),
        surface=Rule(
            (*SURFACE, *EXTRA_SURFACE),
            "the functions of torch.neuron; mem_get_info, *_rng_state_all, graphs and others are absent",
            assumed="drop; a later version may have more",
        ),
    )


EXTRA_SURFACE = (
    "get_amp_supported_dtype", "wait_stream", "wait_event", "record_event", "query", "get_dynamo_metrics",
    "reset_dynamo_metrics", "_is_in_bad_fork",
)  # fmt: skip
