"""What the findings of a rehearsal cost on Ascend, in words.

Short source names are those of `portable_ascend.facts`; ``plugin`` is the vendor's operator library, read as source.
Nothing here was measured by us.
"""

from __future__ import annotations

from portable.rehearse.costs import Cost, Costs

_QUEUE = "The host waits for the stream, and for torch_npu's task queue before it, so that nothing is launched meanwhile."

COSTS = Costs(
    {
        "sync": Cost(_QUEUE, source="docs: TASK_QUEUE_ENABLE; wheel (aclrtSynchronizeStream)"),
        "compile": Cost(
            "On the first series (910A) each operator with a new shape is compiled when it first runs (jit_compile); 910B "
            "and later carry compiled binaries.",
            "On the first series: torch.npu.set_compile_mode(jit_compile=False), or shapes that repeat.",
            "docs: torch.npu.set_compile_mode",
        ),
        "fallback": Cost(
            "torch_npu copies the tensors to the host, computes there, and copies back; a warning names the first operator.",
            "Use operators that have an NPU kernel. TORCH_NPU_FALLBACK_CPU_DISABLE=1 turns each fallback into an error.",
            "wheel",
        ),
        "attention": Cost(
            "The math path holds all scores of queries times keys in memory, forward and backward, without a word.",
            "Use a boolean mask or is_causal=True instead of an additive mask, four dimensions [batch, heads, length, "
            "head_dim], bf16 or fp16, head_dim a multiple of 4 and at most 512, a 910B or later.",
            "plugin: ScaledDotProductAttentionKernelNpuOpApi.cpp",
        ),
        "REH-OOM": Cost(
            "torch_npu's allocator raises; a die of a 910C has half of the package's memory and cannot use the other's.",
            source="wheel; third",
        ),
        "graph": Cost(
            "TorchAir builds and compiles the whole graph again.",
            "Keep shapes and Python values the same, or mark the sizes that change as dynamic (torch.compile(dynamic=True)).",
            "docs: TorchAir",
        ),
    },
    # The vendor's errors carry two digits for the module and three for the kind: "ERR01007 OPS feature not supported" (wheel,
    # torch_npu/utils/_error_code.py). 001 to 004: invalid arguments; 007: not supported. What fails inside the vendor's package
    # or below it, in what stands in for CANN, says nothing about the device.
    error_pattern=r"\bERR\d\d00[12347]\b",
    gap_pattern=r"\bERR\d\d(00[5689]|01\d|[123]00)\b",
)
