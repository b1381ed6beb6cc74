"""`pt.profile`: torch.profiler with the activities of the backend, a Chrome trace, and what fell back to the CPU."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, TextIO, cast

from portable.errors import ConfigurationError
from portable.provenance import execution, notice
from portable.selection import active


@contextlib.contextmanager
def profile(
    trace: str | os.PathLike[str] | None = "trace.json",
    *,
    rows: int = 15,
    sort_by: str | None = None,
    file: TextIO | None = None,
    **kwargs: Any,
) -> Iterator[Any]:
    """Profile a block: write a Chrome trace, labelled with backend and `execution`, and print what took longest.

    Args:
        trace: where the trace goes (open it in Perfetto or chrome://tracing); None writes none. It is written to a temporary
            file first, so that an earlier trace is replaced only by a complete one.
        rows: operators in the printed table.
        sort_by: key of torch.profiler's table ("self_cpu_time_total"); the device's time where there is a device.
        file: where the table goes; standard output by default.
        kwargs: passed on to the profiler: ``record_shapes``, ``profile_memory``, ``with_stack``, ``schedule``, or
            ``activities`` of your own.

    Yields:
        The profiler (call its ``step()`` with a schedule).

    Raises:
        ConfigurationError: ``trace`` is a folder.
    """
    out = file or sys.stdout
    backend = active()
    target = None if trace is None else _writable(trace)
    with backend.fallbacks() as fallen:
        session = backend.profiler(**kwargs)
        with session:
            yield session
            from portable.devices import synchronize

            synchronize()  # what is still queued belongs to the block
    if getattr(session, "profiler", session) is None:
        print("nothing was recorded: the schedule was still waiting when the block ended; call step() more often", file=out)
    else:
        _report(session, target, sort_by, rows, out)
    print(fallback_section(fallen), file=out)
    if notice(backend):
        print(f"execution: {notice(backend)}", file=out)


def _report(session: Any, target: Path | None, sort_by: str | None, rows: int, out: TextIO) -> None:
    averages = hasattr(session, "key_averages")
    with tempfile.TemporaryDirectory() as scratch:
        # A profiler without averages of its own still needs a trace, which the table is then made from.
        written = target or (None if averages else Path(scratch) / "trace.json")
        if written is not None:
            _export(session, written)
        if target is not None:
            print(f"trace: {target}", file=out)
        print(_table(session, sort_by, rows) if averages or written is None else table_of_trace(written, rows), file=out)


def _writable(trace: str | os.PathLike[str]) -> Path:
    """The trace's path; what would spoil it is found before the profiled work is done, not afterwards."""
    target = Path(trace)
    if target.is_dir():
        raise ConfigurationError(
            f"the trace was to be written to {target}, which is a folder. Name a file, such as trace.json."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _export(session: Any, target: Path) -> None:
    # The profiler compresses by the suffix, so the temporary name keeps it.
    partial = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        session.export_chrome_trace(str(partial))
        if not partial.exists():
            raise ConfigurationError(
                f"a trace was to be written to {target}, but the vendor's profiler wrote none (it has printed why). "
                "Profile at least one operator on the device, or pass trace=None."
            )
        _label(partial, {"backend": active().spec.name, "execution": execution()})
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _label(trace: Path, labels: dict[str, str]) -> None:
    """Write labels into a trace: as keys of the object that it is, or as a first metadata event if it is a list of events.

    The file may be large, so its text is copied and not parsed. (``add_metadata`` of torch.profiler has no effect between
    the recorded steps of a schedule.)
    """
    labelled = trace.with_name(f".label{trace.name}")
    try:
        with _opened(trace, "rb") as source, _opened(labelled, "wb") as sink:
            head, following = _next(source), _next(source)
            event = json.dumps({"ph": "M", "name": "portable", "pid": 0, "args": labels})
            added = {b"{": json.dumps(labels)[1:-1], b"[": event}.get(head, "").encode()
            sink.write(head + added + (b",\n" if added and following not in (b"}", b"]") else b"") + following)
            shutil.copyfileobj(source, sink)
        labelled.replace(trace)
    finally:
        labelled.unlink(missing_ok=True)


def _opened(path: Path, mode: Literal["rb", "wb"]) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, mode)) if path.suffix == ".gz" else path.open(mode)


def _next(source: IO[bytes]) -> bytes:
    """The next byte that is not white space, empty at the end."""
    byte = source.read(1)
    while byte.isspace():
        byte = source.read(1)
    return byte


def _table(session: Any, sort_by: str | None, rows: int) -> str:
    averages = session.key_averages()
    if sort_by is None:
        on_device = any(getattr(event, "self_device_time_total", 0) for event in averages)
        sort_by = "self_device_time_total" if on_device else "self_cpu_time_total"
    return averages.table(sort_by=sort_by, row_limit=rows)


def table_of_trace(trace: Path, rows: int) -> str:
    """The operators of a Chrome trace that took longest, for profilers that have no ``key_averages``.

    Args:
        trace: a file in the Trace Event Format; complete events ("ph": "X") carry their duration in microseconds.
        rows: how many names to list.
    """
    content = json.loads(trace.read_text(encoding="utf-8"))
    events = content["traceEvents"] if isinstance(content, dict) else content
    total: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.get("ph") == "X":
            total[event["name"]] += event.get("dur", 0)
            calls[event["name"]] += 1
    lines = [f"{'total ms':>12}  {'calls':>8}  name (an event inside another counts in both)"]
    lines += [f"{microseconds / 1e3:>12.3f}  {calls[name]:>8}  {name}" for name, microseconds in total.most_common(rows)]
    return "\n".join(lines)


def fallback_section(fallen: Counter[str]) -> str:
    """The part of the report that says which operators had no kernel on the device."""
    spec = active().spec
    if not spec.fallback.happens:
        return f"fell back to CPU: none (the {spec.name} backend never does: {spec.fallback.note})"
    if not fallen:
        return "fell back to CPU: none seen"
    lines = [f"fell back to CPU: {sum(fallen.values())} calls of {len(fallen)} operators"]
    lines += [f"  {count:>8}  {name}" for name, count in fallen.most_common()]
    return "\n".join(lines)
