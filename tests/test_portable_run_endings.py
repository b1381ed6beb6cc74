"""`portable run` at the end of a program: processes that must be told to end, a folder that is gone, modules in the way."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

RUN = (sys.executable, "-m", "portable", "run", "--backend", "cpu", "--report", "report.json")


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(source)
    return subprocess.run((*RUN, "program.py"), cwd=folder, capture_output=True, text=True, timeout=170)


def test_the_server_of_a_manager_is_told_to_end(tmp_path: Path) -> None:
    source = "import multiprocessing\nif __name__ == '__main__':\n    m = multiprocessing.Manager()\n    print('done')\n"
    done = run(tmp_path, source)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_current_folder_that_is_gone(tmp_path: Path) -> None:
    source = """\
import os, tempfile, torch
here = os.getcwd()
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
print(torch.ones(2).cuda().sum().item())
os.chdir(here)
"""
    done = run(tmp_path, source)
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr


def test_the_report_is_written_even_if_the_table_cannot_be_shown(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("")  # a module of the program that happens to have this name
    done = run(tmp_path, "import torch\nprint(torch.zeros(2, device='cuda').tolist())\n")
    assert (done.returncode, done.stdout) == (0, "[0.0, 0.0]\n"), done.stderr
    entries = json.loads((tmp_path / "report.json").read_text())["entries"]
    assert [entry["construct"] for entry in entries] == ["torch.zeros"]
    assert "Traceback" not in done.stderr
