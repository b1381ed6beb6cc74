"""Everything that reports numbers says what they come from: info, profiles, reports, the figures of the example."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import EXECUTION
from rich.console import Console
from typer.testing import CliRunner

import portable as pt
from portable import plugins, selection
from portable.cli import app
from portable.compat.report import Recorder
from portable.rehearsal import current
from portable.rehearse import NOTICE, Result

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from gpt.display import Summary


@pytest.fixture
def execution(name: str) -> str:
    return EXECUTION[name]


def test_execution(name: str, execution: str) -> None:
    assert pt.execution() == pt.backends()[name].execution == execution
    assert pt.execution(selection.find("cpu")) == "hardware", "the CPU is what it is, whatever else is emulated"


def test_info(name: str, execution: str) -> None:
    done = CliRunner().invoke(app, ["info", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    (entry,) = [b for b in found["backends"] if b["name"] == name]
    assert found["active"] == name and entry["available"] and entry["execution"] == execution
    assert [device["name"] for device in entry["devices"]] == [pt.get_device_name(i) for i in range(pt.device_count())]
    table = CliRunner().invoke(app, ["info"]).stdout
    assert execution in table


def test_names_of_devices_say_it(execution: str) -> None:
    assert execution == "hardware" or "CPU" in pt.get_device_name()


def test_no_probe_can_say_otherwise(monkeypatch: pytest.MonkeyPatch, chosen: Any, execution: str) -> None:
    """Neither the backend itself nor another one that serves the same device type."""
    real = chosen.probe()
    monkeypatch.setattr(chosen, "probe", lambda: dataclasses.replace(real, execution="hardware"))
    monkeypatch.setattr(selection, "_availability", {})
    assert pt.execution() == execution
    if execution != "hardware":
        generic = type(plugins.registry().backends["generic"])(chosen.spec.device_type)  # type: ignore[call-arg]
        monkeypatch.setattr(generic, "probe", lambda: dataclasses.replace(real, execution="hardware"))
        assert pt.execution(generic) == execution


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_profile(name: str, execution: str, device: torch.device, tmp_path: Path, capsys: Any, suffix: str) -> None:
    import gzip

    trace = tmp_path / f"trace.{suffix}"
    with pt.profile(trace=trace):
        x = torch.ones(16, 16, device=device)
        (x @ x).sum().item()
    raw = trace.read_bytes()
    found = json.loads(gzip.decompress(raw) if suffix.endswith("gz") else raw)
    assert (found["backend"], found["execution"]) == (name, execution)
    assert any("mm" in event.get("name", "") for event in found["traceEvents"])
    printed = capsys.readouterr().out
    assert ("execution: " in printed) == (execution != "hardware")
    assert execution == "hardware" or f"execution: {execution}; {NOTICE}" in printed
    assert [file.name for file in tmp_path.iterdir()] == [trace.name]


def test_the_examples_figures(name: str, execution: str, tmp_path: Path) -> None:
    model = SimpleNamespace(parameter_count=lambda: 3)
    trainer: Any = SimpleNamespace(model=model, step=1, characters=2, elapsed=1.0)
    summary = Summary.of(trainer, (1.0, 10), 3.0, 2.0)
    summary.write(tmp_path / "summary.json")
    found = json.loads((tmp_path / "summary.json").read_text())
    shown = Console(width=200, file=io.StringIO())
    shown.print(summary.table())
    assert execution in shown.file.getvalue()  # type: ignore[attr-defined]
    assert (found["backend"], found["execution"]) == (name, execution)


def test_a_rehearsals_result_cannot_claim_hardware(execution: str) -> None:
    session = current()
    assert (session.execution if session else "hardware") == execution
    fields: dict[str, Any] = {field.name: None for field in dataclasses.fields(Result) if field.init}
    with pytest.raises(ValueError, match="hardware"):
        Result(**{**fields, "execution": "hardware"})


def test_report_of_the_compatibility_mode(execution: str, name: str, tmp_path: Path, capsys: Any) -> None:
    from portable.runner import run_script

    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.ones(2, device='cuda')\n")
    assert run_script(str(script), [], backend=name, report=tmp_path / "report.json", leave=True) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert (found["backend"], found["execution"]) == (name, execution)
    assert [entry["construct"] for entry in found["entries"]] == ["torch.ones"]
    assert (execution in capsys.readouterr().err) == (execution != "hardware")
    assert Recorder().as_dict(name, execution)["execution"] == execution
