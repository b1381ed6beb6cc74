"""What `portable info` collects and shows."""

from __future__ import annotations

import io
import json
import platform

import fakes
import pytest
import torch
from rich.console import Console

import portable as pt
from portable import _loading
from portable.info import SCHEMA, collect
from portable.info_view import show, size
from portable.spec import Availability, CompileSpec


def shown(found=None) -> str:
    out = io.StringIO()
    show(found or collect(), Console(file=out, width=200))
    return out.getvalue()


def backend(found: dict, name: str) -> dict:
    return next(entry for entry in found["backends"] if entry["name"] == name)


TOP = {"schema": int, "versions": dict, "active": str, "problem": type(None), "backends": list, "plugin_problems": list}
BACKEND = {
    "name": str, "vendor": str, "device_type": str, "provider": str, "active": bool, "available": bool, "execution": str,
    "reason": str, "next_step": str, "devices": list, "precision": dict, "compile": dict, "process_group": str,
    "versions": dict, "environment": dict,
}  # fmt: skip
DEVICE = {"index": int, "name": str, "generation": str, "memory": int, "storage": list, "matmul": list}


def test_schema(on_cpu):
    found = json.loads(json.dumps(collect().as_dict()))
    assert {key: type(value) for key, value in found.items()} == TOP
    assert (found["schema"], found["active"]) == (SCHEMA, "cpu")
    for entry in found["backends"]:
        assert {key: type(value) for key, value in entry.items()} == BACKEND
    cpu = backend(found, "cpu")
    assert [{key: type(value) for key, value in device.items()} for device in cpu["devices"]] == [DEVICE]
    assert set(cpu["precision"]) == {"autocast", "scaler", "reason"}
    assert set(cpu["compile"]) == {"backend", "reason", "options"}


def test_values_of_the_cpu(on_cpu, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = collect().as_dict()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["portable"] == pt.__version__
    cpu = backend(found, "cpu")
    assert (cpu["active"], cpu["available"], cpu["execution"], cpu["process_group"]) == (True, True, "hardware", "gloo")
    assert cpu["devices"][0]["name"] == pt.get_device_name()
    assert cpu["devices"][0]["memory"] == pt.memory.info()[1]
    assert {"float32", "float64"} <= set(cpu["devices"][0]["matmul"]) <= set(cpu["devices"][0]["storage"])
    assert cpu["environment"]["OMP_NUM_THREADS"] == "3"
    text = shown()
    for part in (torch.__version__, pt.get_device_name(), size(pt.memory.info()[1]), "float32", "gloo", "OMP_NUM_THREADS"):
        assert part in text


def test_backends_are_ranked_and_reasons_shown(plugged):
    absent = Availability(False, "the package [acme] is not installed", "pip install acme")
    plugged(
        fakes.Fake(fakes.spec("good", priority=200, compile=CompileSpec("made-up", "it compiles", kwargs={"dynamic": False}))),
        fakes.Fake(fakes.spec("missing", priority=300), answer=absent),
    )
    found = collect().as_dict()
    assert [entry["name"] for entry in found["backends"]] == ["missing", "good", "cpu"]
    assert found["active"] == "good"
    good = backend(found, "good")
    assert good["provider"] == "good (fakes 1.0)"
    assert good["execution"] == "emulated"  # never passed off as hardware
    assert [device["index"] for device in good["devices"]] == [0, 1]
    assert good["compile"] == {"backend": "made-up", "reason": "it compiles", "options": {"dynamic": False}}
    missing = backend(found, "missing")
    assert (missing["devices"], missing["compile"]) == ((), {})
    text = shown()
    for part in ("the package [acme] is not installed", "next: pip install acme", "emulated", "made-up dynamic=False"):
        assert part in text


def test_wrong_environment_variable_is_a_problem_not_a_crash(plugged, monkeypatch):
    plugged()
    monkeypatch.setenv("PORTABLE_BACKEND", "[red]gpu")
    found = collect()
    assert found.active is None
    assert "'[red]gpu'" in found.problem
    assert [entry.name for entry in found.backends] == ["cpu"]
    text = shown(found)
    assert "'[red]gpu' was asked for by the environment variable PORTABLE_BACKEND" in text
    assert "AVX" in text or "CPU" in text


def test_a_backend_that_fails_while_described_keeps_its_row(plugged):
    class Broken(fakes.Fake):
        def generation(self, index=0):
            raise RuntimeError("driver gone")

    plugged(Broken())
    pt.use("cpu")
    found = collect()
    row = next(entry for entry in found.backends if entry.name == "fake")
    assert row.available
    assert row.devices == ()
    assert [(p["phase"], "driver gone" in p["message"]) for p in found.plugin_problems] == [("describe", True)]
    assert "driver gone" in shown(found)


def test_a_device_package_that_failed_to_load_is_named(on_cpu, monkeypatch):
    monkeypatch.setitem(_loading.autoload_errors, "torch_acme", ImportError("libacme.so: cannot open"))
    found = collect()
    assert found.versions["torch.backends entry torch_acme"] == "failed to load: libacme.so: cannot open"
    assert "torch.backends entry torch_acme: failed to load: libacme.so" in shown(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "unknown"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (141 * 2**30, "141.0 GiB"), (3 * 2**50, "3072.0 TiB")],
)
def test_size(value, text):
    assert size(value) == text
