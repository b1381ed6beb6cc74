"""The command line, as processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import portable as pt


def portable(*arguments: str, backend: str | None = "cpu") -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PORTABLE_BACKEND"}
    environment |= {"PORTABLE_BACKEND": backend} if backend is not None else {}
    environment |= {"COLUMNS": "200"}
    command = [sys.executable, "-m", "portable", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("arguments", [("--help",), ("info", "--help"), ("run", "--help")])
def test_help(arguments):
    result = portable(*arguments)
    assert result.returncode == 0, result.stderr
    assert "Usage: portable" in result.stdout
    assert "--help" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("arguments", ["['--help']", "['info', '--help']", "['--version']"])
def test_help_loads_neither_torch_nor_pydantic(arguments):
    """Either would make it several times slower; benchmarks/import_time.py measures."""
    code = f"""
import sys
sys.argv = ["portable", *{arguments}]
from portable.__main__ import main
try:
    main()
except SystemExit as error:
    assert not error.code
print("loaded:", {{"torch", "pydantic", "numpy", "pluggy"}} & set(sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "loaded: set()", result.stderr


def test_version():
    result = portable("--version")
    assert (result.returncode, result.stdout) == (0, f"portable {pt.__version__}\n")


def test_no_command_shows_the_help():
    result = portable()
    assert result.returncode == 2
    assert "info" in result.stdout + result.stderr


@pytest.mark.parametrize("arguments", [("nonsense",), ("info", "--nonsense"), ("info", "extra")])
def test_wrong_usage(arguments):
    result = portable(*arguments)
    assert result.returncode == 2
    assert "Usage:" in result.stderr
    assert "Traceback" not in result.stderr


def test_info():
    result = portable("info")
    assert result.returncode == 0, result.stderr
    for part in ("cpu", "cuda", "neuron", "ascend", "precision policy", "process group"):
        assert part in result.stdout


def test_info_json():
    result = portable("info", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["active"] == "cpu"
    assert {"cpu", "cuda", "neuron", "ascend"} <= {entry["name"] for entry in found["backends"]}


def test_info_with_a_backend():
    found = json.loads(portable("info", "--json", "--backend", "cpu", backend=None).stdout)
    assert found["active"] == "cpu"


@pytest.mark.parametrize("json_too", [False, True])
def test_wrong_environment_variable(json_too):
    result = portable("info", *(["--json"] if json_too else []), backend="gpu")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    if json_too:
        found = json.loads(result.stdout)
        assert found["active"] is None
        message, names = found["problem"], {entry["name"] for entry in found["backends"]}
    else:
        message, names = result.stdout, set(result.stdout.split())
    assert "'gpu' was asked for by the environment variable PORTABLE_BACKEND" in message
    assert {"cpu", "cuda"} <= names  # the table is still there


def test_wrong_backend_option():
    result = portable("info", "--backend", "gpu")
    assert result.returncode == 1
    assert "'gpu' was asked for" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
