"""Programs with known faults, and what is said about each. Each rehearsal costs a start of PyTorch: many checks share one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rehearsing import SCRIPTS, at, marked, rehearse

from portable.rehearse import NOTICE, SCHEMA, Result, read

ROOT = Path(__file__).parents[2]


# --- a training loop --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Any, str, subprocess.CompletedProcess[str]]:
    """(result, its JSON, the Markdown section, the process) of six steps."""
    folder = tmp_path_factory.mktemp("loop")
    files = ("--json", folder / "r.json", "--markdown", folder / "r.md")
    done = rehearse(*files, "--generation", "trn2", SCRIPTS / "loop.py", "6")
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("*.partial"))
    return read(folder / "r.json"), json.loads((folder / "r.json").read_text()), (folder / "r.md").read_text(), done


def test_what_happens_in_every_step(loop: Any) -> None:
    result = loop[0]
    expected = {
        ("REH-SYNC-ITEM", "item"): (6, 1.0),
        ("REH-SYNC-BOOLEAN-INDEX", "boolean"): (6, 1.0),
        ("REH-COMPILE-EVERY-STEP", "growing"): (12, 2.0),  # the fill and the product, each with a new length
        ("REH-ATTENTION-MATH", "dropout"): (6, 1.0),
        ("REH-FALLBACK", "fallback"): (6, 1.0),
    }
    for (rule, mark), (count, per_step) in expected.items():
        found = at(result, rule, marked("loop.py", mark))
        assert (found.count, found.per_step, found.when, found.severity) == (count, per_step, "every step", "major")
        assert found.code.endswith(f"# MARK {mark}") and found.file.endswith("loop.py")
        assert found.cost and found.fix
    majors = [f for f in result.findings if f.severity == "major"]
    assert len(majors) == len(expected)
    assert "dropout_p is 0.5" in at(result, "REH-ATTENTION-MATH").detail
    assert "neuronx-cc" in at(result, "REH-COMPILE-EVERY-STEP").cost  # the vendor's words, not the general ones
    assert "2.9 % of all operator calls" in at(result, "REH-FALLBACK").detail
    assert (result.operators.calls, result.operators.fallbacks) == (209, 6)


def test_what_happens_in_some_steps_or_once(loop: Any) -> None:
    result = loop[0]
    printed = at(result, "REH-SYNC-PRINT", marked("loop.py", "print"))
    assert (printed.when, printed.severity) == ("some steps", "minor") and printed.count > 1
    late = at(result, "REH-COMPILE-LATE", marked("loop.py", "late"))
    assert (late.count, late.severity) == (2, "minor") and "0 in the first 2 steps, 2 later" in late.detail
    once = at(result, "REH-COMPILE-FIRST", marked("loop.py", "forward"))
    assert (once.count, once.when, once.severity) == (1, "start or end", "info")
    written = at(result, "REH-COMPAT-REDIRECTED", 9)
    assert (written.what, written.count, written.severity) == ("Tensor.cuda", 2, "info")  # weight and bias


def test_the_rest_of_the_result(loop: Any) -> None:
    result, data, _, done = loop
    assert done.stdout.splitlines()[-1] == "done 6" and len(done.stdout.splitlines()) == 2
    assert (result.verdict.runs, result.complete, result.execution) == ("yes", True, "emulated")
    run = result.run
    assert (run.ended, run.exit_code, run.steps, run.processes, run.arguments) == ("the end", 0, 6, 1, ("6",))
    assert (result.target.backend, result.target.generation, result.target.memory) == ("neuron", "trn2", 24 * 2**30)
    assert result.memory.total == 24 * 2**30 and 0 < result.memory.peak < 2**20
    assert result.precision.autocast == "bfloat16" and not result.precision.scaler
    assert [(a.fused, a.count) for a in result.attention] == [(False, 6)]
    (moved,) = result.copies
    assert (moved.direction, moved.count, moved.bytes) == ("to the device", 2, 4 * (8 * 4 + 4))
    assert result.assumptions and all(a.why for a in result.assumptions)
    assert result.environment.command.startswith("portable rehearse --backend neuron --json")
    assert (data["schema"], data["notice"], next(iter(data))) == (SCHEMA, NOTICE, "schema")
    assert json.loads(json.dumps(result.as_dict())) == data


def test_every_output_says_what_it_is(loop: Any) -> None:
    _, data, section, done = loop
    assert NOTICE in section and NOTICE in done.stderr and data["notice"] == NOTICE
    assert "Execution: `emulated`" in section and "execution: emulated" in done.stderr


def test_the_views_name_line_cost_and_fix(loop: Any) -> None:
    _, _, section, done = loop
    line = marked("loop.py", "item")
    for view in (section, done.stderr):
        for text in ("It would run", "REH-SYNC-ITEM", f"loop.py:{line}", "1 a step", "5 major, 3 minor", "dropout_p is 0.5"):
            assert text in view, text
    assert section.startswith("<!-- portable.rehearsal -->\n## Rehearsal of ")
    assert "| major | " in section and "torch.where" in section


# --- what the device refuses, or gets wrong ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("refused")
    done = rehearse("--json", folder / "r.json", "--memory", "128MiB", "--fail-on", "wrong", SCRIPTS / "refusals.py")
    return read(folder / "r.json"), done


def test_refusals_are_all_found_in_one_run(refused: Any) -> None:
    result, done = refused
    assert done.stdout == "end True\n"
    assert done.returncode == 3  # --fail-on
    assert (result.run.exit_code, result.run.ended, result.target.memory) == (0, "the end", 128 * 2**20)
    for mark in ("rope", "product"):
        found = at(result, "REH-REFUSED-DTYPE", marked("refusals.py", mark))
        assert found.severity == "blocker" and found.what == "complex64" and "view_as_real" in found.fix
    assert at(result, "REH-OOM").line == marked("refusals.py", "memory")
    assert "268,435,456 bytes" in at(result, "REH-OOM").detail
    assert result.verdict.runs == "no"
    assert {int(line.rpartition(":")[2]) for line in result.verdict.lines} == {
        marked("refusals.py", mark) for mark in ("rope", "product", "memory")
    }
    assert {(d.dtype, d.line) for d in result.dtypes_refused} == {
        ("complex64", marked("refusals.py", "rope")),
        ("complex64", marked("refusals.py", "product")),
    }


@pytest.mark.parametrize(
    ("rule", "mark", "count"),
    [
        ("REH-WRONG-FLOAT64", "float64", 1),
        ("REH-WRONG-INT64", "int64", 2),
        ("REH-WRONG-INTEGER-MATMUL", "matmul", 1),
        ("REH-WRONG-ATTENTION", "hazard", 1),
    ],
)
def test_silently_wrong(refused: Any, rule: str, mark: str, count: int) -> None:
    found = at(refused[0], rule, marked("refusals.py", mark))
    assert (found.severity, found.count) == ("wrong", count)
    assert found.detail and found.cost and found.fix


def test_graphs_of_torch_compile(refused: Any) -> None:
    result, line = refused[0], marked("refusals.py", "graph")
    (graphs,) = result.graphs
    assert (graphs.graphs, graphs.recompilations) == (2, 1) and f"refusals.py:{line}" in graphs.function
    found = at(result, "REH-GRAPH-RECOMPILE", line)
    assert found.count == 1 and "dynamic=False" in found.fix


def test_attention_paths(refused: Any) -> None:
    paths = {a.line: (a.fused, a.reasons) for a in refused[0].attention}
    assert paths[marked("refusals.py", "fused")] == (True, ())
    assert paths[marked("refusals.py", "mask")] == (False, ("a mask is given",))
    assert "not both multiples of 512" in paths[marked("refusals.py", "hazard")][1][0]


def test_strict_stops_at_the_first_refusal(tmp_path: Path) -> None:
    done = rehearse("--json", tmp_path / "r.json", "--strict", SCRIPTS / "refusals.py")
    result, line = read(tmp_path / "r.json"), marked("refusals.py", "rope")
    assert done.returncode == 1 and done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.partition("\n\n")[0].count("  File ") == 1  # the program's frames only
    assert result.verdict.runs == "no" and result.run.strict
    assert [v.rpartition(":")[2] for v in result.verdict.lines] == [str(line)]
    assert result.failure is not None
    assert (result.failure.cause, result.failure.rule, result.failure.line) == ("device", "REH-REFUSED-DTYPE", line)
    assert at(result, "REH-REFUSED-DTYPE").line == line


# --- the other vendor -------------------------------------------------------------------------------------------------------


def test_on_ascend(tmp_path: Path) -> None:
    folder = ROOT / ".vendor"
    if not (folder / "torch_npu").is_dir() and importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not here: make .vendor/torch_npu unpacks it")
    place = {"PORTABLE_ASCEND_HOST": f"1,path={folder}"} if (folder / "torch_npu").is_dir() else {}
    done = rehearse("--json", tmp_path / "r.json", SCRIPTS / "loop.py", "6", backend="ascend", **place)
    assert done.returncode == 0, done.stderr
    result = read(tmp_path / "r.json")
    assert (result.execution, result.target.backend) == ("vendor-package-on-host", "ascend")
    assert result.verdict.runs == "yes" and "vendor-package-on-host" in done.stderr and NOTICE in done.stderr
    found = at(result, "REH-SYNC-ITEM", marked("loop.py", "item"))
    assert (found.count, found.per_step, found.severity) == (6, 1.0, "major") and "stream" in found.cost
    assert not [f for f in result.findings if f.rule.startswith("REH-COMPILE-EVERY")]  # a 910B compiles nothing per shape
    assert [(a.fused, a.count) for a in result.attention] == [(True, 6)]
