"""What is declared of CPUs.

Sources: PyTorch 2.13 documentation (torch.cpu, torch.amp, torch.optim), ``aten/src/ATen/native/mkldnn`` for which
instruction sets give bfloat16 and float16 matrix products in hardware, and docs/performance.md for what was measured.
"""

from __future__ import annotations

from portable.spec import (
    BackendSpec,
    Choice,
    CompileSpec,
    DeterminismSpec,
    FallbackSpec,
    Generation,
    OptimizerSpec,
    PrecisionSpec,
    by_name,
)

# Every dtype of PyTorch stores and computes on a CPU; the sets below name those that training code meets.
_STORAGE = frozenset(
    {"float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"}
    | {"int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"}
)
_PLAIN = frozenset({"float64", "float32"})

_ONEDNN = "oneDNN developer guide, 'Data Types': which instruction sets have native bf16 and f16 dot products"

GENERATIONS = by_name(
    Generation(
        "amx",
        "x86-64 with AMX-BF16",
        _STORAGE,
        _PLAIN | {"bfloat16", "int8"},
        ("bfloat16",),
        f"{_ONEDNN}; Intel Architecture Instruction Set Extensions reference, chapter AMX (tile products of bf16 and int8)",
        reduced={"bf16": 8, "tf32": 11},
        assumed=("tf32 needs AMX-FP16 beside (torch: aten/native/mkldnn/Linear.cpp); without it float32 inputs stay whole",),
    ),
    Generation(
        "avx512_bf16",
        "x86-64 with AVX512-BF16",
        _STORAGE,
        _PLAIN | {"bfloat16"},
        ("bfloat16",),
        f"{_ONEDNN} (VDPBF16PS)",
        reduced={"bf16": 8},
    ),
    Generation(
        "avx512",
        "x86-64 with AVX-512",
        _STORAGE,
        _PLAIN,
        (),
        f"{_ONEDNN}: bf16 without AVX512-BF16 is converted in software",
        assumed=("oneDNN rounds no float32 input to bf16 here: it has nothing to multiply it with",),
    ),
    Generation(
        "avx2",
        "x86-64 with AVX2",
        _STORAGE,
        _PLAIN,
        (),
        f"{_ONEDNN}: no 16-bit dot products; benchmarks/precision.py measures bf16 against fp32",
    ),
    Generation(
        "arm_bf16",
        "Arm with BF16 instructions",
        _STORAGE,
        _PLAIN | {"bfloat16"},
        ("bfloat16",),
        "Arm Architecture Reference Manual, FEAT_BF16 (BFDOT, BFMMLA), used by oneDNN with Compute Library",
        reduced={"bf16": 8},
    ),
    Generation(
        "baseline",
        "CPU",
        _STORAGE,
        _PLAIN,
        (),
        "PyTorch's portable kernels",
    ),
)

# torch/optim: `fused` exists for these classes on CPU since 2.4 (torch.optim documentation, "fused" column);
# benchmarks/optimizers.py measures it against the for-loop implementation, which is the default on CPU.
_FUSED = OptimizerSpec({"fused": True}, "one kernel over all parameters; measured faster than the per-tensor loop on CPU")

SPEC = BackendSpec(
    name="cpu",
    vendor="CPU",
    device_type="cpu",
    priority=0,
    generations=GENERATIONS,
    compile=CompileSpec(
        backend="inductor",
        reason="TorchInductor generates C++ for the CPU",
        forbidden={"mode=reduce-overhead": "it means CUDA graphs, which a CPU does not have"},
    ),
    process_group="gloo",
    optimizers=dict.fromkeys(("Adam", "AdamW", "SGD", "Adagrad"), _FUSED),
    pin_memory=Choice(False, "tensors are already in host memory: pinning would only add a copy"),
    precision=PrecisionSpec(
        reasons={
            "amx": "AMX-BF16 present: tiles multiply bfloat16 and sum in float32; its range needs no loss scaling",
            "avx512_bf16": "AVX512-BF16 present: dot products of bfloat16 sum in float32; its range needs no loss scaling",
            "avx512": "AVX-512 without BF16: bfloat16 is converted in software, float32 is faster",
            "avx2": "AVX2 has no 16-bit dot products: bfloat16 measured 12 to 28 times slower (docs/performance.md)",
            "arm_bf16": "BF16 instructions present: BFMMLA multiplies bfloat16 and sums in float32; no loss scaling needed",
        }
    ),
    determinism=DeterminismSpec(
        note="CPU kernels repeat bit for bit at a fixed number of threads; a few scatter operators need the switch"
    ),
    fallback=FallbackSpec(False, "the CPU is where other backends fall back to"),
    checked="run by every test, on x86-64 with AVX2 (docs/performance.md names the machines)",
    install="nothing beyond PyTorch; a C++ compiler for pt.compile",
    rng="Mersenne Twister, one generator; torch.manual_seed seeds it",
    environment={
        "OMP_NUM_THREADS": "threads of one operator (torch.set_num_threads)",
        "ONEDNN_MAX_CPU_ISA": "caps the instruction set that oneDNN uses, e.g. AVX2",
        "TORCHINDUCTOR_CACHE_DIR": "where compiled C++ kernels are kept",
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16, TF32 ...: oneDNN may round float32 inputs; read when the process starts",
        "CXX": "the C++ compiler that TorchInductor calls",
    },
    # c10/core/impl/alloc_cpu.cpp: the allocator throws a plain RuntimeError with this text.
    out_of_memory=("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory"),
    profiler_activities=("CPU",),
)
