"""The result as a table on standard error, so that the program's own output stays as it is."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from portable.rehearse import text
from portable.rehearse.result import Finding, Result, Severity

_STYLE = {"blocker": "bold red", "wrong": "bold magenta", "major": "red", "minor": "yellow", "info": "dim"}
_ANSWER = {"yes": "bold green", "no": "bold red", "unknown": "bold yellow"}
_MOST = 10


def show(result: Result) -> None:
    """Print it, findings by rule. Those that are mere information are counted only, and stand in the JSON file."""
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    console = Console(stderr=True, file=sys.stderr)
    if not console.is_terminal:
        console.width = 160  # a log file has room; folded paths would be hard to search for
    verdict = result.verdict
    console.print()
    target = result.target
    console.rule(f"portable rehearse: {escape(result.run.target)} on {escape(target.backend)} ({escape(target.generation)})")
    console.print(f"[{_ANSWER[verdict.runs]}]{text.ANSWERS[verdict.runs]}[/]: {escape(verdict.reason)}")
    if verdict.lines:
        console.print(f"  at {escape(', '.join(verdict.lines))}")
    if result.failure is not None:
        failure = result.failure
        console.print(
            f"  ended by {escape(failure.error)} at {escape(f'{failure.file}:{failure.line}')}: {escape(failure.code)}"
        )
    summary = Table(show_header=False, show_edge=False, box=None, pad_edge=False)
    summary.add_column(no_wrap=True)
    summary.add_column(overflow="fold")
    for name, value in text.facts(result):
        summary.add_row(f"[bold]{escape(name)}[/]", escape(value))
    console.print(summary)
    console.print(f"\n[bold]Findings: {text.counts(result.findings)}[/]")
    shown = [f for f in result.findings if f.severity != "info"]
    for (severity, rule), group in _grouped(shown).items():
        first = group[0]
        console.print(f"[{_STYLE[severity]}]{severity}[/] [bold]{escape(text.RULES[rule].title)}[/] ({rule})")
        console.print(Padding(f"cost: {escape(first.cost)}\nfix:  {escape(first.fix)}", (0, 0, 0, 2)))
        table = Table(show_header=False, show_edge=False, box=None, padding=(0, 2))
        table.add_column(overflow="fold", ratio=3)
        table.add_column(overflow="fold", ratio=5)
        table.add_column(overflow="fold", ratio=5)
        table.add_column(overflow="fold", ratio=2)
        for finding in group[:_MOST]:
            what = f"{finding.what}: {finding.detail}" if finding.detail else finding.what
            table.add_row(*map(escape, (text.place(finding), finding.code, what, text.often(finding))))
        console.print(table)
        if len(group) > _MOST:
            console.print(f"  and {len(group) - _MOST} more lines; --json FILE has all of them")
    console.print(f"[bold]{result.notice}[/] (execution: {result.execution}; {len(result.assumptions)} rules are assumed)")


def _grouped(findings: Iterable[Finding]) -> dict[tuple[Severity, str], list[Finding]]:
    """Findings by severity and rule, in their order: the words about a rule need to be read once only."""
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.rule), []).append(finding)
    return groups
