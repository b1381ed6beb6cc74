"""Every kind of finding on Ascend: the vendor's own package decides most of them, so they are asserted of it, too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from rehearsing import SCRIPTS, at, marked, rehearse, vendor

from portable.rehearse import NOTICE, Result, read

SCRIPT = "on_ascend.py"


def line(mark: str) -> int:
    return marked(SCRIPT, mark)


def run(folder: Path, how: str, *options: str) -> tuple[Result, subprocess.CompletedProcess[str]]:
    files = ("--json", folder / "r.json", "--markdown", folder / "r.md")
    done = rehearse(*files, *options, SCRIPTS / SCRIPT, how, backend="ascend", **vendor("ascend"))
    result = read(folder / "r.json")
    assert result.execution == "vendor-package-on-host"
    assert NOTICE in done.stderr and NOTICE in (folder / "r.md").read_text()
    return result, done


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, subprocess.CompletedProcess[str]]:
    """On the first series, until its memory is full."""
    return run(tmp_path_factory.mktemp("first"), "memory", "--generation", "Ascend910A", "--memory", "256MiB")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, subprocess.CompletedProcess[str]]:
    """On the second, until an operator of the vendor refuses its inputs."""
    return run(tmp_path_factory.mktemp("second"), "operator", "--generation", "Ascend910B2")


@pytest.mark.parametrize(
    ("rule", "mark", "what"),
    [
        ("REH-SYNC-ITEM", "item", "item"),
        ("REH-SYNC-BOOLEAN-INDEX", "boolean", "boolean indexing"),
        ("REH-FALLBACK", "fallback", "linalg_cholesky_ex"),
    ],
)
def test_what_happens_in_every_step(second: tuple[Result, object], rule: str, mark: str, what: str) -> None:
    found = at(second[0], rule, line(mark))
    assert (found.what, found.count, found.per_step, found.when, found.severity) == (what, 4, 1.0, "every step", "major")
    assert "on_ascend.py" in found.file and found.code.endswith(f"# MARK {mark}") and found.cost and found.fix


def test_fallbacks_and_waits_outside_of_the_steps(second: tuple[Result, object]) -> None:
    result = second[0]
    assert [(f.what, f.line, f.count) for f in result.fallbacks] == [("aten::linalg_cholesky_ex", line("fallback"), 4)]
    assert result.operators.fallbacks == 4
    assert "TORCH_NPU_FALLBACK_CPU_DISABLE" in at(result, "REH-FALLBACK").fix
    assert (
        at(result, "REH-SYNC-PRINT", line("print")).severity
        == at(result, "REH-SYNC-NONZERO", line("nonzero")).severity
        == "info"
    )


def test_a_dtype_that_the_generation_lacks(first: tuple[Result, object], second: tuple[Result, object]) -> None:
    found = at(first[0], "REH-REFUSED-DTYPE", line("bfloat16"))
    assert (found.severity, found.what) == ("blocker", "bfloat16") and "Ascend 910A" in found.detail
    assert [(d.dtype, d.line) for d in first[0].dtypes_refused] == [("bfloat16", line("bfloat16"))]
    assert not [f for f in second[0].findings if f.line == line("bfloat16") and f.severity == "blocker"]


def test_the_path_of_attention_and_why(first: tuple[Result, object], second: tuple[Result, object]) -> None:
    paths = {a.line: a for a in second[0].attention}
    assert {paths[line(mark)].path for mark in ("plain", "boolean mask")} == {"npu_fusion_attention"}
    assert paths[line("bias")].path == "math" and "not boolean: pass mask == 0" in paths[line("bias")].reasons[0]
    assert [f.line for f in second[0].findings if f.rule == "REH-ATTENTION-MATH"] == [line("bias")]
    assert all(a.path == "math" and "Ascend910A has no fused attention kernel" in a.reasons[0] for a in first[0].attention)
    assert {a.line for a in first[0].attention} == {line(mark) for mark in ("plain", "boolean mask", "bias")}


def test_the_first_series_compiles_each_shape(first: tuple[Result, object], second: tuple[Result, object]) -> None:
    assert first[0].compiles and not second[0].compiles
    assert "jit_compile" in next(f for f in first[0].findings if f.rule == "REH-COMPILE-FIRST").cost


def test_out_of_memory_names_the_line(first: tuple[Result, subprocess.CompletedProcess[str]]) -> None:
    result, done = first
    assert done.returncode == 1 and result.run.exit_code == 1
    found = at(result, "REH-OOM", line("memory"))
    assert found.severity == "blocker" and "NPU out of memory" in found.detail  # the vendor's own words
    assert result.failure is not None and (result.failure.cause, result.failure.line) == ("device", line("memory"))
    assert result.verdict.runs == "no" and f"{found.file}:{found.line}" in result.verdict.lines


def test_the_peak_of_memory_and_its_line(second: tuple[Result, subprocess.CompletedProcess[str]]) -> None:
    memory = second[0].memory
    assert memory.total == 64 * 2**30 and 2**26 <= memory.peak < 2**26 + 2**21  # 2^24 numbers of four bytes
    assert memory.line == line("large") and f"on_ascend.py:{line('large')}" in second[1].stderr


def test_a_refusal_of_the_vendors_operator_names_the_line(second: tuple[Result, subprocess.CompletedProcess[str]]) -> None:
    result, done = second
    assert done.returncode == 1 and result.failure is not None
    assert (result.failure.cause, result.failure.rule, result.failure.line) == ("device", "REH-REFUSED-DTYPE", line("operator"))
    assert at(result, "REH-REFUSED-DTYPE", line("operator")).severity == "blocker"
    assert result.verdict.runs == "no"


def test_a_failure_of_the_programs_own(tmp_path: Path) -> None:
    result, done = run(tmp_path, "own")
    assert done.returncode == 1 and "KeyError: 'of its own'" in done.stderr
    assert result.failure is not None
    assert (result.failure.cause, result.failure.line, result.verdict.runs) == ("script", line("own"), "unknown")
    assert not [f for f in result.findings if f.severity == "blocker"]
