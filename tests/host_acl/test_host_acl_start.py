"""What the host runtime needs to start, and what it says when that is not there."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from portable_ascend.host_acl import build, settings, soc

from portable.errors import ConfigurationError

VENDOR = Path(__file__).parents[2] / ".vendor"
HEADERS = VENDOR / "torch_npu" / "include" / "third_party" / "acl" / "inc"
USE = "import torch, portable as pt\npt.use('ascend')\nprint(torch.npu.get_device_name(), torch.npu.device_count())"


def run(program: str = USE, **variables: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PORTABLE_ASCEND_HOST": f"910B2,path={VENDOR}", "OMP_NUM_THREADS": "1"}
    environment.pop("PORTABLE_BACKEND", None)
    for name, value in variables.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)


def fails(words: str, program: str = USE, **variables: str | None) -> str:
    done = run(program, **variables)
    assert done.returncode != 0, done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(words, done.stderr), done.stderr[-3000:]
    return last


# -- the build ---------------------------------------------------------------------------------------------------------------


def test_no_compiler(tmp_path: Path) -> None:
    last = fails("no C compiler was found", PATH=str(tmp_path), CC=None, PORTABLE_CACHE=str(tmp_path / "cache"))
    assert "apt install gcc" in last and "variable CC" in last
    assert "CC=/nowhere/cc" in fails("no C compiler", CC="/nowhere/cc", PORTABLE_CACHE=str(tmp_path / "cache"))


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'stdlib.h: no such file' >&2\nexit 3\n")
    broken.chmod(0o755)
    fails(r"(?s)libascendcl\.so.*exit status 3.*stdlib\.h: no such file.*headers", CC=str(broken), PORTABLE_CACHE=str(tmp_path))
    assert [path.name for path in (tmp_path / "host_acl").iterdir()] == [], "nothing half-built is left"
    assert run(CC="cc", PORTABLE_CACHE=str(tmp_path)).returncode == 0, "and the next start builds"


def test_without_a_compiler_what_is_built_serves(tmp_path: Path) -> None:
    assert run(PORTABLE_CACHE=str(tmp_path)).returncode == 0
    assert run(PORTABLE_CACHE=str(tmp_path), PATH="", CC=None).returncode == 0


def test_compilers_with_options(tmp_path: Path) -> None:
    assert run(CC="gcc -pipe", PORTABLE_CACHE=str(tmp_path)).stdout == "Ascend910B2 1\n"


def test_processes_that_build_together(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: run(PORTABLE_CACHE=str(tmp_path)), range(3)))
    assert [d.stdout for d in done] == ["Ascend910B2 1\n"] * 3, [d.stderr[-1000:] for d in done]
    assert len(list((tmp_path / "host_acl").iterdir())) == 1


@pytest.mark.parametrize("kind", ["a file", "not writable"])
def test_a_cache_that_cannot_be_written(tmp_path: Path, kind: str) -> None:
    """As root every folder can be written, so one under /proc stands for it."""
    place = tmp_path / "file"
    place.write_text("")
    last = fails("cannot be written", PORTABLE_CACHE=str(place) if kind == "a file" else "/proc/none")
    assert "PORTABLE_CACHE" in last


def test_a_damaged_cache_is_built_anew(tmp_path: Path) -> None:
    assert run(PORTABLE_CACHE=str(tmp_path)).returncode == 0
    (folder,) = (tmp_path / "host_acl").iterdir()
    (folder / "libhccl.so").unlink()
    assert run(PORTABLE_CACHE=str(tmp_path)).stdout == "Ascend910B2 1\n"
    (folder / "libascendcl.so").write_bytes(b"")
    assert run(PORTABLE_CACHE=str(tmp_path)).stdout == "Ascend910B2 1\n"


def test_changed_sources_are_built_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_CACHE", str(tmp_path / "cache"))
    first = build.build(HEADERS)
    assert build.build(HEADERS) == first and first.is_relative_to(tmp_path)
    copied = tmp_path / "runtime"
    shutil.copytree(build._SOURCE, copied)
    with (copied / "stream.c").open("a") as file:
        file.write("/* changed */\n")
    monkeypatch.setattr(build, "_SOURCE", copied)
    assert build.build(HEADERS) != first


def test_without_the_vendors_headers(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"acl/acl\.h.*Reinstall torch-npu"):
        build.build(tmp_path)


# -- the libraries against the wheel -----------------------------------------------------------------------------------------


def _symbols(*arguments: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", *arguments], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines() if line.split()}


def test_every_function_that_the_wheel_needs_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTABLE_CACHE", str(tmp_path))
    mine = _symbols("--defined-only", str(build.build(HEADERS) / "libascendcl.so"))
    needed: set[str] = set()
    for library in (VENDOR / "torch_npu" / "lib").glob("*.so"):
        needed |= {name for name in _symbols("--undefined-only", str(library)) if re.match(r"(acl|Hccl|ge[A-Z]|Mstx)", name)}
    assert len(needed) > 60 and needed - mine == set()


def test_every_name_that_the_wheel_asks_the_linker_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DT_NEEDED of the wheel's libraries that are CANN's own: all are preloaded."""
    needed: set[str] = set()
    for library in (VENDOR / "torch_npu" / "lib").glob("*.so"):
        listed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*?)\]", listed))
    usual = re.compile(
        r"lib(torch|c10|npu_profiler|torch_npu|stdc\+\+|gcc_s|c\.so|m\.so|pthread|dl\.so|rt\.so|op_plugin)|ld-linux"
    )
    shipped = {library.name for library in (VENDOR / "torch_npu" / "lib").iterdir()}
    cann = {name for name in needed - shipped if not usual.match(name)}
    assert cann <= {"libascendcl.so", *build._EMPTY}, cann


