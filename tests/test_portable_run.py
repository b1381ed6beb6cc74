"""`portable run` as a process: Python's own behaviour is the reference, and plain CPU runs of the same scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
RUN = ("-m", "portable", "run", "--backend", "cpu")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PORTABLE_BACKEND")


def python(*arguments: str | Path, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=170)


def report_of(path: Path) -> dict[str, dict[str, Any]]:
    """A report's entries by construct."""
    found = json.loads(path.read_text())
    assert found["schema"] == 1 and found["backend"] == "cpu"
    return {entry["construct"]: entry for entry in found["entries"]}


# --- how a program ends -----------------------------------------------------------------------------------------------------


ENDINGS = ["return", "text", "chain", "interrupt"]
MORE_ENDINGS = ["number", "none", "raise", "inside", "hook"]


def slow(*values: Any) -> Any:
    """Variants that differ little from those taken by default; each costs a start of PyTorch or several."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("how", [*ENDINGS, *map(slow, MORE_ENDINGS)])
def test_a_program_ends_as_under_python(how: str, tmp_path: Path) -> None:
    script, report = SCRIPTS / "ending.py", tmp_path / "report.json"
    found = python(*RUN, "--quiet", "--report", report, script, how)
    # The reference is the script under Python itself, with the device replaced in its text.
    plain = tmp_path / "ending.py"
    plain.write_text(script.read_text().replace('"cuda"', '"cpu"').replace(".cuda()", ""))
    expected = python(plain, how)
    assert found.stdout == expected.stdout
    assert found.stderr.replace(str(script), "FILE").replace('"cuda"', '"cpu"').replace(".cuda()", "") == (
        expected.stderr.replace(str(plain), "FILE")
    )
    # A signal ends Python itself by that signal, which a shell reports as 130.
    assert found.returncode == {-2: 130}.get(expected.returncode, expected.returncode)
    assert report_of(report)["torch.zeros"]["kind"] == "redirected"  # the exit handler's included


def test_an_error_of_ours_has_the_scripts_traceback_only(tmp_path: Path) -> None:
    found = python(*RUN, "--report", tmp_path / "report.json", SCRIPTS / "ending.py", "unsupported")
    assert found.returncode == 1
    assert "portable.errors.UnsupportedError: CUDAGraph is not available on the cpu backend: " in found.stderr
    assert found.stderr.count("  File ") == 1 and "ending.py" in found.stderr
    assert report_of(tmp_path / "report.json")["torch.cuda.CUDAGraph"]["kind"] == "no equivalent"
    whole = python(*RUN, SCRIPTS / "ending.py", "unsupported", PORTABLE_FULL_TRACEBACK="1")
    assert whole.stderr.count("  File ") > 2


def test_os_exit_is_the_programs_own_way_out(tmp_path: Path) -> None:
    found = python(*RUN, "--report", tmp_path / "report.json", SCRIPTS / "ending.py", "leave")
    assert (found.returncode, found.stdout, found.stderr) == (5, "", "")
    assert not (tmp_path / "report.json").exists()


def test_a_forked_child_reports_nothing_of_its_own() -> None:
    found = python(*RUN, SCRIPTS / "ending.py", "fork")
    assert found.returncode == 0
    assert found.stderr.count("portable run: CUDA on the cpu backend") == 1


# --- what a program sees ----------------------------------------------------------------------------------------------------


@pytest.fixture
def packaged(tmp_path: Path) -> Path:
    """A folder with the describing script as a file, a folder, an archive, a module and a package."""
    text = (SCRIPTS / "describe.py").read_text()
    for name in ("describe.py", "folder/__main__.py", "package/__init__.py", "package/__main__.py", "package/inner.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else text)
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", text)
    return tmp_path


@pytest.mark.parametrize(
    "how",
    [
        ("describe.py", "a", "--b", "--help"),
        slow(("./describe.py",)),
        ("folder", "x"),
        slow(("archive.zip", "y")),
        slow(("-m", "describe", "--backend", "z")),
        ("-m", "package", "-m"),
        slow(("-m", "package.inner")),
    ],
    ids=" ".join,
)
def test_a_program_sees_what_python_shows_it(packaged: Path, how: tuple[str, ...]) -> None:
    expected = json.loads(python(*how, folder=packaged).stdout)
    found = python(*RUN, *how, folder=packaged)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == expected


@pytest.mark.slow
def test_a_script_in_another_folder(packaged: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    expected = json.loads(python(packaged / "describe.py", folder=elsewhere).stdout)
    assert json.loads(python(*RUN, packaged / "describe.py", folder=elsewhere).stdout) == expected


# --- bad input --------------------------------------------------------------------------------------------------------------


def test_a_missing_script(tmp_path: Path) -> None:
    found = python(*RUN, "--report", tmp_path / "report.json", "nope.py", folder=tmp_path)
    assert found.returncode == python("nope.py", folder=tmp_path).returncode == 2
    assert f"portable run: no script 'nope.py' in {tmp_path}. Name an existing script, or a module with -m." in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-m", "nope"), "No module named nope"),
        slow(("empty",), "can't find '__main__' module in"),
        (("wrong.py",), "SyntaxError"),
    ],
)
def test_what_cannot_be_run_fails_as_under_python(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong.py").write_text("print('a'\n")
    expected, found = python(*arguments, folder=tmp_path), python(*RUN, "--quiet", *arguments, folder=tmp_path)
    assert found.returncode == expected.returncode == 1
    assert message in found.stderr and message in expected.stderr
    assert "Traceback" not in found.stderr


def test_an_unknown_and_an_unavailable_backend() -> None:
    for name, message in (("gpu", "backend 'gpu' was asked for"), ("neuron", "backend 'neuron' was asked for")):
        found = python("-m", "portable", "run", "--backend", name, SCRIPTS / "describe.py")
        assert found.returncode == 1 and found.stdout == ""
        assert message in found.stderr and "Traceback" not in found.stderr


def test_a_report_that_cannot_be_written_leaves_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = python(*RUN, "--report", tmp_path / "file" / "report.json", SCRIPTS / "ending.py", "number")
    assert found.returncode == 7
    assert "portable run: the report could not be written to" in found.stderr


@pytest.mark.slow
def test_an_older_report_survives_a_failed_write(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text("{}")
    found = python(*RUN, "--quiet", "--report", report, "nope.py", folder=tmp_path)
    assert found.returncode == 2 and report.read_text() == "{}"


# --- training programs ------------------------------------------------------------------------------------------------------


def losses(result: subprocess.CompletedProcess[str]) -> list[float]:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])["losses"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the training script under Python itself, with its own switch to the CPU."""
    folder = tmp_path_factory.mktemp("reference")
    return losses(python(SCRIPTS / "train_gpt.py", "--device=cpu", "--dtype=float32", "--steps=8", folder=folder))


