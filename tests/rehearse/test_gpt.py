"""Whole trainers on both vendors: the example of this project, and one written for CUDA in a single file.

Losses are compared with the same program under Python itself on the CPU, in float32.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rehearsing import ROOT, SCRIPTS, at, marked, rehearse, vendor

from portable.rehearse import NOTICE, Result, read

TRAINER = "memmap_gpt.py"
VENDORS = ("neuron", "ascend")
EXECUTION = {"neuron": "emulated", "ascend": "vendor-package-on-host"}
FEW = ("--steps", "3", "--width", "32", "--layers", "1", "--heads", "2")


@dataclass(frozen=True)
class Done:
    """A rehearsal that came to its end."""

    result: Result
    printed: str
    table: str
    section: str
    data: dict[str, object]

    @property
    def losses(self) -> list[str]:
        return losses(self.printed)


def losses(printed: str) -> list[str]:
    return re.findall(r"^(?:step|iter) .*loss .*$", printed, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokens that the trainer reads."""
    import numpy as np

    folder = tmp_path_factory.mktemp("tokens")
    (folder / "data").mkdir()
    draw = np.random.default_rng(0)
    for name, size in (("train", 2000), ("val", 500)):
        draw.integers(0, 31, size, dtype=np.uint16).tofile(folder / "data" / f"{name}.bin")
    return folder


def rehearsed(name: str, script: Path, arguments: Sequence[str | Path], folder: Path, launcher: Sequence[str] = ()) -> Done:
    json_file, markdown = folder / f"{name}.json", folder / f"{name}.md"
    files = ("--json", json_file, "--markdown", markdown)
    done = rehearse(*files, script, *arguments, backend=name, launcher=tuple(launcher), folder=folder, **vendor(name))
    assert done.returncode == 0, done.stderr[-4000:]
    data = json.loads(json_file.read_text())
    return Done(read(json_file), done.stdout, done.stderr, markdown.read_text(), data)


