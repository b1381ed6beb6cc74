"""What is declared of CUDA devices: compute capabilities, products, and how PyTorch is to be used with them.

Sources of the product figures: NVIDIA's data sheets and architecture white papers (V100, T4, A100, A10, L4, L40S, Ada, H100,
H200, Blackwell, RTX Blackwell) and AMD's Instinct data sheets (MI250X, MI300X, MI355X). Peaks are dense: where a sheet prints
the figure with sparsity it is halved here. A GB of a data sheet is 10**9 bytes for bandwidth and 2**30 for memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from portable.spec import (
    BackendSpec,
    Choice,
    CompileSpec,
    DeterminismSpec,
    FallbackSpec,
    Generation,
    OptimizerSpec,
    by_name,
)

_PLAIN = frozenset({"float64", "float32", "float16", "int8"})
_STORAGE = frozenset(
    {"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"}
    | {"int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"}
)
_GUIDE = "CUDA C++ Programming Guide, 'Compute Capabilities': types of the tensor cores by capability"
_CDNA = "AMD ROCm documentation, 'Data types and precision support', and the CDNA white paper of the generation"


# torch/cuda/__init__.py, is_tf32_supported: TF32 wherever bfloat16 is native on NVIDIA, and on gfx94* and gfx95* of AMD. Of a
# float32 input 10 bits are read after the implicit one (PyTorch notes, "CUDA semantics").
_TF32 = {"tf32": 11}


def _capability(
    name: str,
    title: str,
    extra: frozenset[str],
    autocast: tuple[str, ...],
    source: str = _GUIDE,
    reduced: Mapping[str, int] = _TF32,
) -> Generation:
    return Generation(name, title, _STORAGE, _PLAIN | extra, autocast, source, reduced=reduced)


_BF16 = frozenset({"bfloat16"})
_FP8 = _BF16 | {"float8_e4m3fn", "float8_e5m2"}

CAPABILITIES = by_name(
    _capability("sm_70", "NVIDIA Volta (7.0)", frozenset(), ("float16",), reduced={}),
    _capability("sm_75", "NVIDIA Turing (7.5)", frozenset(), ("float16",), reduced={}),
    _capability("sm_80", "NVIDIA Ampere (8.0)", _BF16, ("bfloat16", "float16")),
    _capability("sm_86", "NVIDIA Ampere (8.6)", _BF16, ("bfloat16", "float16")),
    _capability("sm_87", "NVIDIA Ampere Orin (8.7)", _BF16, ("bfloat16", "float16")),
    _capability("sm_89", "NVIDIA Ada (8.9)", _FP8, ("bfloat16", "float16")),
    _capability("sm_90", "NVIDIA Hopper (9.0)", _FP8, ("bfloat16", "float16")),
    _capability("sm_100", "NVIDIA Blackwell (10.0)", _FP8, ("bfloat16", "float16")),
    _capability("sm_103", "NVIDIA Blackwell Ultra (10.3)", _FP8, ("bfloat16", "float16")),
    _capability("sm_120", "NVIDIA RTX Blackwell (12.0)", _FP8, ("bfloat16", "float16")),
    _capability("gfx90a", "AMD CDNA 2", _BF16, ("bfloat16", "float16"), _CDNA, reduced={}),
    # CDNA 3 has the fnuz variants of float8 instead of the OCP ones.
    _capability("gfx942", "AMD CDNA 3", _BF16 | {"float8_e4m3fnuz", "float8_e5m2fnuz"}, ("bfloat16", "float16"), _CDNA),
    _capability("gfx950", "AMD CDNA 4", _FP8, ("bfloat16", "float16"), _CDNA),
)

_GIB, _TERA = 2**30, 1e12


def _product(
    name: str, title: str, capability: str, gibibytes: int, gigabytes_per_second: float, source: str, **teraflops: float
) -> Generation:
    return replace(
        CAPABILITIES[capability],
        name=name,
        title=title,
        memory=gibibytes * _GIB,
        bandwidth=gigabytes_per_second * 1e9,
        peak={mode: value * _TERA for mode, value in teraflops.items()},
        source=f"{source}; dtypes: {CAPABILITIES[capability].source}",
    )


PRODUCTS = by_name(
    _product("V100", "NVIDIA V100 SXM2", "sm_70", 32, 900, "V100 data sheet", float32=15.7, float16=125),
    _product("T4", "NVIDIA T4", "sm_75", 16, 320, "T4 data sheet", float32=8.1, float16=65, int8=130),
    _product(
        "A100-40GB",
        "NVIDIA A100 40 GB",
        "sm_80",
        40,
        1555,
        "A100 data sheet",
        float32=19.5,
        tf32=156,
        bfloat16=312,
        float16=312,
        int8=624,
    ),
    _product(
        "A100",
        "NVIDIA A100 80 GB",
        "sm_80",
        80,
        2039,
        "A100 data sheet (SXM form)",
        float32=19.5,
        tf32=156,
        bfloat16=312,
        float16=312,
        int8=624,
    ),
    _product(
        "A10", "NVIDIA A10", "sm_86", 24, 600, "A10 data sheet", float32=31.2, tf32=62.5, bfloat16=125, float16=125, int8=250
    ),
    _product(
        "L40S",
        "NVIDIA L40S",
        "sm_89",
        48,
        864,
        "L40S data sheet",
        float32=91.6,
        tf32=183,
        bfloat16=362.05,
        float16=362.05,
        float8_e4m3fn=733,
    ),
    _product(
        "L4",
        "NVIDIA L4",
        "sm_89",
        24,
        300,
        "L4 data sheet, halved from the sparse figures",
        float32=30.3,
        tf32=60,
        bfloat16=121,
        float16=121,
        float8_e4m3fn=242.5,
    ),
    _product(
        "H200",
        "NVIDIA H200 SXM",
        "sm_90",
        141,
        4800,
        "H200 data sheet, halved from the sparse figures",
        float32=67,
        tf32=494.5,
        bfloat16=989.5,
        float16=989.5,
        float8_e4m3fn=1979,
    ),
    _product(
        "H100",
        "NVIDIA H100 SXM",
        "sm_90",
        80,
        3350,
        "H100 data sheet (SXM form), halved from the sparse figures",
        float32=67,
        tf32=494.5,
        bfloat16=989.5,
        float16=989.5,
        float8_e4m3fn=1979,
    ),
    _product(
        "B200",
        "NVIDIA B200",
        "sm_100",
        180,
        8000,
        "HGX B200 data sheet, per GPU, halved from the sparse figures",
        float32=75,
        tf32=1100,
        bfloat16=2250,
        float16=2250,
        float8_e4m3fn=4500,
    ),
    _product(
        "MI250X",
        "AMD Instinct MI250X (one of its two dies)",
        "gfx90a",
        64,
        1638.4,
        "MI250X data sheet, halved: PyTorch sees each die as a device",
        float32=47.85,
        bfloat16=191.5,
        float16=191.5,
    ),
    _product(
        "MI300X",
        "AMD Instinct MI300X",
        "gfx942",
        192,
        5300,
        "MI300X data sheet",
        float32=163.4,
        tf32=653.7,
        bfloat16=1307.4,
        float16=1307.4,
        float8_e4m3fnuz=2614.9,
    ),
    _product(
        "MI355X",
        "AMD Instinct MI355X",
        "gfx950",
        288,
        8000,
        "MI355X data sheet",
        float32=157.3,
        bfloat16=2516.6,
        float16=2516.6,
        float8_e4m3fn=5033.2,
    ),
)

# What the driver calls each product. Sister products with other memory or clocks (H100 PCIe and NVL, A10G, L40, GH200) must not
# match: they get the figures of their capability only.
_NAMES = {name: re.compile(rf"\b{name}\b") for name in PRODUCTS} | {
    "A100-40GB": re.compile(r"\bA100\b.*40GB"),
    "A100": re.compile(r"\bA100\b.*80GB"),
    "H100": re.compile(r"\bH100 80GB HBM3$"),
    "H200": re.compile(r"\bH200$"),
}


def product_of(device_name: str) -> Generation | None:
    """The product whose figures hold for a device of this name (``torch.cuda.get_device_name``), None if it is not listed."""
    return next((PRODUCTS[name] for name, pattern in _NAMES.items() if pattern.search(device_name)), None)


GENERATIONS: Mapping[str, Generation] = {**CAPABILITIES, **PRODUCTS}

# torch.optim documentation: `fused` is the recommended implementation on CUDA for the classes that have it.
_FUSED = OptimizerSpec({"fused": True}, "one kernel over all parameters (torch.optim documentation: fastest on CUDA)")

SPEC = BackendSpec(
    name="cuda",
    aliases=("gpu", "nvidia", "rocm", "hip", "amd"),
    vendor="NVIDIA or AMD",
    device_type="cuda",
    generations=GENERATIONS,
    compile=CompileSpec("inductor", "TorchInductor generates Triton kernels", requires="triton"),
    process_group="nccl",
    optimizers=dict.fromkeys(("Adam", "AdamW", "SGD"), _FUSED),
    pin_memory=Choice(True, "copies from pinned memory run asynchronously to the host (PyTorch notes, 'CUDA semantics')"),
    # PyTorch notes, "Reproducibility": cuDNN's autotuner and cuBLAS' workspaces are what the switch itself does not cover.
    determinism=DeterminismSpec(
        environment={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        flags={"backends.cudnn.deterministic": True, "backends.cudnn.benchmark": False},
        note="cuBLAS reads its variable when its first handle is made",
    ),
    fallback=FallbackSpec(False, "an operator without a CUDA kernel raises NotImplementedError"),
    checked="against PyTorch's own torch.cuda module, whose Python surface is the same in every build; no GPU was at hand",
    install="a CUDA or ROCm build of PyTorch and the vendor's kernel driver",
    rng="Philox, one generator for each device; torch.manual_seed seeds them all",
    environment={
        "CUDA_VISIBLE_DEVICES": "which devices the process sees (HIP_VISIBLE_DEVICES on AMD)",
        "PYTORCH_CUDA_ALLOC_CONF": "options of the caching allocator, e.g. expandable_segments:True",
        "CUDA_LAUNCH_BLOCKING": "1 makes every kernel launch wait: for finding errors, never for timing",
        "CUBLAS_WORKSPACE_CONFIG": "needed for deterministic cuBLAS",
        "NVIDIA_TF32_OVERRIDE": "0 forbids TF32 in every library",
        "NCCL_DEBUG": "INFO shows what NCCL chose",
        "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues; 1 for tensor parallelism with overlap",
    },
    out_of_memory=("CUDA out of memory", "HIP out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    profiler_activities=("CPU", "CUDA"),
)
