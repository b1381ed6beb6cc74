"""What is declared of Huawei Ascend.

Sources, by their short names in the table below:

``wheel``   the wheel torch-npu 2.13.0: its Python sources and the names compiled into its libraries
``docs``    Huawei's documentation of torch_npu and CANN (hiascend.com)
``keynote`` Huawei Connect 2025, the announcement of the 950 series
``third``   published by third parties only (system vendors, conference papers); no page of Huawei's states the figure

A 910C package has two dies, each of which PyTorch sees as a device (``third``).
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

_INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})
# wheel: torch.npu carries tensor types for float64 and the operators cast or fall back; complex tensors exist as storage.
_STORAGE = _INTEGERS | {"float64", "float32", "float16", "complex64", "complex128"}
_STORAGE_BF16 = _STORAGE | {"bfloat16"}
_CUBE_910A = frozenset({"float16", "int8"})
_CUBE_910B = frozenset({"float32", "float16", "bfloat16", "int8"})
_CUBE_950 = _CUBE_910B | {"float8_e4m3fn", "float8_e5m2"}
# CANN: ATC's --allow_hf32 ("mantissa precision (11 bits)", beside the implicit one), supported from the 910B on; float16 by
# ACL_PRECISION_MODE=allow_fp32_to_fp16 (op-plugin: CalcuOpUtil::GetCubeMathType).
_HF32 = {"hf32": 12, "fp16": 11}
_GIB, _TERA = 2**30, 1e12
_BOTH = ("bfloat16", "float16")


def _910b(name: str, gibibytes: int, terabytes: float, float16: float) -> Generation:
    return Generation(
        name,
        f"Huawei {name}",
        _STORAGE_BF16,
        _CUBE_910B,
        _BOTH,
        "dtypes: wheel (is_bf16_supported, get_amp_supported_dtype); memory, bandwidth and peaks: third",
        memory=gibibytes * _GIB,
        bandwidth=terabytes * 1e12,
        peak={"float16": float16 * _TERA, "bfloat16": float16 * _TERA, "float32": float16 / 4 * _TERA},
        reduced=_HF32,
        assumed=("float32 runs on the matrix unit at a quarter of the float16 rate",),
    )


GENERATIONS = by_name(
    Generation(
        "Ascend910A",
        "Huawei Ascend 910A",
        _STORAGE,
        _CUBE_910A,
        ("float16",),  # wheel: get_amp_supported_dtype leaves bfloat16 out where is_bf16_supported says no
        "dtypes: wheel; peak 256 TFLOPS float16 and 32 GB HBM at 1.2 TB/s: Huawei's 2019 announcement of the Ascend 910",
        memory=32 * _GIB,
        bandwidth=1.2e12,
        peak={"float16": 256 * _TERA, "int8": 512 * _TERA},
        # CANN: aclnnMm, cubeMathType: float32 as it is "is not supported" on this series; it becomes float16.
        reduced={"fp16": 11},
    ),
    _910b("Ascend910B1", 64, 1.6, 414),
    _910b("Ascend910B2", 64, 1.6, 376),
    _910b("Ascend910B3", 64, 1.6, 313),
    _910b("Ascend910B4", 32, 0.8, 280),
    _910b("Ascend910C", 64, 1.6, 376),
    Generation(
        "Ascend950PR",
        "Huawei Ascend 950PR",
        _STORAGE_BF16 | {"float8_e4m3fn", "float8_e5m2"},
        _CUBE_950,
        _BOTH,
        "keynote: 128 GB at 1.6 TB/s, 1 PFLOPS in FP8 formats; dtypes: wheel and docs",
        memory=128 * _GIB,
        bandwidth=1.6e12,
        peak={"float8_e4m3fn": 1000 * _TERA, "float16": 500 * _TERA, "bfloat16": 500 * _TERA},
        reduced=_HF32,
        assumed=("16-bit types at half of the FP8 rate",),
    ),
    Generation(
        "Ascend950DT",
        "Huawei Ascend 950DT",
        _STORAGE_BF16 | {"float8_e4m3fn", "float8_e5m2"},
        _CUBE_950,
        _BOTH,
        "keynote: 144 GB at 4 TB/s, 1 PFLOPS in FP8 formats; dtypes: wheel and docs",
        memory=144 * _GIB,
        bandwidth=4e12,
        peak={"float8_e4m3fn": 1000 * _TERA, "float16": 500 * _TERA, "bfloat16": 500 * _TERA},
        reduced=_HF32,
        assumed=("16-bit types at half of the FP8 rate",),
    ),
)

# Prefix of the SoC name that torch.npu.get_device_name answers (wheel: the names known to libtorch_npu.so) to the generation.
# The first match decides, so longer prefixes stand first. The 910C carries the SoC names Ascend910_93xx.
_SOC_PREFIXES = (
    ("Ascend910B1", "Ascend910B1"),
    ("Ascend910B2", "Ascend910B2"),
    ("Ascend910B3", "Ascend910B3"),
    ("Ascend910B4", "Ascend910B4"),
    ("Ascend910_93", "Ascend910C"),
    ("Ascend910C", "Ascend910C"),
    ("Ascend950PR", "Ascend950PR"),
    ("Ascend950DT", "Ascend950DT"),
    ("Ascend910PremiumA", "Ascend910A"),
    ("Ascend910Pro", "Ascend910A"),
    ("Ascend910A", "Ascend910A"),
    # "Ascend910B" without a digit is a first-series part too (wheel: it sorts below Ascend910B1 in every SoC comparison).
    ("Ascend910B", "Ascend910A"),
)


def generation_of(soc: str) -> Generation | None:
    """The generation of an SoC name such as "Ascend910B2" or "Ascend910_9391"; None for inference parts and unknown names."""
    return next((GENERATIONS[name] for prefix, name in _SOC_PREFIXES if soc.startswith(prefix)), None)


SPEC = BackendSpec(
    name="ascend",
    aliases=("npu", "huawei"),
    vendor="Huawei Ascend",
    device_type="npu",
    package="torch-npu (the release of torch)",
    generations=GENERATIONS,
    compile=CompileSpec(
        "npu",
        "Dynamo's graph goes through TorchAir, which the wheel carries, to CANN's graph engine (wheel: torch_dynamo_backends)",
        kwargs={"dynamic": False},
        forbidden={
            "mode": "torch.compile's modes are options of Inductor; TorchAir takes a CompilerConfig instead (docs: TorchAir)",
            "dynamic": "TorchAir compiles static shapes best and recompiles for each new one: pad or bucket the inputs",
            "options": "TorchAir takes a CompilerConfig (torch_npu.dynamo.torchair) instead of Inductor's options",
        },
    ),
    process_group="hccl",
    optimizers={
        # wheel: op_api implementations _fused_adamw_ and _fused_sgd_ exist; for _fused_adam_ the library also carries the text
        # of a fallback to the CPU, so Adam keeps the foreach implementation, for which the wheel has the kernels.
        "AdamW": OptimizerSpec({"fused": True}, "the library has a fused kernel (aclnnApplyAdamWV2)"),
        "SGD": OptimizerSpec({"fused": True}, "the library has a fused kernel"),
        "Adam": OptimizerSpec({"foreach": True}, "the fused kernel falls back to the CPU in some cases; foreach does not"),
    },
    pin_memory=Choice(True, "copies from pinned memory run asynchronously (docs: torch_npu's host allocator)"),
    precision=PrecisionSpec(
        scaling={
            "Ascend910A": "an overflow saturates instead of giving inf: pt.GradScaler is torch_npu's own here, which reads the "
            "device's overflow flag and tells the other processes"
        },
        reasons={"Ascend910A": "Ascend 910A has no bfloat16: float16, with loss scaling"},
    ),
    # docs: deterministic computing; HCCL reads its variable when a communicator is made.
    determinism=DeterminismSpec(
        environment={"HCCL_DETERMINISTIC": "true"},
        note="torch.use_deterministic_algorithms reaches CANN's kernels; HCCL's reductions need the variable",
    ),
    fallback=FallbackSpec(
        True,
        "an operator without an NPU kernel runs on the CPU after a warning that is shown once",
        forbid={"TORCH_NPU_FALLBACK_CPU_DISABLE": "1"},
        # wheel: text in libtorch_npu.so. It is printed by the C++ side, as a Python warning.
        warning=r"The operator '(?P<op>[^']+)' is not currently supported on the NPU backend and will fall back",
    ),
    checked=(
        "against the sources and libraries of the vendor's wheel torch-npu 2.13.0 and Huawei's documentation; nothing has run "
        "on an Ascend device"
    ),
    install=(
        "driver and firmware, CANN toolkit and kernels from Huawei, `source set_env.sh`, PyTorch's CPU build, and the "
        "torch-npu of exactly torch's release (`pip install 'portable[ascend]'`)"
    ),
    rng="Philox, one generator for each device; torch.manual_seed seeds them all",
    environment={
        "ASCEND_RT_VISIBLE_DEVICES": "which devices the process sees",
        "ASCEND_HOME_PATH": "CANN's folder; set by its set_env.sh",
        "PYTORCH_NPU_ALLOC_CONF": "options of the caching allocator, e.g. expandable_segments:True",
        "TASK_QUEUE_ENABLE": "0 to 2: how far the launch queue is pipelined; 0 for finding errors",
        "ASCEND_LAUNCH_BLOCKING": "1 makes every kernel launch wait: for finding errors, never for timing",
        "TORCH_NPU_FALLBACK_CPU_DISABLE": "1: an operator without an NPU kernel raises",
        "TORCH_NPU_DEVICE_CAPABILITY": "what torch.npu.get_device_capability answers",
        "HCCL_DETERMINISTIC": "true: reductions across devices repeat bit for bit",
        "INF_NAN_MODE_ENABLE": "1: overflow gives inf and nan as IEEE 754 says (default from 910B on)",
    },
    out_of_memory=("NPU out of memory",),
    profiler_activities=("CPU", "PrivateUse1"),
)