def test_unknown_functions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of CANN that the runtime has no use for is refused with its name, not with a crash."""
    monkeypatch.setenv("PORTABLE_CACHE", str(tmp_path))
    library = ctypes.CDLL(str(build.build(HEADERS) / "libascendcl.so"))
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    assert library.aclopCompileAndExecute(b"SomeOperator", 0, None, None, 0, None, None, None, 0, 0, None, None) != 0
    assert b"SomeOperator" in library.aclGetRecentErrMsg()


# -- settings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "name", "gib"),
    [
        ("910A", "Ascend910A", 32),
        ("910B2", "Ascend910B2", 64),
        ("910C", "Ascend910_9391", 64),
        ("950", "Ascend950PR_9579", 128),
        ("Ascend910B4", "Ascend910B4", 32),
        ("ascend910c", "Ascend910_9391", 64),
    ],
)
def test_socs(asked: str, name: str, gib: int) -> None:
    found = soc.soc(asked)
    assert (found.name, found.hbm) == (name, gib * 2**30)


def test_every_soc_starts() -> None:
    """Each name is one that torch_npu's own table has; it says so when it has not."""
    names = ["910A", "910C", "950"]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda n: run(PORTABLE_ASCEND_HOST=f"{n},devices=3,path={VENDOR}"), names))
    assert [d.stdout for d in done] == [f"{soc.soc(n).name} 3\n" for n in names], [d.stderr[-800:] for d in done]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("0", None),
        ("off", None),
        ("1", ("Ascend910B2", 1, 64 * 2**30)),
        ("910C,devices=2", ("Ascend910_9391", 2, 64 * 2**30)),
        ("hbm=512MiB", ("Ascend910B2", 1, 2**29)),
        ("soc=910A, hbm=1e9", None),
        ("on,hbm=1.5GB", ("Ascend910B2", 1, 1_500_000_000)),
    ],
)
def test_the_variable(text: str, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    if "1e9" in text:
        with pytest.raises(ConfigurationError, match="number with a unit"):
            settings.from_environment({settings.VARIABLE: text})
        return
    got = settings.from_environment({settings.VARIABLE: text})
    assert (None if got is None else (got.soc.name, got.devices, got.hbm)) == found
    if got is not None:
        assert settings.from_environment({settings.VARIABLE: got.as_text()}) == got


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("910D", r"SoC '910D'.*Use one of .*910A"),
        ("910B2,devices=0", "asked for 0 devices. It can have 1 to 64"),
        ("910B2,devices=two", "'two' devices, not a number"),
        ("910B2,devices=65", "65 devices"),
        ("910B2,memory=4GiB", "part 'memory=4GiB', which says nothing"),
        ("910B2,hbm=-1", "'-1' of memory"),
        ("910B2,hbm=0", "'0' of memory"),
        ("910B2,hbm=", "part 'hbm='"),
        ("910B2,path=/nowhere", "has no folder torch_npu"),
    ],
)
def test_what_the_variable_cannot_say(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        settings.from_environment({settings.VARIABLE: text})


def test_a_wrong_variable_is_said_by_the_program() -> None:
    assert "910D" in fails("BackendUnavailable", PORTABLE_ASCEND_HOST=f"910D,path={VENDOR}")


def test_visible_devices_are_the_default_count() -> None:
    assert run(ASCEND_RT_VISIBLE_DEVICES="0,2,5").stdout == "Ascend910B2 3\n"


# -- the package -------------------------------------------------------------------------------------------------------------


def test_without_torch_npu() -> None:
    last = fails("torch_npu, which is not installed", PORTABLE_ASCEND_HOST="910B2")
    assert "pip install --no-deps --target .vendor torch-npu==2.13.0" in last and "path=.vendor" in last


def test_another_release(tmp_path: Path) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("")
    (tmp_path / "torch_npu" / "version.py").write_text("__version__ = '2.9.0'\n")
    last = fails("torch_npu 2.9.0", PORTABLE_ASCEND_HOST=f"1,path={tmp_path}")
    assert "does not fit torch 2.13.0" in last and "torch-npu==2.13.0" in last


def test_a_torch_npu_that_does_not_import(tmp_path: Path) -> None:
    package = tmp_path / "torch_npu"
    package.mkdir()
    package.joinpath("__init__.py").write_text("import a_module_that_is_missing\n")
    package.joinpath("version.py").write_text("__version__ = '2.13.0'\n")
    (package / "include" / "third_party" / "acl").mkdir(parents=True)
    (package / "include" / "third_party" / "acl" / "inc").symlink_to(HEADERS)
    assert "a_module_that_is_missing" in fails(
        "did not load on the host ACL runtime", PORTABLE_ASCEND_HOST=f"1,path={tmp_path}"
    )


def test_torch_npu_is_loaded_already() -> None:
    program = "import sys, types\nsys.modules['torch_npu'] = types.ModuleType('torch_npu')\n" + USE
    assert "before torch_npu is imported" in fails("loaded already", program)


def test_another_device_has_the_slot() -> None:
    program = "import torch\ntorch.utils.rename_privateuse1_backend('npux')\n" + USE
    assert "this process has the device 'npux' already" in fails("BackendUnavailable", program)


def test_two_devices_in_one_process() -> None:
    program = (
        "import os\nimport portable as pt\npt.use('ascend')\nfrom portable import selection\n"
        "os.environ['PORTABLE_NEURON_EMULATED'] = '1'\nselection.find('neuron').emulate()"
    )
    last = fails("ConfigurationError", program)
    assert "already, and PyTorch has one slot" in last and "Use one emulated device per process" in last


def test_two_settings_in_one_process() -> None:
    program = USE + "\nfrom portable_ascend import host_acl\nhost_acl.enable('910A', path=" + repr(str(VENDOR)) + ")"
    assert "start another process" in fails("is active as", program)


def test_enabled_from_python() -> None:
    """Without the variable: the backend, and processes started later, find what enable() made."""
    program = (
        f"from portable_ascend import host_acl\nhost_acl.enable('910C', devices=2, hbm='1GiB', path={str(VENDOR)!r})\n"
        + USE
        + "\nprint((torch.ones(2, device='npu:1') + 1).tolist(), torch.npu.mem_get_info()[1])"
        + f"\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {USE!r}], check=True)"
    )
    done = run(program, PORTABLE_ASCEND_HOST=None)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == ["Ascend910_9391 2", "Ascend910_9391 2", "[2.0, 2.0] 1073741824"]


def test_the_same_settings_twice() -> None:
    program = (
        USE + "\nfrom portable_ascend import host_acl\nprint(host_acl.enable('910B2', path=" + repr(str(VENDOR)) + ").used())"
    )
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_without_the_switch_nothing_is_emulated() -> None:
    fails("torch-npu", PORTABLE_ASCEND_HOST="0")
