"""`portable info` amid broken plugins and broken device packages, and what imports nothing: processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from broken_plugins import BAD_PROBES, BROKEN, GOOD, backend_source, probe_source, write

TESTS = Path(__file__).parent
SHIPPED = {"ascend", "cpu", "cuda", "generic", "neuron"}


def python(*arguments: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PORTABLE_BACKEND"}
    search = [str(path) if path else "", str(TESTS), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, search)), "COLUMNS": "200", **variables}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def wreckage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every broken plugin at once, a good one, and a device package that PyTorch would load and that fails."""
    folder = tmp_path_factory.mktemp("wreckage")
    for name, (source, _, _) in BROKEN.items():
        write(folder, name, source)
    for name in BAD_PROBES:
        write(folder, name, probe_source(name))
    write(folder, "good", backend_source("good", GOOD))
    write(folder, "torch_wreck", "def start(): raise OSError('libwreck.so: cannot open')", group="torch.backends",
          value="plugin_torch_wreck:start")  # fmt: skip
    write(folder, "torch_exit", "raise SystemExit('no licence')", group="torch.backends", value="plugin_torch_exit:start")
    return folder


def test_portable_info_amid_wreckage(wreckage: Path) -> None:
    done = python("-m", "portable", "info", "--json", path=wreckage)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    backends = {entry["name"]: entry for entry in found["backends"]}
    assert {*SHIPPED, "good", *BAD_PROBES} == set(backends)
    assert (backends["good"]["available"], backends["cpu"]["available"]) == (True, True)
    assert found["active"] == "good"
    said = {problem["plugin"].partition(" ")[0]: (problem["phase"], problem["message"]) for problem in found["plugin_problems"]}
    assert set(said) == {*BROKEN, *BAD_PROBES}
    for name, (_, phase, message) in BROKEN.items():
        assert said[name][0] == phase
        assert message in said[name][1]
    for name, (_, message) in BAD_PROBES.items():
        assert message in said[name][1]
        assert message in backends[name]["reason"]
    assert found["versions"]["torch.backends entry torch_wreck"] == "failed to load: libwreck.so: cannot open"
    assert found["versions"]["torch.backends entry torch_exit"] == "failed to load: no licence"


def test_portable_info_amid_wreckage_as_text(wreckage: Path) -> None:
    done = python("-m", "portable", "info", path=wreckage)
    assert done.returncode == 0, done.stderr
    for name, (_, phase, message) in BROKEN.items():
        assert f"problem plugin {name} ({name}-pkg 1.0), {phase}: " in done.stdout
        assert message in done.stdout
    for name, (_, message) in BAD_PROBES.items():
        assert f"{name} not available: its probe failed: " in done.stdout
        assert message in done.stdout
    assert "problem torch.backends entry torch_wreck: failed to load: libwreck.so: cannot open" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_pytorch_alone_would_not_start_amid_wreckage(wreckage: Path) -> None:
    """Without this, the two tests above would show nothing about the device packages."""
    done = python("-c", "import torch", path=wreckage)
    assert done.returncode != 0
    assert "torch_wreck" in done.stderr or "no licence" in done.stderr


def test_device_packages_are_left_alone_where_pytorchs_switch_says_so(wreckage: Path) -> None:
    code = """if True:
        import os, portable as pt
        from portable import _loading
        pt.use("cpu")
        print(_loading.autoload_errors, os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"])
    """
    done = python("-c", code, path=wreckage, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "{} 0\n", done.stderr


LAZY = """
import contextlib, io, json, sys
seen = {}
def note(step):
    heavy = ("torch", "numpy", "pluggy", "rich.console", "torch_npu", "torch_neuronx", "habana_frameworks", "pynvml")
    ours = ("portable_cpu", "portable_cuda", "portable_ascend", "portable_neuron", "portable_generic")
    seen[step] = [name for name in sys.modules if name in (*heavy, *ours) or name.startswith("plugin_")]
import portable
note("import portable")
dir(portable), portable.__version__
note("dir")
import portable.cli
note("import portable.cli")
for arguments in (["--help"], ["--version"], ["info", "--help"], ["run", "--help"]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        portable.cli.app(arguments, prog_name="portable")
    assert "portable" in out.getvalue()
    note(" ".join(arguments))
json.dump(seen, sys.stdout)
"""


def test_importing_portable_and_help_load_neither_torch_nor_plugins(wreckage: Path) -> None:
    done = python("-c", LAZY, path=wreckage)
    assert done.returncode == 0, done.stderr
    assert all(loaded == [] for loaded in json.loads(done.stdout).values()), done.stdout
    assert len(json.loads(done.stdout)) == 7


def test_asking_for_plugins_loads_no_vendor_package(tmp_path: Path) -> None:
    """Stand-ins for the vendors' packages are on the path; none of them may be imported before a backend is probed."""
    for name in ("torch_npu", "torch_neuronx", "habana_frameworks"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")
    code = "import portable.plugins as p; print(sorted(p.registry().backends), p.registry().problems)"
    done = python("-c", code, path=tmp_path)
    assert done.stdout == f"{sorted(SHIPPED)} []\n", done.stderr


def test_a_plugin_that_prints_does_not_spoil_the_json(tmp_path: Path) -> None:
    import json
    import os
    import subprocess
    import sys

    (tmp_path / "loud_plugin.py").write_text("import os\nprint('LOUD')\nos.write(1, b'LOUDER')\n")
    information = tmp_path / "loud-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[portable]\nloud = loud_plugin\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = (sys.executable, "-m", "portable", "info", "--json")
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["active"] == "cpu"
    assert "LOUD\n" in done.stderr and "LOUDER" in done.stderr
