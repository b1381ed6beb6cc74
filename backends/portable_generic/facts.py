"""What is declared of the devices that the generic backend serves, one entry for each device type.

Sources, by their short names below:

``torch``   PyTorch's sources and type stubs, version 2.13, with the file
``xpu-ops`` intel/torch-xpu-ops, src/ATen/native/xpu/XPUFallback.template: the operators of PyTorch's XPU builds
``gaudi``   Intel Gaudi documentation 1.23 (docs.habana.ai): PyTorch Support Matrix, Runtime Environment Variables
``docs``    PyTorch's documentation, "MPS Environment Variables"

No peak rate or bandwidth is declared: one device type covers products that differ tenfold, and their names are not looked up.
"""

from __future__ import annotations

from portable.spec import BackendSpec, Choice, CompileSpec, FallbackSpec, Generation, by_name

NAME = "generic"
PRIORITY = 50  # above the CPU (0), below every backend that was written for the device (100)
ANY = "any"
"""Stands for the device type as long as no device is known."""

UNCHECKED = "against PyTorch's sources and documents only; nothing has run on such a device"

_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})
_STORAGE = _INTEGERS | {"float32", "float16", "bfloat16", "complex64"}

XPU_GENERATIONS = by_name(
    Generation(
        "xe_matrix",
        "Intel GPU with XMX",
        _STORAGE | {"complex128", "float64"},
        frozenset({"float32", "float16", "bfloat16", "int8"}),
        ("bfloat16", "float16"),
        "torch: torch/xpu/__init__.py, is_tf32_supported (DPAS instructions); float64 computes only where the device has fp64",
        reduced={"tf32": 11},
        assumed=("what multiplies TF32 (DPAS) multiplies bfloat16, float16 and int8 too",),
    ),
    Generation(
        "xe",
        "Intel GPU without XMX",
        _STORAGE | {"complex128", "float64"},
        frozenset({"float32"}),
        (),
        "torch: torch/xpu/__init__.py, get_device_properties (has_subgroup_matrix_multiply_accumulate)",
        assumed=("without matrix units 16-bit products are not worth the lost precision",),
    ),
)

MPS_GENERATIONS = by_name(
    Generation(
        "apple",
        "Apple GPU",
        _STORAGE,  # torch: aten/src/ATen/mps refuses float64 and complex128 ("the MPS framework doesn't support float64")
        frozenset({"float32"}),
        (),
        "torch: aten/src/ATen/native/mps",
        assumed=("no page of Apple's states that 16-bit products are faster than float32 on every Apple GPU: float32 is safe",),
    ),
)

HPU_GENERATIONS = by_name(
    Generation(
        "gaudi",
        "Intel Gaudi",
        _INTEGERS | {"float32", "bfloat16"},
        frozenset({"float32", "bfloat16"}),
        ("bfloat16",),
        "gaudi: bfloat16 autocast is the documented way on every Gaudi; int64 needs PT_ENABLE_INT64_SUPPORT=1",
    ),
)

_NO_FALLBACK = FallbackSpec(False, "PyTorch has no kernel for an operator: it raises NotImplementedError")
_UNKNOWN_PINNING = Choice(False, "it is not known whether copies from pinned memory overlap on this device")

