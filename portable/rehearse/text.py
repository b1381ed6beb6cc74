"""Words that the views share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from portable.rehearse.result import SEVERITIES, Finding, Result
from portable.rehearse.rules import RULES

ANSWERS = {"yes": "It would run", "no": "It would not run", "unknown": "Not known whether it would run"}


def size(count: int) -> str:
    """Bytes in a unit that gives up to four digits."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.4g} {unit}"


def place(finding: Finding) -> str:
    """``file.py:12``, with a note for the backward pass."""
    if not finding.line:
        return finding.file or "unknown line"
    return f"{finding.file}:{finding.line}{' (backward)' if finding.backward else ''}"


def often(finding: Finding) -> str:
    """How often, and how often in each step."""
    text = str(finding.count)
    if finding.per_step and finding.when == "every step":
        text += f", {finding.per_step:g} a step"
    return text if finding.when == "not known" else f"{text}, {finding.when}"


def title(finding: Finding) -> str:
    """The rule's short name with what it is about."""
    known = RULES.get(finding.rule)
    name = known.title if known else finding.rule
    return f"{name}: {finding.what}" if finding.what and finding.what not in name else name


def counts(findings: Iterable[Finding]) -> str:
    """``2 blocker, 1 major``."""
    found = list(findings)
    numbers = {severity: sum(f.severity == severity for f in found) for severity in SEVERITIES}
    return ", ".join(f"{number} {severity}" for severity, number in numbers.items() if number) or "none"


def facts(result: Result) -> Sequence[tuple[str, str]]:
    """The lines of the summary: name, text."""
    run, target = result.run, result.target
    operators, memory = result.operators, result.memory
    late = sum(row.later + row.after for row in result.compiles)
    compiled = sum(row.count for row in result.compiles)
    graphs, again = sum(g.graphs for g in result.graphs), sum(g.recompilations for g in result.graphs)
    moved = "; ".join(f"{c.count} {c.direction} ({size(c.bytes)})" for c in result.copies) or "none"
    fused = sum(a.count for a in result.attention if a.fused)
    plain = sum(a.count for a in result.attention if not a.fused)
    ended = f"{run.ended}, exit code {run.exit_code}" if run.exit_code is not None else run.ended
    at = f", at {memory.file}:{memory.line}" if memory.line else ""
    rows = [
        ("device", f"{target.title}: {target.devices} x {size(target.memory)} ({target.backend}, {target.generation})"),
        ("execution", f"{result.execution}: nothing here was measured on hardware"),
        ("ended by", f"{ended}, after {run.steps} optimizer steps, {run.processes} process{'es' if run.processes > 1 else ''}"),
        ("peak memory", f"{size(memory.peak)} of {size(memory.total)} ({100 * memory.share:.3g} %){at}"),
        ("operator calls", f"{operators.calls:,}; {operators.fallbacks:,} ({100 * operators.fallback_share:.2g} %) on the CPU"),
        ("compilations", f"{compiled} of operators, {late} of them after the first 2 steps; {graphs} graphs, {again} again"),
        ("host waits", _waits(result)),
        ("copies", moved),
        ("attention calls", f"{fused + plain}: {fused} with a fused kernel, {plain} without"),
        ("precision policy", _precision(result)),
    ]
    if not run.steps:
        unseen = "no optimizer of torch.optim made a step, so counts are not told by step"
        limit = f", and --steps {run.asked_steps} did not end the program" if run.asked_steps else ""
        rows.insert(3, ("steps", unseen + limit))
    if result.collectives:
        rows.append(("collectives", ", ".join(f"{name} {count}" for name, count in result.collectives.items())))
    return rows


def _waits(result: Result) -> str:
    """All of them, those of every step, and the others: a mean over both would say nothing about either."""
    total = sum(row.count for row in result.syncs)
    every = [row for row in result.syncs if row.when == "every step"]
    if not total or result.run.steps < 2:
        return str(total)
    rate = sum(row.later for row in every) / (result.run.steps - 1)
    rest = total - sum(row.count for row in every)
    return f"{total}: {rate:.3g} in every step" + (f", {rest} in some steps or outside of them" if rest else "")


def _precision(result: Result) -> str:
    policy = result.precision
    scaler = "with loss scaling" if policy.scaler else "no loss scaling"
    return f"autocast to {policy.autocast}, {scaler}: {policy.reason}" if policy.autocast else f"float32: {policy.reason}"
