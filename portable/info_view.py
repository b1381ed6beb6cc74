"""`portable info` as rich tables."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from portable.info import BackendInfo, Info


def size(value: float | None) -> str:
    """Bytes for people: "16.0 GiB"."""
    if value is None:
        return "unknown"
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    step = 0
    while value >= 1024 and step < len(units) - 1:
        value, step = value / 1024, step + 1
    return f"{value:.{0 if step == 0 else 1}f} {units[step]}"


def show(info: Info, console: Console) -> None:
    """Print the overview, then one table for each available backend, then what failed."""
    console.print(_overview(info))
    for backend in info.backends:
        if not backend.available:
            console.print(f"[bold]{escape(backend.name)}[/] not available: {escape(backend.reason)}", soft_wrap=True)
            console.print(f"    next: {escape(backend.next_step)}", soft_wrap=True)
    for backend in info.backends:
        if backend.available:
            console.print()
            console.print(_details(backend))
    versions = "  ".join(f"{name} {value}" for name, value in info.versions.items() if "failed" not in value)
    console.print(escape(versions), style="dim", soft_wrap=True)
    failures = [f"{name}: {value}" for name, value in info.versions.items() if "failed" in value]
    failures += [f"plugin {p['plugin']}, {p['phase']}: {p['message']}" for p in info.plugin_problems]
    if info.problem:
        failures.insert(0, info.problem)
    for line in failures:
        console.print(f"[bold red]problem[/] {escape(line)}", soft_wrap=True)


def _overview(info: Info) -> Table:
    table = Table(title="Backends", title_justify="left", show_edge=False, pad_edge=False)
    for column in ("", "backend", "device type", "available", "execution", "generation"):
        table.add_column(column, no_wrap=True)
    for backend in info.backends:
        generations = {device.generation or "unknown" for device in backend.devices}
        table.add_row(
            "*" if backend.active else "",
            escape(backend.name),
            escape(backend.device_type),
            "[green]yes[/]" if backend.available else "[yellow]no[/]",
            backend.execution if backend.available else "-",
            escape(", ".join(sorted(generations)) or "-"),
        )
    return table


def _details(backend: BackendInfo) -> Table:
    table = Table(title=escape(backend.name), title_justify="left", show_header=False, show_edge=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()

    def row(name: str, text: str) -> None:
        table.add_row(name, escape(text))

    for device in backend.devices:
        generation = device.generation or "unknown generation"
        row(f"device {device.index}", f"{device.name} ({generation}), {size(device.memory)}")
    if backend.devices and backend.devices[0].storage:
        row("dtypes stored", " ".join(backend.devices[0].storage))
        row("dtypes multiplied natively", " ".join(backend.devices[0].matmul))
    if backend.precision:
        dtype = backend.precision["autocast"] or "float32 (autocast off)"
        scaling = "with loss scaling" if backend.precision["scaler"] else "no loss scaling"
        row("precision policy", f"{dtype}, {scaling}: {backend.precision['reason']}")
    if backend.compile:
        options = "".join(f" {key}={value}" for key, value in backend.compile["options"].items())
        row("compile", f"{backend.compile['backend']}{options}: {backend.compile['reason']}")
    row("process group", backend.process_group)
    for name, value in backend.versions.items():
        row(name, value)
    for name, value in backend.environment.items():
        row(f"${name}", value)
    row("provided by", backend.provider)
    return table
