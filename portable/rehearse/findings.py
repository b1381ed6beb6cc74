"""From what was observed to findings: which rule, how bad, in which steps, with the words of the device's vendor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from portable.rehearse.costs import Costs
from portable.rehearse.failure import rule_of_refusal
from portable.rehearse.observations import Observations
from portable.rehearse.places import Where, where
from portable.rehearse.result import SEVERITIES, Compat, Failure, Finding, Memory, Severity, When
from portable.rehearse.rules import COMPAT, RULES, SYNCS, WRONG
from portable.rehearse.steps import Spread

_COMPILE_WARMUP = 2  # see portable.rehearse.steps
_OFTEN = 10  # of a program without optimizer steps: repeated, not part of the start
_MOST = 0.8  # of the later steps: an evaluation or a last batch may be without
_FULL = 0.9
_NUMBER = re.compile(r"\d+(\.\d+)?")
_PLACE = re.compile(r"\((?P<line>[^()]+:\d+)\)$")


@dataclass
class _Seen:
    """What several entries of a recorder say about one line."""

    spread: Spread = field(default_factory=Spread)
    names: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, spread: Spread) -> None:
        self.names[name] = self.names.get(name, 0) + spread.total
        self.spread.first += spread.first
        self.spread.later += spread.later
        self.spread.after += spread.after
        self.spread.later_steps = max(self.spread.later_steps, spread.later_steps)

    def named(self, most: int = 4) -> str:
        """The names, the most frequent first."""
        ranked = sorted(self.names, key=lambda name: (-self.names[name], name))
        rest = f" and {len(ranked) - most} more" if len(ranked) > most else ""
        return ", ".join(name.removeprefix("aten::") for name in ranked[:most]) + rest


def _by_line(counts: Mapping[tuple[str, str], Spread]) -> dict[str, _Seen]:
    lines: dict[str, _Seen] = {}
    for (name, line), spread in counts.items():
        lines.setdefault(line, _Seen()).add(name, spread)
    return lines


def when(spread: Spread, steps: int, warmup: int) -> When:
    """In which steps something happened.

    Args:
        spread: of the count.
        steps: how many steps were seen.
        warmup: steps that do not count as "later".
    """
    later = steps - warmup
    if later < 1:
        return "not known"
    if spread.later_steps >= max(1, _MOST * later):
        return "every step"
    return "some steps" if spread.later_steps else "start or end"


def _eased(severity: Severity, how: When, count: int, after: int) -> Severity:
    """The severity of what repeats, by how often it does; ``after`` counts what came after the last step."""
    if how == "every step" or (how == "not known" and count >= _OFTEN):
        return severity
    # A program that goes on after training, to evaluate or to generate, repeats there what no step shows.
    if how == "start or end" and after < _OFTEN:
        return "info"
    return SEVERITIES[max(SEVERITIES.index("minor"), SEVERITIES.index(severity))]


class Findings:
    """Makes findings.

    Args:
        folder: files are relative to it.
        costs: the vendor's words.
        steps: how many steps were seen.
    """

    def __init__(self, folder: str, costs: Costs, steps: int) -> None:
        self._folder = folder
        self._costs = costs
        self._steps = steps

    def all(self, seen: Observations, failure: Failure | None, compat: Iterable[Compat], memory: Memory) -> tuple[Finding, ...]:
        """Every finding, the worst first, then by count."""
        found = [
            *self._recorded(seen),
            *self._attention(seen),
            *self._fallbacks(seen),
            *self._compiles(seen),
            *self._syncs(seen),
            *self._graphs(seen),
            *self._compat(compat, failure),
        ]
        found += self._failure(failure, found)
        if memory.total and _FULL <= memory.share <= 1 and not any(f.rule == "REH-OOM" for f in found):
            detail = f"peak {memory.peak:,} of {memory.total:,} bytes"
            found.append(self._make("REH-MEMORY-FULL", Where(memory.file, memory.line), 1, "memory", detail))
        return tuple(sorted(found, key=lambda f: (SEVERITIES.index(f.severity), -f.count, f.file, f.line, f.rule)))

    def _make(
        self,
        rule: str,
        place: Where,
        count: int,
        what: str,
        detail: str,
        spread: Spread | None = None,
        warmup: int = 1,
    ) -> Finding:
        known = RULES[rule]
        words = self._costs.of(rule, known.group)
        how: When = "not known" if spread is None else when(spread, self._steps, warmup)
        later = self._steps - warmup
        return Finding(
            rule,
            _eased(known.severity, how, count, spread.after if spread else 0) if known.eases else known.severity,
            place.file,
            place.line,
            place.code(self._folder),
            place.backward,
            count,
            how,
            round(spread.later / later, 2) if spread is not None and later > 0 else None,
            what,
            detail,
            words.cost if words else known.cost,
            (words.fix if words else "") or known.fix,
        )

    def _place(self, line: str) -> Where:
        return where(line, self._folder)

    def _recorded(self, seen: Observations) -> Iterator[Finding]:
        full: list[tuple[str, int, str]] = []
        for (kind, name, line), (count, detail) in seen.findings.items():
            rule = rule_of_refusal(name, detail) if kind == "refused" else WRONG.get(kind, "REH-WRONG")
            if rule == "REH-OOM":
                full.append((line, count, detail))
                continue
            text = detail if rule != "REH-WRONG" else f"{kind}: {detail}"
            yield self._make(rule, self._place(line), count, name.removeprefix("aten::"), text)
        if full:  # once the memory is full, every later allocation fails as well: the first line is the one to know
            line, count, detail = full[0]
            detail += f" {len(full) - 1} later lines do not fit either." if len(full) > 1 else ""
            yield self._make("REH-OOM", self._place(line), count, "memory", detail)

    def _attention(self, seen: Observations) -> Iterator[Finding]:
        lines: dict[tuple[str, str, str], _Seen] = {}
        for (path, reasons, shapes, line), spread in seen.attention.items():
            if reasons:  # the same reasons with other numbers, as for a context that grows, are one finding
                kind = _NUMBER.sub("#", "; ".join(reasons))
                lines.setdefault((line, path, kind), _Seen()).add(f"{'; '.join(reasons)} ({shapes})", spread)
        for (line, path, _), entry in lines.items():
            others = len(entry.names) - 1
            more = f", and so for {others} other shape{'s' if others > 1 else ''}" if others else ""
            detail = f"takes {path}: {max(entry.names, key=lambda name: entry.names[name])}{more}"
            what = "scaled_dot_product_attention"
            yield self._make("REH-ATTENTION-MATH", self._place(line), entry.spread.total, what, detail, entry.spread)

    def _fallbacks(self, seen: Observations) -> Iterator[Finding]:
        calls = sum(seen.ops.values())
        for line, entry in _by_line(seen.fallbacks).items():
            total = entry.spread.total
            share = f"{100 * total / calls:.2g} % of all operator calls" if calls else ""
            yield self._make("REH-FALLBACK", self._place(line), total, entry.named(), share, entry.spread)

    def _compiles(self, seen: Observations) -> Iterator[Finding]:
        rules = {"every step": "REH-COMPILE-EVERY-STEP", "some steps": "REH-COMPILE-LATE"}
        for line, entry in _by_line(seen.compiles).items():
            spread = entry.spread
            how = when(spread, self._steps, _COMPILE_WARMUP)
            rule = rules.get(how, "REH-COMPILE-FIRST")
            if (
                how == "not known" and max(entry.names.values()) >= _OFTEN
            ):  # a loop without an optimizer: generation, evaluation
                rule = "REH-COMPILE-EVERY-STEP"
            elif how == "start or end" and spread.after >= _OFTEN * len(entry.names):
                rule = "REH-COMPILE-LATE"
            detail = f"{spread.first} in the first {_COMPILE_WARMUP} steps, {spread.later} later"
            if self._steps <= _COMPILE_WARMUP:
                detail = f"{spread.total}; whether more come in later steps shows after {_COMPILE_WARMUP + 1} steps"
            elif spread.after:
                detail += f", {spread.after} after the last"
            yield self._make(rule, self._place(line), spread.total, entry.named(), detail, spread, _COMPILE_WARMUP)

    def _syncs(self, seen: Observations) -> Iterator[Finding]:
        for (name, line), spread in seen.syncs.items():
            rule = SYNCS.get(name, "REH-SYNC")
            yield self._make(rule, self._place(line), spread.total, name, "", spread)

    def _graphs(self, seen: Observations) -> Iterator[Finding]:
        for function, (graphs, again) in seen.graphs.items():
            found = _PLACE.search(function)
            place = self._place(found["line"]) if found else Where("", 0)
            name = function[: found.start()].strip() if found else function
            if again:
                detail = f"{graphs} graphs, {again} of them recompilations"
                spread = seen.recompiles.get(function)
                yield self._make("REH-GRAPH-RECOMPILE", place, again, name, detail, spread, _COMPILE_WARMUP)
            elif graphs > 1:
                yield self._make("REH-GRAPH-BREAKS", place, graphs, name, f"{graphs} graphs")

    def _compat(self, entries: Iterable[Compat], failure: Failure | None) -> Iterator[Finding]:
        for entry in entries:
            if entry.kind == "no equivalent" and failure is not None and failure.rule == "REH-UNSUPPORTED":
                continue  # the finding of the failure says it
            place = Where(entry.file, entry.line)
            yield self._make(COMPAT[entry.kind], place, entry.count, entry.construct, entry.detail)

    def _failure(self, failure: Failure | None, others: list[Finding]) -> list[Finding]:
        if failure is None or not failure.rule:
            return []
        if any((f.rule, f.file, f.line) == (failure.rule, failure.file, failure.line) for f in others):
            return []
        place = Where(failure.file, failure.line)
        return [self._make(failure.rule, place, 1, failure.error, failure.message.splitlines()[0])]
