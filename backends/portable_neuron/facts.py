"""What is declared of AWS Trainium.

Sources, by their short names in the table below:

``arch``      AWS Neuron documentation, "Trainium2 Architecture", "Trainium3 Architecture", "NeuronCore-v3/v4", "Logical
              NeuronCore configuration"
``types``     AWS Neuron documentation, "Data types" (about-neuron/arch/neuron-features/data-types)
``torch``     AWS Neuron documentation, "PyTorch on Neuron" (native), its guides and reference, Neuron 2.33
``drop``      public pre-release sources of torch_neuronx, older than 2.13: an ancestor's behaviour, to be checked on 2.33
``compiler``  AWS Neuron documentation, neuronx-cc API reference
``measured``  published measurements of third parties with a 2.12 beta, 2026

A PyTorch device is one *logical* NeuronCore: two physical cores with the default LNC=2, four logical cores a chip (``arch``).
"""

from __future__ import annotations

from portable.spec import (
    Advice,
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

# types: native float32, tf32, bfloat16, float16, float8 variants and integers to 32 bits. float64 and int64 tensors exist,
# but their arithmetic runs in 32 bits (drop), so they are stored and not multiplied. complex has no positive evidence.
_STORAGE = frozenset(
    {"float64", "float32", "bfloat16", "float16", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8", "bool"}
)
_MATMUL = frozenset({"float32", "bfloat16", "float16", "float8_e5m2"})
_GIB, _TERA = 2**30, 1e12
# Both dtypes have the same peak; bfloat16 needs no loss scaling and is what AWS's own examples use (types, torch).
_AUTOCAST = ("bfloat16", "float16")
_CASTS = {"bf16": 8, "fp16": 11, "tf32": 11, "fp8_e4m3": 4}  # compiler: --auto-cast-type
_ASSUMED = (
    "int64 arithmetic is truncated to 32 bits: whether torch-neuronx sets the compiler's switch for native int64 is unknown",
    "complex dtypes are unsupported: no document or test shows one on the device",
)

GENERATIONS = by_name(
    Generation(
        "trn1",
        "AWS Trainium1 (NeuronCore-v2)",
        _STORAGE - {"float8_e5m2"},
        _MATMUL - {"float8_e5m2"},
        _AUTOCAST,
        "arch: 2 cores and 32 GiB a chip; the native package does not support it (torch: Trn2 and Trn3 only)",
        memory=16 * _GIB,
        bandwidth=0.41e12,
        peak={"float32": 23.75 * _TERA, "bfloat16": 95 * _TERA, "float16": 95 * _TERA},
        reduced=_CASTS,
        assumed=("bandwidth: half of the chip's 820 GB/s",),
    ),
    Generation(
        "trn2",
        "AWS Trainium2 (logical NeuronCore-v3, LNC=2)",
        _STORAGE,
        _MATMUL,
        _AUTOCAST,
        "arch: a quarter of the chip: 96 GiB, 2.9 TB/s, 667 TFLOPS bf16, 181 TFLOPS fp32, 1299 TFLOPS fp8",
        memory=24 * _GIB,
        bandwidth=0.725e12,
        peak={
            "float32": 45.25 * _TERA,
            "tf32": 166.75 * _TERA,
            "bfloat16": 166.75 * _TERA,
            "float16": 166.75 * _TERA,
            "float8_e5m2": 324.75 * _TERA,
        },
        reduced=_CASTS,
        assumed=_ASSUMED,
    ),
    Generation(
        "trn3",
        "AWS Trainium3 (logical NeuronCore-v4, LNC=2)",
        _STORAGE | {"float8_e4m3fn"},
        _MATMUL | {"float8_e4m3fn"},
        _AUTOCAST,
        "arch: a quarter of the chip: 144 GiB, 4.9 TB/s, 671 TFLOPS bf16, 183 TFLOPS fp32, 2517 TFLOPS MX fp8",
        memory=36 * _GIB,
        bandwidth=1.225e12,
        peak={
            "float32": 45.75 * _TERA,
            "tf32": 167.75 * _TERA,
            "bfloat16": 167.75 * _TERA,
            "float16": 167.75 * _TERA,
            "float8_e4m3fn": 629.25 * _TERA,
        },
        reduced=_CASTS,
        assumed=(*_ASSUMED, "a logical core has a quarter of the chip, as on Trainium2"),
    ),
)

SPEC = BackendSpec(
    name="neuron",
    aliases=("trainium", "trn"),
    vendor="AWS Trainium",
    device_type="neuron",
    package="'torch-neuronx>=2.13' from AWS's own package index (docs/backends.md, Trainium)",
    generations=GENERATIONS,
    compile=CompileSpec(
        "neuron",
        "Dynamo's graph goes through StableHLO to neuronx-cc (torch: compile reference)",
        # torch: dynamic=True is rejected; Dynamo's automatic dynamic shapes produce graphs that the compiler refuses.
        kwargs={"dynamic": False},
        forbidden={
            "mode": "the neuron backend ignores every mode with a warning (torch: compile reference)",
            "dynamic": "the compiler needs static shapes (NCC_EMOD025): pad or bucket the inputs",
            "options": "only model_name is known, and it is not documented",
        },
    ),
    process_group="neuron",
    # Whether "cpu:gloo,neuron:neuron" works on the native package is not documented; a gloo group of its own always does.
    composite_group=False,
    optimizers={
        # drop: _fused_adamw_ is the only fused optimizer kernel; it asserts that no loss scaler is in use, which holds for the
        # bfloat16 policy. Foreach kernels exist for add and mul only, so the other optimizers take the plain loop.
        "AdamW": OptimizerSpec({"fused": True}, "the one fused kernel of the package; valid without loss scaling"),
        **{
            name: OptimizerSpec({"foreach": False}, "most foreach operators have no kernel, and become their parts")
            for name in ("Adam", "SGD", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adadelta", "ASGD")
        },
    },
    precision=PrecisionSpec(
        parameters=Advice(
            "float32",
            "master weights: bfloat16 parameters without them trained 3.3 times slower and drifted (measured on a 2.12 beta)",
        ),
        scaling={"": "the fused AdamW refuses a loss scaler (drop): with float16, give AdamW fused=False"},
    ),
    # drop: is_pinned() answers True for every pointer, and no document or test shows pinning in a DataLoader.
    pin_memory=Choice(False, "no evidence that pinning helps; is_pinned() is not reliable there"),
    determinism=DeterminismSpec(note="the switch fixes the order of execution and turns adaptive fusion off (torch: FAQ)"),
    fallback=FallbackSpec(
        True,
        "operators without a kernel run on the CPU silently; an operator whose kernel fails raises only with the variable set",
        # torch: env-vars. It does not forbid the fallback of operators that have no implementation at all.
        forbid={"TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1"},
    ),
    checked=(
        "against AWS's documentation and public pre-release sources; the released package could not be had, nothing has run "
        "on a Trainium device"
    ),
    install=(
        "a Trn2 or Trn3 instance, AWS's kernel driver (aws-neuronx-dkms) and runtime, then torch-neuronx >= 2.13 with the "
        "torch of its series, from AWS's own package index (its page 'Install PyTorch Neuron' names it), in an environment of "
        "its own. PyPI has only a placeholder (1.0) under that name, and versions before 2.10 are the PyTorch/XLA package"
    ),
    rng="Philox of 16 bytes; torch.manual_seed seeds it. In the pre-release torch.randn on the device drew from the CPU (drop)",
    environment={
        "NEURON_RT_VISIBLE_CORES": "which cores the process sees; set but empty hides them all",
        "NEURON_LOGICAL_NC_CONFIG": "physical cores in a logical one, 1 or 2; must match the compiler's -lnc",
        "TORCH_NEURONX_FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS": "1: an operator whose kernel fails raises",
        "TORCH_NEURONX_ENABLE_NKI_SDPA": "0 turns the flash attention kernel off (several times slower)",
        "TORCH_NEURONX_NEFF_CACHE_DIR": "where compiled kernels are kept",
        "TORCH_NEURONX_LOG_LEVEL": "3 logs every fallback",
        "NEURON_LAUNCH_BLOCKING": "1 makes every launch wait: for finding errors, never for timing",
        "NEURON_CC_FLAGS": "flags of neuronx-cc, e.g. --auto-cast",
    },
    out_of_memory=("NCC_EOOM001", "NCC_EOOM002", "NRT_RESOURCE"),
    profiler_activities=("CPU", "PrivateUse1"),
)
