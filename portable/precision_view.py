"""`portable explain precision` as rich tables, and as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from portable.numerics import Precision


def advice(found: Precision) -> Iterator[tuple[str, str, str]]:
    """(what, dtype or answer, reason) of each part of the policy."""
    yield "parameters", found.parameters.dtype, found.parameters.reason
    yield "autocast", "off (float32)" if found.policy.autocast is None else found.autocast.dtype, found.autocast.reason
    yield "gradient reduction", found.reduction.dtype, found.reduction.reason
    yield "optimizer state", found.optimizer.dtype, found.optimizer.reason
    yield "loss scaling", "yes" if found.scaler else "no", found.scaling


def _bits(value: int | None) -> str:
    return "?" if value is None else str(value)


def _policy(found: Precision) -> Table:
    name = f"{found.backend} ({found.generation or 'unknown generation'})"
    table = Table(title=escape(f"precision on {name}: {found.title}"), title_justify="left", show_edge=False, pad_edge=False)
    for column in ("", "dtype", "reason"):
        table.add_column(column, overflow="fold")
    for row in advice(found):
        table.add_row(*map(escape, row))
    return table


def _switches(found: Precision) -> Table:
    level = "no level is set" if found.level is None else f"level {found.level}"
    title = (
        f"switches ({level}): float32 matrix products keep {_bits(found.matmul_bits)} mantissa bits, convolutions "
        f"{_bits(found.conv_bits)}; float32 has 24"
    )
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("switch, and what it means here", overflow="fold")
    for column in ("now", "default", "bits"):
        table.add_column(column, overflow="fold")
    for state in found.switches:
        now = "?" if state.value is None else state.value
        bits = "" if state.governs == "16-bit sums" else _bits(state.bits)
        table.add_row(f"{escape(state.name)}\n  {escape(state.governs)}: {escape(state.meaning)}", now, state.default, bits)
    return table


def table(found: Precision) -> Table:
    """Both tables, one above the other."""
    both = Table.grid(padding=(0, 0))
    both.add_row(_policy(found))
    both.add_row("")
    both.add_row(_switches(found))
    return both


def text(found: Precision) -> str:
    """The same without colours, for print."""
    stream = io.StringIO()
    Console(file=stream, width=160, color_system=None).print(Group(table(found)))
    return stream.getvalue().rstrip()
