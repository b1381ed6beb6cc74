"""What the benchmarks share: interleaved timing, medians with quantiles, and a statement of machine, versions and command.

The variants of a comparison take turns in one run, so that a change of the machine's clock or load meets all of them; the
ratio is that of the medians. p20 and p80 show the spread.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sample:
    """Times of one variant in seconds."""

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def quantile(self, share: float) -> float:
        """The time below which ``share`` of the samples lie (nearest rank)."""
        ranked = sorted(self.times)
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def interleaved(variants: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 2) -> dict[str, Sample]:
    """Run each variant once a round, in an order that rotates; a variant returns the seconds it took."""
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = variants[name]()
            if number >= 0:
                times[name].append(seconds)
    return {name: Sample(tuple(values)) for name, values in times.items()}


def statement() -> None:
    """Print the machine, the versions and the command."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = models[0] if models else model
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    packages = {name: _version(name) for name in ("torch", "typer", "portable")}
    print(f"machine:  {model}, {os.cpu_count()} cores{load}, {platform.platform()}")
    print(f"versions: python {platform.python_version()}, " + ", ".join(f"{name} {value}" for name, value in packages.items()))
    print(f"command:  python {shlex.join([Path(sys.argv[0]).parent.name + '/' + Path(sys.argv[0]).name, *sys.argv[1:]])}\n")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "source tree"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines), end="\n\n")


def spread(sample: Sample, unit: float, digits: int = 1) -> tuple[str, str, str]:
    """Median, p20 and p80 in a unit of ``unit`` seconds."""
    values = (sample.median, sample.quantile(0.2), sample.quantile(0.8))
    return tuple(f"{value / unit:.{digits}f}" for value in values)  # type: ignore[return-value]
