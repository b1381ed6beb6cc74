"""What a backend declares about itself, as data.

Nothing here imports torch: dtypes are named by strings ("bfloat16"), so that a table can be read, printed and checked on a
machine that has neither the vendor's package nor the device. Units: bytes, bytes per second, floating-point operations
per second (dense, without sparsity). Every declared figure names its source in ``source`` or in a comment beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Execution = Literal["hardware", "vendor-package-on-host", "emulated"]


@dataclass(frozen=True)
class Generation:
    """One generation of a vendor's devices.

    Attributes:
        name: short key used on the command line ("sm_80", "Ascend910B2", "trn2", "avx2").
        title: what people call it ("NVIDIA A100").
        storage: dtypes that tensors may have on the device.
        matmul: dtypes its matrix units multiply natively.
        autocast: dtypes fit for automatic mixed precision, best first; empty if float32 is the best choice.
        memory: bytes of device memory that one PyTorch device sees; None where it varies (a CPU).
        bandwidth: bytes per second between that memory and the compute units; None if not published.
        peak: dtype (or mode such as "tf32") to dense FLOP/s of one PyTorch device.
        reduced: formats that its matrix units can round float32 inputs to when a switch allows it ("tf32"), with the mantissa
            bits that remain, the implicit one counted (float32 has 24). Where ``matmul`` lacks float32 they always do.
        source: where the figures come from.
        assumed: facts that no vendor page states, each with the reason for the assumption.
    """

    name: str
    title: str
    storage: frozenset[str]
    matmul: frozenset[str]
    autocast: tuple[str, ...]
    source: str
    memory: int | None = None
    bandwidth: float | None = None
    peak: Mapping[str, float] = field(default_factory=dict)
    reduced: Mapping[str, int] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """A yes or no with its reason, so that no choice is silent."""

    value: bool
    reason: str


@dataclass(frozen=True)
class Advice:
    """A dtype with the reason for it."""

    dtype: str
    reason: str


@dataclass(frozen=True)
class PrecisionSpec:
    """The dtypes of mixed-precision training beside autocast's, and what to say of single generations.

    The defaults are those of Micikevicius et al., "Mixed Precision Training" (ICLR 2018), sections 3.1 and 3.3.

    Attributes:
        parameters: dtype that parameters are kept in.
        reduction: dtype that gradients are summed in across processes.
        optimizer: dtype of the optimizer's state.
        scaling: generation to what to know of loss scaling there, "" for all of the backend.
        reasons: generation to why its autocast dtype is right, where more is known than its table of dtypes says.
    """

    parameters: Advice = Advice(
        "float32", "master weights: an update below 2^-9 of a bfloat16 weight (2^-12 in float16) would be rounded away"
    )
    reduction: Advice = Advice(
        "float32",
        "gradients of float32 parameters are float32; a sum in 16 bits over many processes loses bits, or overflows",
    )
    optimizer: Advice = Advice("float32", "squares of gradients leave float16's range and need more than bfloat16's 8 bits")
    scaling: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CompileSpec:
    """How `torch.compile` is to be called on a backend.

    Attributes:
        backend: name of the Dynamo backend, None where models stay in eager mode.
        kwargs: arguments that are always passed (``dynamic=False`` where shapes must be static).
        forbidden: argument of `torch.compile` (``mode``, ``dynamic`` ...) to the reason why it is dropped here.
        requires: module that must be importable for the backend to work, None if it needs nothing more.
        reason: why this choice.
    """

    backend: str | None
    reason: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    forbidden: Mapping[str, str] = field(default_factory=dict)
    requires: str | None = None


@dataclass(frozen=True)
class OptimizerSpec:
    """Constructor options of one `torch.optim` class that are correct and not slower on a backend."""

    options: Mapping[str, Any]
    reason: str


@dataclass(frozen=True)
class DeterminismSpec:
    """What makes runs repeat bit for bit, beyond ``torch.use_deterministic_algorithms``.

    Attributes:
        environment: variables that must be set, with their values, before the device is first used.
        flags: dotted attribute under ``torch`` to the value that it gets while determinism is on.
        note: what remains nondeterministic, or what a run costs.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class FallbackSpec:
    """How operators without a device kernel end up on the CPU, and how to see or forbid it.

    Attributes:
        happens: whether the backend falls back silently at all.
        forbid: environment variables and values that turn a fallback into an error; empty if none exists.
        warning: regular expression of the warning that announces a fallback, its group ``op`` naming the operator.
        note: the vendor's rule in words.
    """

    happens: bool
    note: str
    forbid: Mapping[str, str] = field(default_factory=dict)
    warning: str | None = None


@dataclass(frozen=True)
class BackendSpec:
    """Everything a backend declares. See `portable.backend.Backend` for the behaviour that goes with it.

    Attributes:
        name: the backend's name in `portable` ("ascend").
        aliases: other names users write for it ("npu").
        vendor: who makes the device.
        device_type: PyTorch's device type ("npu").
        priority: which backend `pt.device()` prefers when several are available; CPU has 0, accelerators 100.
        package: what to install, in the form pip understands, None if PyTorch itself suffices.
        generations: known generations, by name.
        compile: how to call torch.compile.
        process_group: name of the torch.distributed backend.
        composite_group: whether it can be joined with gloo, so that collectives on CPU tensors work in the same group.
        optimizers: class name in torch.optim to its options; a missing class gets PyTorch's defaults.
        pin_memory: whether pinned host memory speeds copies up.
        determinism, fallback, precision: see their classes.
        checked: how the facts and the code were checked: on hardware, with the vendor's package, from documents.
        install: how a user gets the vendor's software, in words.
        rng: what the device generator is and how it relates to the CPU's.
        environment: environment variables that matter, with one line each.
        out_of_memory: substrings of messages by which the backend reports exhausted memory, beyond torch.OutOfMemoryError.
        profiler_activities: names in torch.profiler.ProfilerActivity to record.
    """

    name: str
    vendor: str
    device_type: str
    compile: CompileSpec
    process_group: str
    pin_memory: Choice
    fallback: FallbackSpec
    rng: str
    checked: str = "not stated by the plugin"
    install: str = "see the vendor's documentation"
    priority: int = 100
    aliases: tuple[str, ...] = ()
    package: str | None = None
    composite_group: bool = True
    generations: Mapping[str, Generation] = field(default_factory=dict)
    optimizers: Mapping[str, OptimizerSpec] = field(default_factory=dict)
    determinism: DeterminismSpec = field(default_factory=DeterminismSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    environment: Mapping[str, str] = field(default_factory=dict)
    out_of_memory: tuple[str, ...] = ()
    profiler_activities: tuple[str, ...] = ("CPU",)


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here, and if not, why, and what to do about it.

    Attributes:
        available: True if at least one device can be used.
        reason: what was found, in words, whether available or not.
        next_step: what to do when not available.
        device_count: number of devices found.
        execution: what the numbers would come from; anything but real hardware must say so.
    """

    available: bool
    reason: str
    next_step: str = ""
    device_count: int = 0
    execution: Execution = "hardware"


def by_name(*generations: Generation) -> dict[str, Generation]:
    """Key generations by their name.

    Raises:
        ValueError: two generations share a name.
    """
    table = {generation.name: generation for generation in generations}
    if len(table) != len(generations):
        raise ValueError(f"generation names must be unique, got {[g.name for g in generations]}")
    return table
