"""`portable rehearse` as a process: programs with known faults, what is said about each, and how programs end.

Each rehearsal costs a start of PyTorch, so many checks share one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from portable.rehearse import NOTICE, SCHEMA, Finding, Result, read

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
_LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PORTABLE_BACKEND", "PORTABLE_NEURON_EMULATED")


def rehearse(
    *arguments: str | Path, backend: str = "neuron", launcher: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command; the arguments come after ``--backend``."""
    environment = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
    command = [sys.executable, *launcher, "-m", "portable", "rehearse", "--backend", backend, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)


def marked(script: str, mark: str) -> int:
    """Number of the line that carries a mark."""
    lines = (SCRIPTS / script).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# MARK {mark}"))
    return number


def at(result: Result, rule: str, line: int | None = None) -> Finding:
    """The one finding of a rule in the forward pass, at a line if one is given."""
    found = [f for f in result.findings if f.rule == rule and line in (None, f.line) and not f.backward]
    assert len(found) == 1, [(f.rule, f.line, f.what) for f in result.findings]
    return found[0]


# --- a training loop ---------------------------------------------------------------------------------------------------------


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


# --- what the device refuses, or gets wrong ----------------------------------------------------------------------------------


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


# --- how programs end --------------------------------------------------------------------------------------------------------


def test_the_step_limit_runs_what_a_program_does_at_its_end(tmp_path: Path) -> None:
    done = rehearse("--json", tmp_path / "r.json", "--steps", "3", SCRIPTS / "ending.py", "finally")
    # The third step ends the program from within optimizer.step(): two were counted, no handler of errors saw it.
    assert (done.returncode, done.stdout) == (0, "finally 2\nexit handler\n")
    run = read(tmp_path / "r.json").run
    assert (run.ended, run.steps, run.asked_steps, run.exit_code) == ("the step limit", 3, 3, 0)


def test_a_program_that_catches_everything_is_ended_all_the_same(tmp_path: Path) -> None:
    done = rehearse("--json", tmp_path / "r.json", "--steps", "2", SCRIPTS / "ending.py", "swallow")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "caught\n" * 3 + "exit handler\n"
    result = read(tmp_path / "r.json")
    assert result.complete and result.run.ended == "the step limit" and result.run.steps >= 2


def test_an_exception_of_the_programs_own(tmp_path: Path) -> None:
    done = rehearse("--json", tmp_path / "r.json", "--fail-on", "blocker", SCRIPTS / "ending.py", "raise")
    assert done.returncode == 1 and "ValueError: of its own" in done.stderr and done.stdout == "exit handler\n"
    result = read(tmp_path / "r.json")
    assert result.failure is not None and result.failure.cause == "script" and result.failure.rule == ""
    assert (result.failure.line, result.verdict.runs) == (marked("ending.py", "raise"), "unknown")
    assert not [f for f in result.findings if f.severity == "blocker"]


def test_what_cuda_has_and_the_device_has_not(tmp_path: Path) -> None:
    done = rehearse("--json", tmp_path / "r.json", "--fail-on", "blocker", SCRIPTS / "ending.py", "unsupported")
    assert done.returncode == 3
    result = read(tmp_path / "r.json")
    assert (result.verdict.runs, result.run.exit_code) == ("no", 1)
    found = at(result, "REH-UNSUPPORTED", marked("ending.py", "unsupported"))
    assert "whole graphs" in found.detail


@pytest.mark.parametrize(("how", "status"), [("number", 7), ("leave", 5), ("SIGTERM", -signal.SIGTERM)])
def test_exit_statuses_are_the_programs(how: str, status: int, tmp_path: Path) -> None:
    done = rehearse("--json", tmp_path / "r.json", SCRIPTS / "ending.py", how)
    assert done.returncode == status, done.stderr
    result = read(tmp_path / "r.json")
    ended = {"number": "sys.exit", "leave": "os._exit"}.get(how, "a signal")
    assert (result.complete, result.run.ended, result.run.steps) == (True, ended, 2)
    assert result.run.exit_code == (status if status > 0 else None)
    assert result.verdict.runs == "unknown" and NOTICE in done.stderr
    assert done.stdout == ("exit handler\n" if how == "number" else "")


def test_what_kills_the_process_leaves_a_partial_file_and_the_old_one(tmp_path: Path) -> None:
    old = {"schema": "portable.rehearsal/1", "notice": "an older result"}
    (tmp_path / "r.json").write_text(json.dumps(old))
    done = rehearse("--json", tmp_path / "r.json", SCRIPTS / "ending.py", "SIGKILL")
    assert done.returncode == -signal.SIGKILL
    assert json.loads((tmp_path / "r.json").read_text()) == old
    partial = read(tmp_path / "r.json.partial")
    assert (partial.complete, partial.run.ended, partial.run.steps) == (False, "still running", 1)
    assert partial.verdict.runs == "unknown"


