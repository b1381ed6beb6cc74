"""pt.compile: what is chosen, what is dropped, when the model stays eager, and that results agree."""

from __future__ import annotations

import logging

import fakes
import pytest
import torch
from portable_cpu.backend import CpuBackend
from torch import nn

import portable as pt
from portable import compiling
from portable.spec import CompileSpec

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch, caplog):
    monkeypatch.setattr(compiling, "_warned", set())
    caplog.set_level(logging.WARNING, logger="portable")


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def some_compiler(monkeypatch, tmp_path):
    path = tmp_path / "c++"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_the_cpu_uses_inductor(some_compiler):
    choice = pt.explain_compile(fullgraph=True, mode=None)
    assert (choice.backend, choice.kwargs, choice.dropped) == ("inductor", {"fullgraph": True}, {})


def test_no_compiler_means_eager_with_the_reason(no_compiler, caplog):
    choice = pt.explain_compile(fullgraph=True)
    assert (choice.backend, choice.kwargs) == (None, {})
    assert all(part in choice.reason for part in ("no C++ compiler", "g++", "CXX"))
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert [pt.compile(model) is model for model in models] == [True, True]
    assert [record.getMessage() for record in caplog.records] == [
        f"pt.compile: the model runs in eager mode on the cpu backend: {choice.reason}"  # once, not for each model
    ]


def test_another_compiler_than_inductors_does_not_count(no_compiler, tmp_path, monkeypatch):
    """On Linux Inductor calls g++ and nothing else unless CXX says so (torch/_inductor/config.py)."""
    monkeypatch.setattr("sys.platform", "linux")
    clang = tmp_path / "clang++"
    clang.write_text("#!/bin/sh\n")
    clang.chmod(0o755)
    assert "'g++'" in pt.explain_compile().reason
    monkeypatch.setenv("CXX", "clang++")
    assert "C++ compiler was found" not in pt.explain_compile().reason
    monkeypatch.setenv("CXX", "absent++")
    assert "'absent++'" in pt.explain_compile().reason


def test_missing_header_files_mean_eager(some_compiler, monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    choice = pt.explain_compile()
    assert choice.backend is None
    assert all(part in choice.reason for part in ("Python.h", "python3-dev"))


def test_forbidden_mode_is_dropped_with_one_warning(some_compiler, caplog):
    choice = pt.explain_compile(mode="reduce-overhead", dynamic=True)
    assert choice.kwargs == {"dynamic": True}
    assert "CUDA graphs" in choice.dropped["mode"]
    for _ in range(2):
        pt.compile(nn.Linear(2, 2), mode="reduce-overhead")
    assert [record.getMessage() for record in caplog.records] == [
        f"pt.compile: mode is not passed on to the cpu backend: {choice.dropped['mode']}"
    ]


def test_allowed_mode_is_passed_on(some_compiler):
    assert pt.explain_compile(mode="max-autotune").kwargs == {"mode": "max-autotune"}


def test_a_given_backend_needs_no_compiler(no_compiler):
    choice = pt.explain_compile(backend="eager")
    assert (choice.backend, choice.reason) == ("eager", "the backend was given by the caller")
    function = pt.compile(lambda x: x + 1, backend="eager")
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0))


def test_misspelt_argument_is_refused():
    with pytest.raises(TypeError, match=r"fulgraph.*fullgraph"):
        pt.explain_compile(fulgraph=True)
    with pytest.raises(TypeError, match="fulgraph"):
        pt.compile(nn.Linear(2, 2), fulgraph=True)


def test_declared_arguments_and_prohibitions(plugged):
    declared = CompileSpec(
        "made-up", "it compiles", kwargs={"dynamic": False}, forbidden={"dynamic": "shapes are static", "options": "none"}
    )
    fake = fakes.Fake(fakes.spec(compile=declared))
    plugged()
    asked_nothing = pt.explain_compile(fake)
    assert (asked_nothing.backend, asked_nothing.kwargs, asked_nothing.dropped) == ("made-up", {"dynamic": False}, {})
    asked = pt.explain_compile(fake, dynamic=True, options={"a": 1}, fullgraph=True)
    assert asked.kwargs == {"dynamic": False, "fullgraph": True}
    assert asked.dropped == {"dynamic": "shapes are static", "options": "none"}
    agreed = pt.explain_compile(fake, dynamic=False)  # what is declared anyway is not worth a warning
    assert (agreed.kwargs, agreed.dropped) == ({"dynamic": False}, {})


def test_missing_compiler_package_means_eager(plugged):
    plugged()
    fake = fakes.Fake(fakes.spec(compile=CompileSpec("made-up", "it compiles", requires="no_such_module")))
    choice = pt.explain_compile(fake)
    assert choice.backend is None
    assert "no_such_module" in choice.reason


def test_backend_without_compiler_means_eager(plugged):
    plugged()
    assert pt.explain_compile(fakes.Fake()).reason == "it has no compiler"


@pytest.mark.skipif(CpuBackend().compile_problem() is not None, reason="this machine has no C++ compiler")
def test_compiled_equals_eager():
    """Forward and backward of a compiled network against float64; and the decorator forms give the same function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    exact = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).double()
    exact.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
    expected = exact(x.double())
    expected.square().sum().backward()
    compiled = pt.compile(model, fullgraph=True)
    assert compiled is not model
    found = compiled(x)
    found.square().sum().backward()
    assert fakes.rel_error(found, expected) < 1e-6
    for mine, reference in zip(model.parameters(), exact.parameters(), strict=True):
        assert fakes.rel_error(mine.grad, reference.grad) < 1e-5


def test_decorator_forms():
    @pt.compile
    def bare(x):
        return 2 * x

    @pt.compile(backend="eager", fullgraph=True)
    def given(x):
        return 2 * x

    x = torch.ones(3)
    assert torch.equal(given(x), 2 * x)
    assert given is not bare
    assert callable(bare)
