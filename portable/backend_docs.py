"""docs/backends.md from the backends' declarations."""

from __future__ import annotations

from collections.abc import Iterable

from portable.backend import Backend
from portable.info_view import size
from portable.spec import Generation
from portable.support_table import shipped_backends

INTRODUCTION = """\
# What the backends declare

This file is generated (`make docs`); the tests compare it with the code. Every figure carries its source, and what no vendor's
page states is marked *assumed* with the reason. Peaks are dense FLOP/s of one PyTorch device; memory and bandwidth are those of
one PyTorch device too (a logical NeuronCore, a die of an MI250X or a 910C).
"""


def _rate(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value / 1e12:.4g} T{unit}/s"


def _words(names: Iterable[str]) -> str:
    return " ".join(sorted(names)) or "-"


def _generation_rows(generation: Generation) -> str:
    peaks = ", ".join(f"{mode} {value / 1e12:.4g}" for mode, value in generation.peak.items()) or "-"
    cells = [
        f"`{generation.name}`",
        generation.title,
        size(generation.memory) if generation.memory else "-",
        _rate(generation.bandwidth, "B"),
        peaks,
        " ".join(generation.autocast) or "off",
        _words(generation.matmul),
    ]
    return "| " + " | ".join(cells) + " |"


def _sources(generations: Iterable[Generation]) -> list[str]:
    lines = []
    for generation in generations:
        lines.append(f"- `{generation.name}`: {generation.source}.")
        lines += [f"  - assumed: {text}." for text in generation.assumed]
    return lines


def _section(backend: Backend) -> list[str]:
    spec = backend.spec
    rows = {
        "device type": f"`{spec.device_type}`",
        "other names": _words(f"`{alias}`" for alias in spec.aliases),
        "checked": spec.checked,
        "install": spec.install,
        "compile": f"{spec.compile.backend or 'eager'}: {spec.compile.reason}",
        "process group": spec.process_group + ("" if spec.composite_group else " (not joined with gloo)"),
        "pinned memory": f"{'yes' if spec.pin_memory.value else 'no'}: {spec.pin_memory.reason}",
        "random numbers": spec.rng,
        "determinism": spec.determinism.note or "the switch of PyTorch suffices",
        "fallback to CPU": spec.fallback.note,
        "forbid it": _words(f"`{key}={value}`" for key, value in spec.fallback.forbid.items()),
    }
    lines = [f"## {spec.name}: {spec.vendor}", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {text} |" for name, text in rows.items()]
    for key, value in spec.compile.kwargs.items():
        lines.append(f"| torch.compile argument | `{key}={value}` |")
    for key, reason in spec.compile.forbidden.items():
        lines.append(f"| torch.compile argument dropped | `{key}`: {reason} |")
    for name, optimizer in spec.optimizers.items():
        options = ", ".join(f"{key}={value}" for key, value in optimizer.options.items())
        lines.append(f"| `{name}` | `{options}`: {optimizer.reason} |")
    for name, meaning in spec.environment.items():
        lines.append(f"| `${name}` | {meaning} |")
    lines.append("")
    if spec.generations:
        lines += ["| generation | product | memory | bandwidth | peak TFLOP/s | autocast | multiplied natively |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        lines += [_generation_rows(generation) for generation in spec.generations.values()]
        lines += ["", "Sources:", "", *_sources(spec.generations.values()), ""]
    return lines


def render() -> str:
    """The whole document as Markdown."""
    lines = [INTRODUCTION]
    for backend in shipped_backends():
        for described in backend.documented():
            lines += _section(described)
    return "\n".join(lines)