def plain(*arguments: str | Path, folder: Path, **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def check_labels(done: Done, vendor: str) -> None:
    """Every output says what it is, and none that it is hardware."""
    assert NOTICE in done.table and NOTICE in done.section and done.data["notice"] == NOTICE
    assert done.data["execution"] == EXECUTION[vendor] == done.result.execution
    assert f"execution: {EXECUTION[vendor]}" in done.table and f"Execution: `{EXECUTION[vendor]}`" in done.section


# --- a trainer written for CUDA ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VENDORS)
def eager(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Done]:
    arguments = ("--dtype=float32", "--compile=False", "--out_dir=eager")
    return request.param, rehearsed(request.param, SCRIPTS / TRAINER, arguments, folder)


def test_the_losses_of_the_cpu(eager: tuple[str, Done], folder: Path) -> None:
    on_cpu = plain(SCRIPTS / TRAINER, "--device=cpu", "--dtype=float32", "--compile=False", "--out_dir=plain", folder=folder)
    assert len(losses(on_cpu)) == 7 and eager[1].losses == losses(on_cpu)


def test_what_the_trainer_meets(eager: tuple[str, Done]) -> None:
    vendor, done = eager
    result = done.result
    check_labels(done, vendor)
    assert (result.verdict.runs, result.run.steps, result.operators.fallbacks) == ("yes", 5, 0)
    log = at(result, "REH-SYNC-ITEM", marked(TRAINER, "log"))
    assert (log.count, log.per_step, log.severity) == (5, 1.0, "major")
    evaluation = at(result, "REH-SYNC-ITEM", marked(TRAINER, "evaluation"))
    assert (evaluation.count, evaluation.severity) == (8, "minor")
    saved = at(result, "REH-SYNC-SAVE", marked(TRAINER, "save"))
    # 15 tensors, twice: the names of the embedding and of the head are one tensor.
    assert (saved.count, saved.severity) == (30, "minor") and "async_save" in saved.fix
    assert not [f for f in result.findings if f.rule == "REH-SYNC-COPY"]
    # AdamW's fused kernel is there on both: the option that the program passes stays.
    assert not [f for f in result.findings if "fused=True" in f.what]
    assert result.operators.most_called["aten::_fused_adamw_"] == 10
    assert {a.line for a in result.attention} == {marked(TRAINER, "attention")}
    assert sum(a.count for a in result.attention) == 2 * (2 * 5 + 8)
    majors = {(f.rule, f.line) for f in result.findings if f.severity == "major"}
    expected = {("REH-SYNC-ITEM", marked(TRAINER, "log"))}
    if vendor == "neuron":
        expected.add(("REH-ATTENTION-MATH", marked(TRAINER, "attention")))
        reason = at(result, "REH-ATTENTION-MATH", marked(TRAINER, "attention")).detail
        assert "the lengths 16 and 16 are not both multiples of 512" in reason
        assert at(result, "REH-COMPAT-CHANGED", marked(TRAINER, "pinned")).what == "Tensor.pin_memory"
        assert at(result, "REH-COMPILE-FIRST", marked(TRAINER, "attention")).count == 1
    else:
        assert all(a.fused and a.path == "npu_fusion_attention" for a in result.attention)
        assert not result.compiles
    assert majors == expected


@pytest.mark.parametrize("name", VENDORS)
def test_compiled_and_in_the_devices_own_precision(name: str, folder: Path) -> None:
    done = rehearsed(name, SCRIPTS / TRAINER, ("--out_dir=compiled",), folder)
    result = done.result
    check_labels(done, name)
    assert result.verdict.runs == "yes" and len(done.losses) == 7
    assert sum(g.graphs for g in result.graphs) == 2  # training, and evaluation without gradients
    assert {(a.line, "bfloat16" in done.table) for a in result.attention} == {(marked(TRAINER, "attention"), True)}
    assert sum(a.count for a in result.attention) == 2 * (2 * 5 + 8)
    # What the graphs hold is compiled with them: nothing of the model is compiled by itself.
    assert not [c for c in result.compiles if c.line == marked(TRAINER, "attention")]


@pytest.mark.parametrize("name", VENDORS)
def test_two_processes(name: str, folder: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = rehearsed(name, SCRIPTS / TRAINER, ("--compile=False", "--out_dir=ddp", "--dtype=float32"), folder, launcher)
    check_labels(done, name)
    other = read(folder / f"{name}.rank1.json")
    assert [r.run.world_size for r in (done.result, other)] == [
        2,
        2,
    ] and done.result.verdict.runs == other.verdict.runs == "yes"
    assert other.run.steps == 5 and all(r.collectives["all_reduce"] >= 5 for r in (done.result, other))
    assert len(done.losses) == 7  # rank 0 alone prints


def test_float16_with_a_scaler_meets_the_fused_optimizers_refusal(folder: Path) -> None:
    done = rehearsed("neuron", SCRIPTS / TRAINER, ("--dtype=float16", "--compile=False", "--out_dir=half"), folder)
    found = at(done.result, "REH-REFUSED", marked(TRAINER, "step"))
    assert done.result.verdict.runs == "no" and found.severity == "blocker" and "Train in bfloat16" in found.detail


# --- the example of this project --------------------------------------------------------------------------------------------

# Autocast off, so that the CPU, which has no fast 16-bit type, is a reference to the last bit.
FLOAT32 = """
import contextlib, pathlib, runpy, sys
import portable as pt

pt.autocast = lambda *args, **kwargs: contextlib.nullcontext()
sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""
EXAMPLE = ROOT / "examples" / "train_gpt.py"


def curve(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "loss.csv").open()))


@pytest.fixture(scope="module")
def example_on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    (folder / "float32.py").write_text(FLOAT32)
    plain("float32.py", EXAMPLE, *FEW, "--out", "cpu", folder=folder, PORTABLE_BACKEND="cpu")
    return folder


@pytest.mark.parametrize("name", VENDORS)
def test_the_example_gives_the_numbers_of_the_cpu(name: str, example_on_the_cpu: Path) -> None:
    folder = example_on_the_cpu
    done = rehearsed(name, folder / "float32.py", (EXAMPLE, *FEW, "--out", name), folder)
    check_labels(done, name)
    on_cpu, on_device = curve(folder / "cpu"), curve(folder / name)
    assert len(on_cpu) == 3
    assert [row["validation_loss"] for row in on_device] == [row["validation_loss"] for row in on_cpu]
    assert (folder / name / "sample.txt").read_text() == (folder / "cpu" / "sample.txt").read_text()
    assert done.result.verdict.runs == "yes" and done.result.operators.fallbacks == 0


@pytest.mark.parametrize("name", VENDORS)
def test_findings_of_the_example(name: str, tmp_path: Path) -> None:
    done = rehearsed(name, EXAMPLE, (*FEW, "--out", tmp_path / "out"), tmp_path)
    result = done.result
    check_labels(done, name)
    assert (result.verdict.runs, result.run.steps) == ("yes", 3)
    code = (ROOT / "examples" / "gpt" / "model.py").read_text().splitlines()
    (line,) = (number for number, text in enumerate(code, 1) if "F.scaled_dot_product_attention(" in text)
    assert {(Path(a.file).name, a.line) for a in result.attention} == {("model.py", line)}
    assert {f.rule for f in result.findings} & {"REH-FALLBACK", "REH-REFUSED", "REH-OOM"} == set()
    late = [f for f in result.findings if f.rule == "REH-COMPILE-LATE"]
    if name == "neuron":
        # The sample is drawn with a context that grows: every length of it is a new shape, after the training.
        assert late and all(f.severity == "minor" for f in late)
        found = at(result, "REH-ATTENTION-MATH", line)
        assert found.severity == "major" and "and so for" in found.detail
    else:
        assert not late and all(a.fused for a in result.attention)
