"""The facts of one process, as plain data: they travel from child processes to the first one and add up there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from portable.rehearsal import Rehearsal
from portable.rehearse.steps import Spread, Steps

Key = tuple[str, str]  # (what, line)


@dataclass
class Observations:
    """What one process, or several together, did on the device. Keys and lines are `portable.rehearsal.Recorder`'s.

    Attributes:
        processes: how many processes used the device.
        steps: the most optimizer steps of one process.
        ops: operator to calls.
        compiles, syncs, fallbacks: (what, line) to its spread over the steps.
        findings: (kind, operator, line) to [count, detail].
        attention: (path, reasons, shapes, line) to its spread.
        copies: direction to [count, bytes].
        graphs: function to [graphs, recompilations].
        recompiles: function to the spread of its recompilations.
        collectives: operation to calls.
        peak, peak_line: bytes of memory, of the fullest device of one process; the line that brought it there.
    """

    processes: int = 0
    steps: int = 0
    ops: Counter[str] = field(default_factory=Counter)
    compiles: dict[Key, Spread] = field(default_factory=dict)
    syncs: dict[Key, Spread] = field(default_factory=dict)
    fallbacks: dict[Key, Spread] = field(default_factory=dict)
    findings: dict[tuple[str, str, str], list[Any]] = field(default_factory=dict)
    attention: dict[tuple[str, tuple[str, ...], str, str], Spread] = field(default_factory=dict)
    copies: dict[str, list[int]] = field(default_factory=dict)
    graphs: dict[str, list[int]] = field(default_factory=dict)
    recompiles: dict[str, Spread] = field(default_factory=dict)
    collectives: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    peak_line: str = ""


def observe(rehearsal: Rehearsal, steps: Steps) -> Observations:
    """What this process did so far."""
    recorder = rehearsal.recorder
    found = recorder.to_dict()
    count = steps.count
    return Observations(
        processes=1,
        steps=count,
        ops=Counter(found["ops"]),
        compiles=steps.compiles.now(count),
        syncs=steps.syncs.now(count),
        fallbacks=steps.fallbacks.now(count),
        findings={(item["kind"], item["op"], item["line"]): [item["count"], item["detail"]] for item in found["findings"]},
        attention=steps.attention.now(count),
        copies={name: [item["count"], item["bytes"]] for name, item in found["copies"].items()},
        graphs={item["function"]: [item["graphs"], item["recompilations"]] for item in found["graphs"]},
        recompiles=steps.recompiles.now(count),
        collectives=Counter(found["collectives"]),
        peak=int(found["peak_memory"] or 0),
        peak_line=found.get("peak_memory_line") or "",
    )


def _add_spreads(mine: dict[Any, Spread], other: Mapping[Any, Spread]) -> None:
    for key, spread in other.items():
        total = mine.setdefault(key, Spread())
        total.first += spread.first
        total.later += spread.later
        total.after += spread.after
        total.later_steps = max(total.later_steps, spread.later_steps)


def _add_lists(mine: dict[Any, list[int]], other: Mapping[Any, list[int]]) -> None:
    for key, values in other.items():
        before = mine.get(key, [0] * len(values))
        mine[key] = [a + b for a, b in zip(before, values, strict=True)]


def merged(parts: Iterable[Observations]) -> Observations:
    """Several processes together: counts add up; steps and the peak of memory are those of the process with the most."""
    total = Observations()
    for part in parts:
        total.processes += part.processes
        total.steps = max(total.steps, part.steps)
        if part.peak > total.peak:
            total.peak, total.peak_line = part.peak, part.peak_line
        total.ops.update(part.ops)
        total.collectives.update(part.collectives)
        for name in ("compiles", "syncs", "fallbacks", "attention", "recompiles"):
            _add_spreads(getattr(total, name), getattr(part, name))
        _add_lists(total.copies, part.copies)
        _add_lists(total.graphs, part.graphs)
        for key, (count, detail) in part.findings.items():
            entry = total.findings.setdefault(key, [0, detail])
            entry[0] += count
    return total
