"""The result of a rehearsal, as data: what the JSON file holds, and what every view is made from.

Lines are counted from 1; 0 stands for the program as a whole. Files are relative to the folder where the command was started,
where possible. Sizes are bytes. Nothing here is a time on the device: a rehearsal has none.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from portable.provenance import NOTICE

SCHEMA = "portable.rehearsal/1"

Execution = Literal["emulated", "vendor-package-on-host"]
Severity = Literal["blocker", "wrong", "major", "minor", "info"]
Runs = Literal["yes", "no", "unknown"]
When = Literal["every step", "some steps", "start or end", "not known"]
EXECUTIONS: tuple[str, ...] = typing.get_args(Execution)
SEVERITIES: tuple[Severity, ...] = typing.get_args(Severity)  # the worst first


@dataclass(frozen=True)
class Finding:
    """One thing to know about one line.

    Attributes:
        rule: stable id ("REH-SYNC-ITEM"), a key of `portable.rehearse.rules.RULES`.
        severity: blocker (it would fail), wrong (a silently wrong result), major (slow at every step), minor, info.
        file, line, code: where, and the text of that line.
        backward: whether it happens in the backward pass that this line starts.
        count: how often, over all processes.
        when: in which optimizer steps.
        per_step: how often per optimizer step, from the second (compilations: the third) step on; None if not known.
        what: the operator, or what else is meant.
        detail: what was seen.
        cost: what it costs on that device, in words.
        fix: what to do.
    """

    rule: str
    severity: Severity
    file: str
    line: int
    code: str
    backward: bool
    count: int
    when: When
    per_step: float | None
    what: str
    detail: str
    cost: str
    fix: str


@dataclass(frozen=True)
class Verdict:
    """Whether the program would run on the device: "yes", "no", or "unknown" if it failed for a reason of its own."""

    runs: Runs
    reason: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """The exception that ended the program.

    Attributes:
        cause: "device" if the device (or what stands in for CUDA) refused something, "script" for the program's own, "emulator"
            if the emulated device lacks what the real one has.
        error: class name of the exception.
        message: its text.
        file, line, code: the program's line.
        rule: rule of the finding that belongs to it, "" for the program's own failures.
    """

    cause: Literal["device", "script", "emulator"]
    error: str
    message: str
    file: str
    line: int
    code: str
    rule: str = ""


@dataclass(frozen=True)
class Run:
    """What was run and how it ended.

    Attributes:
        target, arguments, module: the program.
        ended: what ended it.
        exit_code: the program's own, None while it runs or if a signal ended it.
        steps: optimizer steps that were seen; of several optimizers, the most that one of them made.
        asked_steps: after how many the program was to be stopped, None to run it to its end.
        strict: whether the first refusal stopped the program, as on the device.
        processes: how many processes used the device.
        rank, world_size: torchrun's.
        started: UTC, ISO 8601.
    """

    target: str
    arguments: tuple[str, ...]
    module: bool
    ended: Literal["still running", "the end", "the step limit", "an exception", "sys.exit", "os._exit", "a signal"]
    exit_code: int | None
    steps: int
    asked_steps: int | None
    strict: bool
    processes: int
    rank: int
    world_size: int
    started: str


@dataclass(frozen=True)
class Target:
    """What the program was rehearsed for: memory is that of one device as PyTorch sees it."""

    backend: str
    device_type: str
    generation: str
    title: str
    devices: int
    memory: int


@dataclass(frozen=True)
class Environment:
    """Machine, versions and command."""

    command: str
    python: str
    platform: str
    processor: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Memory:
    """Peak of the fullest device against its size; the line is the one that brought it (about) there, 0 if not known."""

    peak: int
    total: int
    share: float
    file: str
    line: int


@dataclass(frozen=True)
class Copies:
    """Copies between host and device in one direction ("to the device", "to the CPU")."""

    direction: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Operators:
    """Operator calls on the device; ``fallback_share`` of them have no kernel there and are computed by the CPU."""

    calls: int
    fallbacks: int
    fallback_share: float
    most_called: dict[str, int]


@dataclass(frozen=True)
class Place:
    """Counts of one line.

    Attributes:
        first: before the end of the first step (compilations: of the second).
        later: in the steps after that.
        after: after the last step.
        later_steps: in how many of the later steps.
    """

    what: str
    file: str
    line: int
    backward: bool
    count: int
    first: int
    later: int
    after: int
    later_steps: int
    when: When


@dataclass(frozen=True)
class AttentionPath:
    """Calls of scaled_dot_product_attention that took one path for the same reasons.

    Attributes:
        fused: whether the path has a flash kernel.
        path: the path on this device.
        reasons: why not the fused one.
    """

    path: str
    fused: bool
    reasons: tuple[str, ...]
    shapes: str
    file: str
    line: int
    count: int


@dataclass(frozen=True)
class Graphs:
    """A function compiled by torch.compile: its graphs, and how many of them were recompilations."""

    function: str
    graphs: int
    recompilations: int


@dataclass(frozen=True)
class DtypeRefused:
    """A dtype that the device does not have."""

    dtype: str
    file: str
    line: int
    count: int
    detail: str


@dataclass(frozen=True)
class Compat:
    """What stands in for CUDA did with one construct (`portable.compat.report.Entry`)."""

    kind: Literal["redirected", "changed", "no equivalent"]
    construct: str
    detail: str
    count: int
    file: str
    line: int


@dataclass(frozen=True)
class Precision:
    """`portable.precision_policy` of the device."""

    autocast: str | None
    scaler: bool
    reason: str


@dataclass(frozen=True)
class Assumption:
    """A rule of the emulated device that no document states, and why it was chosen."""

    rule: str
    text: str
    why: str


@dataclass(frozen=True)
class Result:
    """Everything that a rehearsal found out.

    Attributes:
        complete: False in the file that is kept while the program runs.
        execution: how the devices were made; "hardware" is refused, because nothing here was measured on any.

    Raises:
        ValueError: ``execution`` is not one of a rehearsal's.
    """

    execution: Execution
    complete: bool
    verdict: Verdict
    run: Run
    target: Target
    environment: Environment
    failure: Failure | None
    findings: tuple[Finding, ...]
    dtypes_refused: tuple[DtypeRefused, ...]
    operators: Operators
    fallbacks: tuple[Place, ...]
    compiles: tuple[Place, ...]
    syncs: tuple[Place, ...]
    copies: tuple[Copies, ...]
    memory: Memory
    attention: tuple[AttentionPath, ...]
    graphs: tuple[Graphs, ...]
    collectives: dict[str, int]
    precision: Precision
    compat: tuple[Compat, ...]
    assumptions: tuple[Assumption, ...]
    schema: str = SCHEMA
    notice: str = field(default=NOTICE)

    def __post_init__(self) -> None:
        if self.execution not in EXECUTIONS:
            raise ValueError(
                f"a rehearsal's result was given execution={self.execution!r}; it can only be {' or '.join(EXECUTIONS)}, "
                "because nothing in it comes from hardware"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain containers for JSON, the schema first."""
        values = dataclasses.asdict(self)
        return {"schema": values.pop("schema"), "notice": values.pop("notice"), **values}

    def worst(self) -> Severity | None:
        """The worst severity among the findings, None if there are none."""
        return min((f.severity for f in self.findings), key=SEVERITIES.index, default=None)
