"""The result as a section of a Markdown document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from portable.rehearse import text
from portable.rehearse.output import MARK
from portable.rehearse.result import Finding, Result

_MOST_INFO = 50
_MOST_ATTENTION = 20


def _cell(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _code(value: str) -> str:
    """Text as code in a cell; more backticks outside than inside."""
    value = value.replace("\n", " ").replace("|", "\\|")
    fence = "``" if "`" in value else "`"
    space = " " if "`" in value else ""
    return f"{fence}{space}{value}{space}{fence}" if value else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def section(result: Result) -> str:
    """The section, from its heading on."""
    run, target, verdict = result.run, result.target, result.verdict
    words = " ".join((("-m ",) if run.module else ()) + (run.target, *run.arguments))
    lines = [
        MARK,
        f"## Rehearsal of {_code(words)} on {target.backend} ({target.generation})",
        "",
        f"**{text.ANSWERS[verdict.runs]}**: {_cell(verdict.reason)}" + ("." if not verdict.reason.endswith(".") else ""),
        "",
        f"*{result.notice}.* Execution: `{result.execution}`." + ("" if result.complete else " **Incomplete.**"),
        "",
    ]
    if verdict.lines:
        lines += ["Lines that fail: " + ", ".join(_code(line) for line in verdict.lines) + ".", ""]
    if result.failure is not None:
        failure = result.failure
        place = _code(f"{failure.file}:{failure.line}")
        lines += [f"The program ended by `{failure.error}` at {place} ({_code(failure.code)}): {_cell(failure.message)}", ""]
    lines += _table(("", ""), ((name, _cell(value)) for name, value in text.facts(result)))
    shown = [f for f in result.findings if f.severity != "info"]
    lines += [f"### Findings: {text.counts(result.findings)}", ""]
    if shown:
        header = ("severity", "line", "what", "times", "cost", "fix")
        lines += _table(header, (_row(finding) for finding in shown))
    info = [f for f in result.findings if f.severity == "info"]
    if info:
        lines += [f"<details><summary>{len(info)} findings that are information only</summary>", ""]
        rows = ((_code(text.place(f)), _cell(text.title(f)), _cell(f.detail), _cell(text.often(f))) for f in info[:_MOST_INFO])
        lines += _table(("line", "what", "detail", "times"), rows)
        if len(info) > _MOST_INFO:
            lines += [f"and {len(info) - _MOST_INFO} more in the JSON file.", ""]
        lines += ["</details>", ""]
    if result.dtypes_refused:
        lines += ["### Dtypes refused", ""]
        lines += _table(
            ("dtype", "line", "times"), ((f"`{d.dtype}`", _code(f"{d.file}:{d.line}"), d.count) for d in result.dtypes_refused)
        )
    if result.attention:
        lines += ["### Attention", ""]
        rows2 = (
            (_code(f"{a.file}:{a.line}"), _cell(a.shapes), _cell(a.path), _cell("; ".join(a.reasons) or "fused"), a.count)
            for a in result.attention[:_MOST_ATTENTION]
        )
        lines += _table(("line", "shapes", "path", "why", "calls"), rows2)
        if len(result.attention) > _MOST_ATTENTION:
            lines += [f"and {len(result.attention) - _MOST_ATTENTION} more in the JSON file.", ""]
    if result.graphs:
        lines += ["### torch.compile", ""]
        lines += _table(
            ("function", "graphs", "recompilations"), ((_code(g.function), g.graphs, g.recompilations) for g in result.graphs)
        )
    lines += ["### Environment", "", f"- command: {_code(result.environment.command)}", f"- started: {run.started}"]
    lines += [f"- machine: {result.environment.processor}, {result.environment.platform}"]
    versions = {"python": result.environment.python, **result.environment.versions}
    lines += ["- versions: " + ", ".join(f"{name} {value}" for name, value in versions.items()), ""]
    return "\n".join(lines)


def _row(finding: Finding) -> tuple[str, ...]:
    where = _code(text.place(finding)) + (f"<br>{_code(finding.code)}" if finding.code else "")
    what = _cell(text.title(finding)) + (f"<br>{_cell(finding.detail)}" if finding.detail else "") + f"<br>`{finding.rule}`"
    return finding.severity, where, what, _cell(text.often(finding)), _cell(finding.cost), _cell(finding.fix)
