"""What an emulated device is told about the real one, as data.

A `Profile` is a table of rules. Each says where it comes from, or that it is assumed and why: `Profile.rows` lists them, and
the table in docs/emulated-device.md is made from it. A vendor's package holds its profile; nothing here knows a vendor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch

from portable.rehearsal.kernels import KernelTable

T = TypeVar("T")


@dataclass(frozen=True)
class Rule(Generic[T]):
    """One rule and its standing.

    Attributes:
        value: what the emulated device follows.
        text: the rule in words, for people.
        source: who states it, "" if nobody does.
        assumed: why the rule was chosen where no source states it for the emulated version, "" if one does.
    """

    value: T
    text: str
    source: str = ""
    assumed: str = ""

    def __post_init__(self) -> None:
        if not (self.source or self.assumed):
            raise ValueError(f"the rule {self.text!r} has no source: name one, or say in `assumed` why the rule was chosen")


@dataclass(frozen=True)
class AttentionCall:
    """One call of ``scaled_dot_product_attention``: q (batch, heads, Lq, D), k (batch, kv heads, Lk, D), v (..., Lk, Dv)."""

    query: torch.Size
    key: torch.Size
    value: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    mask: torch.dtype | None
    dropout: float
    causal: bool

    @property
    def scores(self) -> int:
        """Bytes of the matrix of attention scores, which a path without a flash kernel holds in memory."""
        batch = self.query[:-2].numel()
        return batch * self.query[-2] * self.key[-2] * self.dtypes[0].itemsize


@dataclass(frozen=True)
class AttentionRule:
    """Which path a call takes.

    Attributes:
        fused: name of the path with a flash kernel.
        plain: name of the path taken, silently, by every other call; it holds all scores in memory.
        why_not: reasons why a call does not get the fused path; empty if it does.
        hazards: warnings about a call whatever its path, each about results that may be wrong.
    """

    fused: str
    plain: str
    why_not: Callable[[AttentionCall], list[str]]
    hazards: Callable[[AttentionCall], list[str]]


@dataclass(frozen=True)
class Refusals:
    """What the device refuses with an error.

    Attributes:
        dtypes: dtypes that no tensor on the device may have.
        out: dtypes that ``out=`` may not have unless an input has them too.
        scaler_with_fused: the fused optimizer refuses ``grad_scale`` and ``found_inf`` (a loss scaler).
    """

    dtypes: frozenset[torch.dtype]
    out: frozenset[torch.dtype]
    scaler_with_fused: bool = False


@dataclass(frozen=True)
class CollectiveRule:
    """The process group of the device.

    Attributes:
        name: backend name for ``init_process_group``.
        integer_bits: integers of more bits than this lose their low bits in a sum; None: integers are exact.
        sum_broadcast: a broadcast is a sum of which all but the root contribute zero, so ``integer_bits`` holds for it too.
        refused: operation name to the reason why it is not implemented.
        even_splits: all_to_all accepts equal splits only.
        barrier_default_group_only: a barrier needs the default group.
    """

    name: str
    integer_bits: int | None
    sum_broadcast: bool
    refused: Mapping[str, str]
    even_splits: bool
    barrier_default_group_only: bool


@dataclass(frozen=True)
class CompileRule:
    """torch.compile.

    Attributes:
        backend: Dynamo backend name that the device registers.
        ignored_modes: whether every mode but the default is ignored with a warning.
        options: known keys of ``options``.
        dynamic: whether graphs with sizes that are not fixed are taken.
    """

    backend: str
    ignored_modes: bool
    options: tuple[str, ...]
    dynamic: bool = False


@dataclass(frozen=True)
class Profile:
    """Everything the emulated device follows. Each field but the first two is a `Rule`.

    Attributes:
        device_type: PyTorch's device type; takes the process's PrivateUse1 slot.
        title: what people call the emulated device.
        family: what ``get_device_properties().name`` says.
        memory: bytes of memory of one device.
        device_count: how many devices a process sees.
        rounding: bytes to which an allocation is rounded up, for sizes below the limit given: (granule, limit).
        computes_in: dtype that a tensor is labelled with to the dtype its arithmetic runs in.
        tuple_label: dtype to the dtype which the outputs of operators with several outputs get instead.
        refusals: see `Refusals`.
        integer_matmul_bits: integer matrix products are exact to this many bits, None if they are exact.
        matmul_dtype: dtype to which float32 inputs of a matrix product are rounded, None for true float32.
        autocast_dtype: dtype of ``torch.autocast(device_type)`` without one.
        autocast_dtypes: what ``get_amp_supported_dtype`` answers.
        attention: see `AttentionRule`.
        kernels: which operators have a kernel; the others run on the CPU.
        compile_per_shape: whether each operator with new shapes, dtypes or non-float arguments costs a compilation.
        compile: see `CompileRule`.
        random: "cpu": random operators draw from the CPU's default generator; "own": from a generator of the device.
        keeps_parameters: ``Module.to`` changes parameters in place (shared weights stay shared) instead of replacing them.
        pinned: what ``Tensor.is_pinned`` answers for every CPU tensor, None to leave it to PyTorch.
        collectives: see `CollectiveRule`.
        surface: names that ``torch.<device_type>`` has; nothing else is offered.
    """

    device_type: str
    title: str
    family: Rule[str]
    memory: Rule[int]
    device_count: Rule[int]
    rounding: Rule[tuple[int, int]]
    computes_in: Rule[Mapping[torch.dtype, torch.dtype]]
    tuple_label: Rule[Mapping[torch.dtype, torch.dtype]]
    refusals: Rule[Refusals]
    integer_matmul_bits: Rule[int | None]
    matmul_dtype: Rule[torch.dtype | None]
    autocast_dtype: Rule[torch.dtype]
    autocast_dtypes: Rule[tuple[torch.dtype, ...]]
    attention: Rule[AttentionRule]
    kernels: Rule[KernelTable]
    compile_per_shape: Rule[bool]
    compile: Rule[CompileRule]
    random: Rule[Literal["cpu", "own"]]
    keeps_parameters: Rule[bool]
    pinned: Rule[bool | None]
    collectives: Rule[CollectiveRule]
    surface: Rule[tuple[str, ...]]

    def rows(self) -> Iterator[tuple[str, Rule[Any]]]:
        """(field name, rule) of every rule, in order."""
        for item in dataclasses.fields(self):
            rule = getattr(self, item.name)
            if isinstance(rule, Rule):
                yield item.name, rule

    def replace(self, **values: Any) -> Profile:
        """A copy with other values for some rules, each marked as chosen by the user (for "what if" runs and tests)."""
        rules = {
            name: dataclasses.replace(getattr(self, name), value=value, assumed="set by the user of this run")
            for name, value in values.items()
        }
        return dataclasses.replace(self, **rules)