# --- several processes -------------------------------------------------------------------------------------------------------


def test_child_processes_are_counted_and_loader_workers_write_nothing(tmp_path: Path) -> None:
    done = rehearse("--json", tmp_path / "r.json", "--steps", "3", SCRIPTS / "processes.py", "a", "--b")
    assert (done.returncode, done.stdout) == (0, "total 28.0 ['a', '--b']\n"), done.stderr
    result = read(tmp_path / "r.json")
    assert (result.run.processes, result.run.steps) == (3, 3)
    found = at(result, "REH-SYNC-ITEM", marked("processes.py", "child"))
    # Each child is stopped in its third step, before the third item.
    assert (found.count, found.per_step, found.when) == (4, 2.0, "every step")
    assert at(result, "REH-SYNC-ITEM", marked("processes.py", "parent")).count == 4
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_under_torchrun_each_rank_has_a_file(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = rehearse("--json", tmp_path / "r.json", SCRIPTS / "ddp.py", launcher=launcher)
    assert done.returncode == 0, done.stderr
    results = [read(tmp_path / name) for name in ("r.json", "r.rank1.json")]
    assert [(r.run.rank, r.run.world_size, r.run.steps) for r in results] == [(0, 2, 3), (1, 2, 3)]
    assert all(r.collectives.get("all_reduce", 0) >= 3 for r in results)
    assert done.stderr.count(NOTICE) == 1  # rank 0 prints


# --- the other vendor --------------------------------------------------------------------------------------------------------


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


# --- bad input ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope.py",), "no script 'nope.py' in"),
        (("--steps", "0", "x.py"), "--steps 0 was given, but a rehearsal needs at least 1"),
        (("--steps", "-3", "x.py"), "--steps -3 was given"),
        (("--devices", "0", "x.py"), "--devices 0 was given"),
        (("--memory", "much", "x.py"), "--memory 'much' was given, which is no size of memory"),
        (("--fail-on", "all", "x.py"), "--fail-on 'all' was given; choose blocker, wrong, major"),
        (("--json", "{tmp}/file/r.json", "ok.py"), "no file can be made there"),
        (("--json", "{tmp}", "ok.py"), "which is no file"),
        (("--json", "{tmp}/file", "ok.py"), "exists and is no result of portable rehearse"),
        (("--json", "{tmp}/a", "--markdown", "{tmp}/a", "ok.py"), "--json and --markdown both name"),
        (("--generation", "trn9", "ok.py"), "--generation 'trn9' was asked for on neuron"),
        (("--backend", "tpu", "ok.py"), "backend 'tpu' was asked for by --backend"),
        (("--backend", "cpu", "ok.py"), "emulation is not available on the cpu backend"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_message_before_anything_runs(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from portable.cli import app

    (tmp_path / "file").write_text("somebody's")
    (tmp_path / "ok.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    words = [word.replace("{tmp}", str(tmp_path)) for word in arguments]
    with pytest.raises(SystemExit) as ended:
        app(["rehearse", *([] if "--backend" in words else ["--backend", "neuron"]), *words], prog_name="portable")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("portable rehearse: ") and message in said and said.count("\n") == 1
    assert (tmp_path / "file").read_text() == "somebody's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "ok.py"]


def test_nothing_to_run_and_no_backend(capsys: pytest.CaptureFixture[str]) -> None:
    from portable.cli import app

    for words, message in ((["--backend", "neuron"], "nothing to rehearse was given"), (["x.py"], "--backend")):
        with pytest.raises(SystemExit) as ended:
            app(["rehearse", *words], prog_name="portable")
        assert ended.value.code == 2 and message in capsys.readouterr().err


def test_both_vendors_in_one_process() -> None:
    code = (
        "from portable import selection; selection.find('neuron').emulate('trn2')\n"
        "import sys; from portable.cli import app\n"
        f"app(['rehearse', '--backend', 'ascend', {str(SCRIPTS / 'loop.py')!r}, '2'], prog_name='portable')\n"
    )
    place = {"PORTABLE_ASCEND_HOST": f"1,path={ROOT / '.vendor'}"} if (ROOT / ".vendor" / "torch_npu").is_dir() else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **place}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("portable rehearse: ") and done.stderr.count("\n") == 1
