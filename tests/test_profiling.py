"""pt.profile: the trace, the table, and the section on fallbacks."""

from __future__ import annotations

import gzip
import io
import json
import warnings
from pathlib import Path

import fakes
import pytest
import torch
from torch.profiler import ProfilerActivity, schedule

import portable as pt
from portable.spec import FallbackSpec


def work() -> None:
    with pt.nvtx.range("my range"):
        torch.ones(64, 64) @ torch.ones(64, 64)


@pytest.fixture
def out():
    return io.StringIO()


def names(text: str) -> set[str]:
    return {event.get("name") for event in json.loads(text)["traceEvents"]}


def test_trace_is_complete_json(on_cpu, tmp_path, out):
    path = tmp_path / "new" / "folder" / "trace.json"
    with pt.profile(path, file=out):
        work()
    assert {"aten::mm", "aten::ones", "my range"} <= names(path.read_text())
    assert f"trace: {path}" in out.getvalue()
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]  # no temporary file is left


def test_trace_can_be_compressed(on_cpu, tmp_path, out):
    with pt.profile(tmp_path / "trace.json.gz", file=out):
        work()
    assert "aten::mm" in names(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode())


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (' {\n "traceEvents": [], "a": "{"}', {"backend": "cpu", "execution": "hardware", "traceEvents": [], "a": "{"}),
        ("{ }", {"backend": "cpu", "execution": "hardware"}),
        ('[ {"ph": "X"}]\n', ["label", {"ph": "X"}]),
        ("[]", ["label"]),
    ],
)
def test_a_trace_says_what_its_times_come_from(on_cpu, tmp_path, out, monkeypatch, name, written, expected):
    """Whether a profiler writes an object (torch.profiler) or a list of events (torch_npu's)."""

    def export(self: object, path: str) -> None:
        Path(path).write_bytes(gzip.compress(written.encode()) if path.endswith(".gz") else written.encode())

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    with pt.profile(tmp_path / name, file=out):
        work()
    raw = (tmp_path / name).read_bytes()
    label = {"ph": "M", "name": "portable", "pid": 0, "args": {"backend": "cpu", "execution": "hardware"}}
    found = json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
    assert found == ([label if part == "label" else part for part in expected] if isinstance(expected, list) else expected)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_trace_of_a_schedule_is_labelled(plugged, tmp_path, out):
    plugged(fakes.Fake())
    pt.use("fake")
    with pt.profile(tmp_path / "trace.json", file=out, schedule=schedule(wait=1, warmup=1, active=1, repeat=1)) as session:
        for _ in range(4):
            work()
            session.step()
    found = json.loads((tmp_path / "trace.json").read_text())
    assert (found["backend"], found["execution"]) == ("fake", "emulated") and found["traceEvents"]
    assert "execution: emulated; emulated on CPU" in out.getvalue()


def test_table_and_its_rows(on_cpu, out):
    with pt.profile(None, rows=1, file=out, sort_by="self_cpu_time_total"):
        for _ in range(3):
            torch.ones(300, 300) @ torch.ones(300, 300)
        torch.zeros(1).abs()
    text = out.getvalue()
    assert "trace:" not in text
    assert "aten::mm" in text  # the costliest
    assert "aten::abs" not in text  # beyond the first row
    assert "Self CPU time total" in text


def test_printed_to_standard_output_by_default(on_cpu, capsys):
    with pt.profile(None):
        work()
    assert "my range" in capsys.readouterr().out


def test_an_exception_leaves_the_earlier_trace(on_cpu, tmp_path, out):
    path = tmp_path / "trace.json"
    path.write_text("earlier")
    with pytest.raises(KeyError), pt.profile(path, file=out):
        raise KeyError
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_export_leaves_the_earlier_trace(on_cpu, tmp_path, out, monkeypatch):
    def fail(self, name):
        Path(name).write_text("half")
        raise OSError("disk full")

    path = tmp_path / "trace.json"
    path.write_text("earlier")
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    with pytest.raises(OSError, match="disk full"), pt.profile(path, file=out):
        work()
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_refused_before_the_work_is_done(on_cpu, tmp_path):
    done = []
    with pytest.raises(pt.ConfigurationError, match=r"folder.*trace\.json"), pt.profile(tmp_path):
        done.append(True)
    assert not done


def test_trace_is_replaced(on_cpu, tmp_path, out):
    path = tmp_path / "trace.json"
    path.write_text("earlier")
    with pt.profile(path, file=out):
        work()
    assert "aten::mm" in names(path.read_text())