def test_training_and_resuming_give_the_losses_of_the_cpu(reference: list[float], tmp_path: Path) -> None:
    script = SCRIPTS / "train_gpt.py"
    first = python(*RUN, "--report", tmp_path / "first.json", script, "--dtype=float32", folder=tmp_path)
    second = python(*RUN, "--report", tmp_path / "second.json", script, "--dtype=float32", "--resume=True", folder=tmp_path)
    assert losses(first) + losses(second) == reference
    assert json.loads(first.stdout)["device"] == "cuda"  # the program's own word for it
    found = report_of(tmp_path / "second.json")
    assert found["Tensor.to"]["count"] == 8  # two tensors a step
    assert found["torch.load"]["kind"] == "redirected"
    assert found["Tensor.pin_memory"]["kind"] == "changed"
    assert "train_gpt.py:" in found["Tensor.to"]["where"]
    table = first.stderr
    for text in ("portable run: CUDA on the cpu backend", "Tensor.pin_memory", "redirected"):
        assert text in table


@pytest.mark.parametrize("dtype", [slow("bfloat16"), "float16"])
def test_mixed_precision_trains(reference: list[float], tmp_path: Path, dtype: str) -> None:
    found = losses(python(*RUN, SCRIPTS / "train_gpt.py", f"--dtype={dtype}", folder=tmp_path))
    assert found == pytest.approx(reference[:4], rel=0.02)


def test_under_torchrun_two_processes_give_the_losses_of_one(reference: list[float], tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    script = (*RUN, "--report", tmp_path / "report.json", SCRIPTS / "train_gpt.py", "--dtype=float32", "--steps=8")
    found = python(*launcher, *script, folder=tmp_path)
    assert losses(found) == pytest.approx(reference, rel=1e-5)
    assert found.stderr.count("portable run: CUDA on the cpu backend") == 1  # rank 0 only
    entries = report_of(tmp_path / "report.json")
    assert entries["torch.distributed backend"]["detail"] == "nccl became gloo"
    assert entries["DistributedDataParallel(device_ids=)"]["count"] == 1


@pytest.mark.parametrize("context", ["fork", "spawn", slow("forkserver")])
def test_loader_workers(context: str, tmp_path: Path) -> None:
    found = python(*RUN, "--report", tmp_path / "report.json", SCRIPTS / "classify.py", context)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "accuracy 48/48, peak True\n"
    report = json.loads((tmp_path / "report.json").read_text())
    entries = {entry["construct"]: entry for entry in report["entries"]}
    assert report["child_processes"] == 2
    assert entries["torch.zeros"]["count"] == 4 * 48  # four passes, all of them in workers
    assert entries["nn.DataParallel"]["kind"] == "changed"


def test_processes_that_the_program_spawns(tmp_path: Path) -> None:
    found = python(*RUN, "--report", tmp_path / "report.json", SCRIPTS / "spawned.py", tmp_path / "store")
    assert found.returncode == 0, found.stderr
    # The mean over both of d/dw (w . (t + gpu)) = t + gpu, t = 0 1 2 3.
    assert found.stdout == "gradient [0.5, 1.5, 2.5, 3.5] __mp_main__\n"
    entries = report_of(tmp_path / "report.json")
    assert entries["torch.distributed backend"]["count"] == 2
    assert entries["torch.arange"]["count"] == 3  # at import, in the program and in both children
