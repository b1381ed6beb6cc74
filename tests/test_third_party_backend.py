"""The example of docs/write-a-backend.md: its files are taken from the document, installed with pip, and trained on.

The device ``acme`` is emulated (tests/emulated_device.py); a package ``torch_acme`` written here stands for the vendor's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from acme_scenario import batches, model
from torch import nn

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "write-a-backend.md"
FILES = dict(
    re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
)

VENDOR = """
import emulated_device

FREE, TOTAL = 20 * 2**30, 32 * 2**30
emulated_device.install(
    "acme", device_count=2, memory_info=lambda device=None: (FREE, TOTAL), get_device_name=lambda device=None: "a1"
)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed example, as pip makes it."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "portable_acme.py"):
        (source / name).write_text(FILES[name], encoding="utf-8")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-index", "--target", str(site), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the device vendor's own package, whose import brings the device."""
    folder = tmp_path_factory.mktemp("vendor")
    (folder / "torch_acme.py").write_text(VENDOR, encoding="utf-8")
    return folder


def run(*arguments: str, path: tuple[Path, ...]) -> str:
    """Standard output of a Python process that finds the given folders."""
    environment = {key: value for key, value in os.environ.items() if key != "PORTABLE_BACKEND"}
    search = [*map(str, path), str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, search)), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(installed: Path, vendor: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/acme_scenario.py finds: one process for all, because each imports torch anew."""
    extras = tmp_path_factory.mktemp("extras")
    for name in ("portable_acme_extras.py", "test_portable_acme.py"):
        (extras / name).write_text(FILES[name], encoding="utf-8")
    scenario = str(Path(__file__).with_name("acme_scenario.py"))
    return json.loads(run(scenario, str(extras / "test_portable_acme.py"), path=(installed, vendor, extras)))


def test_example_is_complete_and_short() -> None:
    assert {"pyproject.toml", "portable_acme.py", "test_portable_acme.py", "portable_acme_extras.py"} == set(FILES)
    lines = FILES["pyproject.toml"].count("\n") + FILES["portable_acme.py"].count("\n")
    assert 0 < lines < 100


def test_pip_installs_the_entry_point(installed: Path) -> None:
    entries = next(installed.glob("portable_acme-*.dist-info")) / "entry_points.txt"
    assert entries.read_text(encoding="utf-8").split() == ["[portable]", "acme", "=", "portable_acme"]
    assert (installed / "portable_acme.py").read_text(encoding="utf-8") == FILES["portable_acme.py"]


def test_without_the_vendors_package_the_reason_and_next_step_are_shown(installed: Path) -> None:
    info = json.loads(run("-m", "portable", "info", "--json", path=(installed,)))
    acme = next(entry for entry in info["backends"] if entry["name"] == "acme")
    assert (acme["available"], acme["reason"]) == (False, "the package torch_acme is not installed")
    assert acme["next_step"] == "pip install torch-acme"
    assert acme["provider"] == "acme (portable-acme 1.0)"
    assert info["active"] != "acme"
    assert info["plugin_problems"] == []


def test_portable_info_lists_devices_and_choices(installed: Path, vendor: Path) -> None:
    info = json.loads(run("-m", "portable", "info", "--json", path=(installed, vendor)))
    assert info["active"] == "acme"
    backends = {entry["name"]: entry for entry in info["backends"]}
    acme = backends["acme"]
    assert (acme["available"], acme["reason"], acme["provider"]) == (True, "2 devices", "acme (portable-acme 1.0)")
    assert [(device["index"], device["name"], device["generation"]) for device in acme["devices"]] == [
        (0, "Acme A1", "a1"),
        (1, "Acme A1", "a1"),
    ]
    assert acme["devices"][0]["memory"] == 32 * 2**30
    assert acme["devices"][0]["matmul"] == ["bfloat16", "float32"]
    assert acme["precision"]["autocast"] == "bfloat16"
    assert acme["compile"]["backend"] == "eager"
    generic = backends["generic"]
    assert not generic["available"]
    assert generic["reason"] == "PyTorch sees no accelerator other than acme, which the backend acme serves"


def test_portable_info_as_text(found: dict[str, Any]) -> None:
    for part in ("Acme A1 (a1), 32.0 GiB", "acme (portable-acme 1.0)", "torch_acme has no compiler yet"):
        assert part in found["shown"]


def test_finding_the_plugin_does_not_import_the_vendors_package(found: dict[str, Any]) -> None:
    assert found["discovery"] == {
        "backends": ["acme", "ascend", "cpu", "cuda", "generic", "neuron"],
        "vendor imported": False,
    }


def test_device_api(found: dict[str, Any]) -> None:
    natives = found["device api"].pop("natives")
    assert {"device_count", "set_device", "synchronize", "device", "get_rng_state", "mem_get_info"} <= set(natives)
    assert found["device api"] == {
        "active": "acme",
        "complete": True,
        "nothing in between": True,
        "devices": ["acme:0", "acme:1", 2],
        "memory": [20 * 2**30, 32 * 2**30],
        "generation": "a1",
        "bf16": True,
        "capability": [0, 0],
        "inside": [1, "acme:1"],
        "after": 0,
        "draws repeat": True,
        "temperature": (
            "UnsupportedError: temperature is not available on the acme backend: torch.acme does not read the sensors. "
            "Instead: run acme-smi beside the program."
        ),
        "graph": (
            "UnsupportedError: CUDAGraph is not available on the acme backend: the device records no graphs. "
            "Instead: use pt.compile(model), or call the function directly."
        ),
        "wrong index": (
            "DeviceIndexError: device index 2 was asked for, but the acme backend has 2 devices. "
            "Use an index from 0 to 1, or pt.device() for the current one."
        ),
    }


def test_twenty_training_steps_equal_the_cpu_bit_for_bit(found: dict[str, Any]) -> None:
    net = model()  # the reference is PyTorch alone
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found["training"]["devices"] == ["acme:0"]
    assert found["training"]["addmm"] == 40, "two linear layers in each of the 20 steps ran on the device"
    assert found["training"]["losses"] == losses
    assert len(set(losses)) == 20


def test_example_of_the_other_hooks(found: dict[str, Any]) -> None:
    assert found["other hooks"] == {
        "paths": [["acme_fused", ["head_dim 24 is not a multiple of 16"]]],
        "for others": [],
        "cases": ["acme_odd_sizes"],
        "rules": ["ACME001"],
        "problems": [],
    }


def test_the_documents_own_test_passes(found: dict[str, Any]) -> None:
    names = re.findall(r"^def (test_\w+)", FILES["test_portable_acme.py"], re.MULTILINE)
    assert found["own test"] == dict.fromkeys(names, "passed")
    assert len(names) == 3
