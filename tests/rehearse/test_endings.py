"""How programs end, several processes, and bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsing import SCRIPTS, at, marked, rehearse

from portable.rehearse import NOTICE, read

# --- how programs end -------------------------------------------------------------------------------------------------------


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


# --- several processes ------------------------------------------------------------------------------------------------------


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


# --- bad input --------------------------------------------------------------------------------------------------------------


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
        "from portable.cli import app\n"
        f"app(['rehearse', '--backend', 'ascend', {str(SCRIPTS / 'loop.py')!r}, '2'], prog_name='portable')\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("portable rehearse: ") and done.stderr.count("\n") == 1
    assert "ascend" in done.stderr and "AWS Trainium2" in done.stderr and "one slot" in done.stderr