KNOWN: dict[str, BackendSpec] = {
    "xpu": BackendSpec(
        name=NAME,
        aliases=("xpu",),
        vendor="Intel GPU",
        device_type="xpu",
        priority=PRIORITY,
        generations=XPU_GENERATIONS,
        compile=CompileSpec(
            "inductor",
            "TorchInductor generates Triton kernels (torch: torch/_inductor/codegen/common.py)",
            requires="triton",
        ),
        process_group="xccl",  # torch: torch/distributed/distributed_c10d.py, default_device_backend_map
        pin_memory=Choice(True, "copies from pinned memory run asynchronously (torch: XPU has a caching host allocator)"),
        fallback=FallbackSpec(
            True,
            "an operator without a kernel raises, unless PYTORCH_ENABLE_XPU_FALLBACK=1; some run on the CPU in any case. "
            "They are named, and counted here, only with PYTORCH_DEBUG_XPU_FALLBACK=1 (xpu-ops)",
            forbid={"PYTORCH_ENABLE_XPU_FALLBACK": "0"},
            warning=r"The operator '(?P<op>[^' ]+)'? on the XPU backend is falling back to run on the CPU",
        ),
        checked=UNCHECKED,
        install="Intel's GPU driver, and PyTorch's XPU build (see the selector on pytorch.org, 'Get Started')",
        rng="Philox, one generator for each device; torch.manual_seed seeds them all",
        environment={
            "ZE_AFFINITY_MASK": "which devices the process sees",
            "PYTORCH_ENABLE_XPU_FALLBACK": "1: an operator without a kernel runs on the CPU",
            "PYTORCH_DEBUG_XPU_FALLBACK": "1: name each operator that runs on the CPU",
        },
        profiler_activities=("CPU", "XPU"),
    ),
    "mps": BackendSpec(
        name=NAME,
        aliases=("mps",),
        vendor="Apple GPU",
        device_type="mps",
        priority=PRIORITY,
        generations=MPS_GENERATIONS,
        compile=CompileSpec(
            "inductor",
            "TorchInductor generates Metal kernels (torch: torch/_inductor/codegen/mps.py)",
            forbidden={"mode=reduce-overhead": "it means CUDA graphs, which Metal does not have"},
        ),
        # torch: default_device_backend_map names gloo, which moves no tensors of the GPU: collectives take CPU tensors.
        process_group="gloo",
        composite_group=False,
        pin_memory=Choice(False, "host and GPU share one memory"),
        fallback=FallbackSpec(
            True,
            "an operator without a kernel raises, unless PYTORCH_ENABLE_MPS_FALLBACK=1; a few run on the CPU in any case",
            forbid={"PYTORCH_ENABLE_MPS_FALLBACK": "0"},
            # torch: aten/src/ATen/mps/MPSFallback.mm
            warning=r"The operator '(?P<op>[^']+)' is not currently supported on the MPS backend and will fall back to run on",
        ),
        checked=UNCHECKED,
        install="PyTorch for macOS on Apple silicon",
        rng="Philox, one generator; torch.manual_seed seeds it",
        environment={
            "PYTORCH_ENABLE_MPS_FALLBACK": "1: an operator without a kernel runs on the CPU",
            "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "limit of the allocator, as a ratio of the recommended maximum; 0 for none",
            "PYTORCH_MPS_LOW_WATERMARK_RATIO": "from which ratio on the allocator collects garbage",
            "PYTORCH_MPS_FAST_MATH": "1: faster and less accurate Metal functions",
            "PYTORCH_MPS_PREFER_METAL": "1: Metal kernels instead of MPSGraph for matrix products",
        },
        # torch: aten/src/ATen/mps/MPSAllocator.mm raises a plain RuntimeError.
        out_of_memory=("MPS backend out of memory",),
    ),
    "hpu": BackendSpec(
        name=NAME,
        aliases=("hpu", "gaudi"),
        vendor="Intel Gaudi",
        device_type="hpu",
        priority=PRIORITY,
        generations=HPU_GENERATIONS,
        compile=CompileSpec(
            "hpu_backend",
            "Gaudi's own Dynamo backend; Inductor is not supported (gaudi: Support Matrix)",
            requires="habana_frameworks",
            forbidden={
                "mode": "torch.compile's modes are options of Inductor",
                "options": "torch.compile's options are those of Inductor",
            },
        ),
        process_group="hccl",
        pin_memory=_UNKNOWN_PINNING,
        fallback=FallbackSpec(True, "it is not known how the Gaudi bridge announces an operator that runs on the CPU"),
        checked="against Intel's documentation only; nothing has run on such a device",
        install="Intel Gaudi software and its PyTorch packages (docs.habana.ai, 'Installation')",
        rng="one generator for each device; torch.manual_seed seeds them all",
        environment={
            "HABANA_VISIBLE_MODULES": "which devices the process sees",
            "PT_HPU_LAZY_MODE": "0: eager mode and torch.compile (the default); 1: the older lazy mode",
            "PT_ENABLE_INT64_SUPPORT": "1: 64-bit integers are not cast to 32 bits",
        },
    ),
    "mtia": BackendSpec(
        name=NAME,
        aliases=("mtia",),
        vendor="Meta MTIA",
        device_type="mtia",
        priority=PRIORITY,
        compile=CompileSpec(
            "inductor",
            "TorchInductor generates Triton kernels (torch: torch/_inductor/codegen/common.py)",
            requires="triton",
        ),
        process_group="gloo",  # torch's default_device_backend_map has no entry for mtia
        composite_group=False,
        pin_memory=_UNKNOWN_PINNING,
        fallback=_NO_FALLBACK,
        checked=UNCHECKED,
        install="a device of Meta's data centres; its runtime is not published",
        rng="one generator for each device; torch.manual_seed seeds them all",
        profiler_activities=("CPU", "MTIA"),
    ),
}


def unknown(device_type: str, *, process_group: str | None = None, inductor: bool = False) -> BackendSpec:
    """The declaration of a device that the table does not list.

    Args:
        device_type: PyTorch's device type.
        process_group: the torch.distributed backend that its package registered for it, None if there is none.
        inductor: whether its package registered code generators for TorchInductor.
    """
    known = device_type != ANY
    return BackendSpec(
        name=NAME,
        aliases=(device_type,) if known else (),
        vendor=device_type if known else "any other device that PyTorch knows",
        device_type=device_type,
        priority=PRIORITY,
        compile=CompileSpec("inductor", "the device's package brings code generators for TorchInductor")
        if inductor
        else CompileSpec(None, "the device's package brings no code generators for TorchInductor; pass backend= for its own"),
        process_group=process_group or "gloo",
        composite_group=process_group is not None,
        pin_memory=_UNKNOWN_PINNING,
        fallback=FallbackSpec(True, "it is not known whether operators without a kernel run on the CPU"),
        checked="with a device emulated in Python; nothing is known of the real one",
        install="the package of the device's vendor",
        rng="not known; torch.manual_seed seeds every device that PyTorch knows",
        out_of_memory=(),
        profiler_activities=("CPU", "PrivateUse1"),
    )
