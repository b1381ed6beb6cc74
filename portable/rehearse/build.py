"""From observations to the result: the tables, the findings, the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from portable.backend import Backend
from portable.compat.report import Entry
from portable.policy import precision_policy
from portable.rehearsal import Profile, Rehearsal
from portable.rehearse import result as model
from portable.rehearse.costs import Costs
from portable.rehearse.failure import dtype_in
from portable.rehearse.findings import Findings, when
from portable.rehearse.observations import Observations
from portable.rehearse.places import where
from portable.rehearse.steps import Spread

_MOST_CALLED = 30


@dataclass(frozen=True)
class Subject:
    """What stays the same during a rehearsal.

    Attributes:
        folder: where the command was started.
        generation: name of the generation.
    """

    backend: Backend
    rehearsal: Rehearsal
    generation: str
    costs: Costs
    environment: model.Environment
    folder: str


def build(
    subject: Subject,
    seen: Observations,
    run: model.Run,
    failure: model.Failure | None,
    compat: Iterable[Entry],
    complete: bool = True,
) -> model.Result:
    """The result of what was observed up to now."""
    folder, profile = subject.folder, subject.rehearsal.profile
    entries = tuple(_compat(entry, folder) for entry in compat)
    memory = _memory(profile, seen, folder)
    findings = Findings(folder, subject.costs, seen.steps).all(seen, failure, entries, memory)
    calls, fallen = sum(seen.ops.values()), sum(s.total for s in seen.fallbacks.values())
    policy = precision_policy(subject.backend)
    return model.Result(
        execution=subject.rehearsal.execution,
        complete=complete,
        verdict=verdict(findings, failure, run, calls),
        run=run,
        target=model.Target(
            subject.backend.spec.name,
            profile.device_type,
            subject.generation,
            profile.title,
            profile.device_count.value,
            profile.memory.value,
        ),
        environment=subject.environment,
        failure=failure,
        findings=findings,
        dtypes_refused=_dtypes(findings),
        operators=model.Operators(calls, fallen, fallen / calls if calls else 0.0, dict(seen.ops.most_common(_MOST_CALLED))),
        fallbacks=_places(seen.fallbacks, seen.steps, 1, folder),
        compiles=_places(seen.compiles, seen.steps, 2, folder),
        syncs=_places(seen.syncs, seen.steps, 1, folder),
        copies=tuple(model.Copies(name, count, size) for name, (count, size) in sorted(seen.copies.items())),
        memory=memory,
        attention=_attention(seen, folder),
        graphs=tuple(model.Graphs(name, graphs, again) for name, (graphs, again) in seen.graphs.items()),
        collectives=dict(seen.collectives),
        precision=model.Precision(policy.autocast, policy.scaler, policy.reason),
        compat=entries,
        assumptions=tuple(model.Assumption(name, rule.text, rule.assumed) for name, rule in profile.rows() if rule.assumed),
    )


def verdict(findings: Iterable[model.Finding], failure: model.Failure | None, run: model.Run, calls: int) -> model.Verdict:
    """Whether the program would run on the device."""
    blockers = [f for f in findings if f.severity == "blocker"]
    wrong = [f for f in findings if f.severity == "wrong"]
    if blockers:
        lines = tuple(dict.fromkeys(f"{f.file}:{f.line}" for f in blockers))
        reason = f"the device refuses {len(lines)} line{'s' if len(lines) > 1 else ''} of the program: {blockers[0].detail}"
        return model.Verdict("no", reason, lines)
    if failure is not None:
        said = {
            "script": "the program failed for a reason of its own",
            "emulator": "the emulated device, not the real one, could not go on",
            "device": "the program failed on the device",
        }[failure.cause]
        line = (f"{failure.file}:{failure.line}",) if failure.file else ()
        return model.Verdict("unknown", f"{said}: {failure.error}: {failure.message.splitlines()[0]}", line)
    if run.ended in ("a signal", "still running"):
        return model.Verdict("unknown", f"the program did not come to its end ({run.ended})")
    if run.exit_code:
        return model.Verdict("unknown", f"the program ended itself with exit code {run.exit_code}")
    if not calls:
        return model.Verdict("unknown", "the program ran, but computed nothing on the device")
    if wrong:
        return model.Verdict("yes", f"it runs, but {len(wrong)} result{'s are' if len(wrong) > 1 else ' is'} silently wrong")
    return model.Verdict("yes", "nothing that the program did is refused by the device")


def _memory(profile: Profile, seen: Observations, folder: str) -> model.Memory:
    place, total = where(seen.peak_line, folder), profile.memory.value
    return model.Memory(seen.peak, total, seen.peak / total if total else 0.0, place.file, place.line)


def _places(counts: Mapping[tuple[str, str], Spread], steps: int, warmup: int, folder: str) -> tuple[model.Place, ...]:
    rows = []
    for (what, line), spread in counts.items():
        at = where(line, folder)
        how = when(spread, steps, warmup)
        counted = (spread.total, spread.first, spread.later, spread.after, spread.later_steps)
        rows.append(model.Place(what, at.file, at.line, at.backward, *counted, how))
    return tuple(sorted(rows, key=lambda row: (-row.count, row.file, row.line, row.what)))


def _attention(seen: Observations, folder: str) -> tuple[model.AttentionPath, ...]:
    rows = []
    for (path, reasons, shapes, line), spread in seen.attention.items():
        at = where(line, folder)
        rows.append(model.AttentionPath(path, not reasons, reasons, shapes, at.file, at.line, spread.total))
    return tuple(sorted(rows, key=lambda row: (-row.count, row.file, row.line)))


def _dtypes(findings: Iterable[model.Finding]) -> tuple[model.DtypeRefused, ...]:
    refused = (f for f in findings if f.rule == "REH-REFUSED-DTYPE")
    return tuple(model.DtypeRefused(dtype_in(f.detail), f.file, f.line, f.count, f.detail) for f in refused)


def _compat(entry: Any, folder: str) -> model.Compat:
    at = where(entry.where, folder)
    return model.Compat(entry.kind, entry.construct, entry.detail, entry.count, at.file, at.line)