def test_options_reach_the_profiler(on_cpu, out):
    with pt.profile(None, file=out, record_shapes=True, activities=[ProfilerActivity.CPU]) as session:
        work()
    assert [[64, 64], [64, 64]] in [event.input_shapes for event in session.events()]


@pytest.mark.parametrize(("steps", "recorded"), [(0, False), (5, True)])
def test_schedule(on_cpu, tmp_path, out, steps, recorded):
    path = tmp_path / "trace.json"
    with pt.profile(path, file=out, schedule=schedule(wait=1, warmup=1, active=2, repeat=1)) as session:
        for _ in range(steps):
            work()
            session.step()
    assert path.exists() is recorded
    assert ("nothing was recorded" in out.getvalue()) is not recorded
    assert "fell back to CPU" in out.getvalue()


def test_cpu_never_falls_back(on_cpu, out):
    with pt.profile(None, file=out):
        work()
    assert "fell back to CPU: none (the cpu backend never does" in out.getvalue()


def falling() -> fakes.Fake:
    rule = FallbackSpec(True, "it warns", warning=r"The operator '(?P<op>[\w:.]+)' is not supported")
    return fakes.Fake(fakes.spec(fallback=rule))


def announce(operator: str) -> None:
    warnings.warn(f"[W] The operator '{operator}' is not supported here; CPU is used", stacklevel=2)


def test_fallbacks_are_counted(plugged, out):
    plugged(falling())
    pt.use("fake")
    with pt.profile(None, file=out):
        for _ in range(3):
            announce("aten::nonzero")  # one place, which Python's default filter would show once
        announce("aten::unique")
    lines = out.getvalue().splitlines()
    start = lines.index("fell back to CPU: 4 calls of 2 operators")
    assert [line.split() for line in lines[start + 1 : start + 3]] == [["3", "aten::nonzero"], ["1", "aten::unique"]]


def test_without_fallbacks_none_is_seen(plugged, out):
    plugged(falling())
    pt.use("fake")
    with pt.profile(None, file=out):
        work()
    assert "fell back to CPU: none seen" in out.getvalue()


def test_other_warnings_keep_the_users_filters(plugged, out):
    plugged(falling())
    pt.use("fake")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", "unwanted")
        warnings.filterwarnings("error", "fatal")
        with pt.profile(None, file=out):
            warnings.warn("unwanted", stacklevel=1)
            warnings.warn("seen", stacklevel=1)
            announce("aten::nonzero")
            with pytest.raises(UserWarning, match="fatal"):
                warnings.warn("fatal", stacklevel=1)
    mine = [str(entry.message) for entry in shown if entry.filename == __file__]
    assert mine == ["seen"]


class VendorProfiler:
    """A profiler in the manner of torch_npu.profiler.profile: it exports a trace and has no key_averages."""

    def __init__(self, events: list[dict[str, object]] | None) -> None:
        self.events = events

    def __enter__(self) -> VendorProfiler:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        if self.events is not None:
            Path(path).write_text(json.dumps(self.events))


def test_a_profiler_without_averages_gets_its_table_from_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, object]] = [
        {"ph": "X", "name": "MatMul", "ts": 0, "dur": 1500},
        {"ph": "X", "name": "Add", "ts": 1, "dur": 250},
        {"ph": "X", "name": "MatMul", "ts": 9, "dur": 500},
        {"ph": "M", "name": "process_name"},
    ]
    for trace in (tmp_path / "trace.json", None):
        monkeypatch.setattr(pt.active(), "profiler", lambda **kwargs: VendorProfiler(events), raising=False)
        out = io.StringIO()
        with pt.profile(trace, file=out):
            pass
        rows = [line.split() for line in out.getvalue().splitlines() if line.split()[-1:] in (["MatMul"], ["Add"])]
        assert rows == [["2.000", "2", "MatMul"], ["0.250", "1", "Add"]]


def test_a_vendor_profiler_that_writes_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trace.json").write_text("an earlier trace")
    monkeypatch.setattr(pt.active(), "profiler", lambda **kwargs: VendorProfiler(None), raising=False)
    with pytest.raises(pt.ConfigurationError, match="wrote none"), pt.profile(tmp_path / "trace.json", file=io.StringIO()):
        pass
    assert (tmp_path / "trace.json").read_text() == "an earlier trace"
