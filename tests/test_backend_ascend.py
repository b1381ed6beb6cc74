"""Ascend without the hardware: the diagnosis, the tables against the vendor's wheel, and the table bound to a stand-in module.

Nothing here runs on an Ascend device.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from portable_ascend.backend import AscendBackend
from portable_ascend.diagnosis import Found, diagnose
from portable_ascend.facts import GENERATIONS, SPEC, generation_of
from portable_ascend.surface import SURFACE

from portable import _loading
from portable.errors import UnsupportedError

VENDOR = Path(__file__).parent.parent / ".vendor"
GOOD = Found("2.13.0", "2.13.0+cpu", None, "/usr/local/Ascend/ascend-toolkit/latest", ("/dev/davinci0",), None)

# What dlopen says when CANN's environment script was not sourced (glibc's text; seen with the real wheel).
NO_HCCL = "libhccl.so: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("found", "reason", "next_step"),
    [
        (replace(GOOD, version=None), "torch-npu is not installed", "torch-npu==2.13.0"),
        (replace(GOOD, version="2.11.0"), "torch-npu 2.11.0 needs torch 2.11.0, but torch 2.13.0+cpu", "torch-npu==2.13.0"),
        (replace(GOOD, torch="2.14.0"), "needs torch 2.13.0", "torch==2.13.0"),
        (replace(GOOD, accelerator="cuda"), "is a cuda build", "CPU build"),
        (replace(GOOD, load_error=NO_HCCL), "libhccl.so was not found", "set_env.sh"),
        (replace(GOOD, load_error="undefined symbol: aclrtFoo"), "undefined symbol: aclrtFoo", "CANN"),
        (replace(GOOD, devices=()), "no /dev/davinci*", "npu-smi info"),
        (replace(GOOD, visible=""), "ASCEND_RT_VISIBLE_DEVICES is set but empty", "unset"),
    ],
)
def test_each_obstacle_is_named_with_its_next_step(found: Found, reason: str, next_step: str) -> None:
    answer = diagnose(found)
    assert answer is not None and not answer.available
    assert reason in answer.reason
    assert next_step in answer.next_step


def test_no_obstacle_where_everything_is_in_place() -> None:
    assert diagnose(GOOD) is None
    assert diagnose(replace(GOOD, version="2.13.0.post1")) is None, "a post-release belongs to the same torch"


def test_probe_reports_the_error_of_pytorchs_own_autoload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_loading.autoload_errors, "torch_npu", ImportError(NO_HCCL))
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"torch-npu": _torch_release()}[name])
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: None)
    answer = AscendBackend().probe()
    assert not answer.available
    assert "libhccl.so" in answer.reason and "set_env.sh" in answer.next_step


def _torch_release() -> str:
    import torch

    return torch.__version__.split("+")[0]


@pytest.mark.parametrize(
    ("soc", "name"),
    [
        ("Ascend910A", "Ascend910A"),
        ("Ascend910PremiumA", "Ascend910A"),
        ("Ascend910B", "Ascend910A"),
        ("Ascend910B1", "Ascend910B1"),
        ("Ascend910B2C", "Ascend910B2"),
        ("Ascend910B4-1", "Ascend910B4"),
        ("Ascend910_9391", "Ascend910C"),
        ("Ascend950PR_9599", "Ascend950PR"),
        ("Ascend950DT_95A1", "Ascend950DT"),
    ],
)
def test_soc_names_map_to_generations(soc: str, name: str) -> None:
    found = generation_of(soc)
    assert found is not None and found.name == name


def test_unknown_soc_has_no_generation() -> None:
    assert generation_of("Ascend310P3") is None
    assert generation_of("") is None


def test_bfloat16_only_from_910b_on() -> None:
    assert GENERATIONS["Ascend910A"].autocast == ("float16",)
    assert all(GENERATIONS[name].autocast[0] == "bfloat16" for name in GENERATIONS if name != "Ascend910A")


class FakeNpu:
    """torch.npu with the documented names only: each records its call."""

    __name__ = "torch.npu"

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        for name in (*SURFACE, "NPUGraph"):
            setattr(self, name, self._record(name))

    def _record(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> str:
            self.calls[name] += 1
            return name

        return call


def test_bound_table_reaches_the_vendor_module(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, fake = AscendBackend(), FakeNpu()
    monkeypatch.setattr(backend, "module", lambda: fake)
    table = backend.bind()
    for name in SURFACE:
        assert table[name]() == name
    assert table["CUDAGraph"]() == "NPUGraph"
    assert set(fake.calls) == {*SURFACE, "NPUGraph"}
    assert table["get_device_capability"]() == (0, 0)
    with pytest.raises(UnsupportedError, match=r"temperature is not available on the ascend backend.*npu-smi"):
        table["temperature"]()


def test_an_older_torch_npu_without_a_function_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = AscendBackend()
    monkeypatch.setattr(backend, "module", lambda: SimpleNamespace(__name__="torch.npu"))
    with pytest.raises(UnsupportedError, match=r"the installed torch\.npu has no ipc_collect"):
        backend.bind()["ipc_collect"]()


@pytest.fixture(scope="module")
def library() -> bytes:
    path = VENDOR / "torch_npu" / "lib" / "libtorch_npu.so"
    if not path.exists():
        pytest.skip("torch-npu's wheel is not unpacked in .vendor; `make test` does it (the wheel exists for Linux only)")
    return path.read_bytes()


def test_soc_names_are_known_to_the_vendor_library(library: bytes) -> None:
    known = {name.decode() for name in re.findall(rb"Ascend9\w+", library)}
    for generation in GENERATIONS:
        matching = [soc for soc in known if (found := generation_of(soc)) and found.name == generation]
        assert matching, f"libtorch_npu.so knows no SoC of {generation}"


def test_fallback_warning_is_the_vendor_librarys(library: bytes) -> None:
    assert SPEC.fallback.warning is not None
    matches = re.findall(SPEC.fallback.warning.replace("(?P<op>", "(").encode(), library)
    assert matches, "no text in libtorch_npu.so matches the declared warning"
    assert b"TORCH_NPU_FALLBACK_CPU_DISABLE" in library


def test_fused_optimizer_kernels_are_in_the_vendor_library(library: bytes) -> None:
    for name, spec in SPEC.optimizers.items():
        if spec.options.get("fused"):
            assert f"wrapper_NPU___fused_{name.lower()}_".encode() in library, name


def test_declared_names_are_in_the_vendor_metadata(library: bytes) -> None:
    info = next(VENDOR.glob("torch_npu-*.dist-info"), None) or next((VENDOR / "torch_npu").resolve().parent.glob("*.dist-info"))
    entries = (info / "entry_points.txt").read_text()
    assert f"{SPEC.compile.backend} = torch_npu.dynamo" in entries
    version = re.search(r"^Version: (\S+)$", (info / "METADATA").read_text(), re.MULTILINE)
    requirement = re.search(r"^Requires-Dist: torch==(\S+?)\.\*$", (info / "METADATA").read_text(), re.MULTILINE)
    assert version and requirement and version[1] == requirement[1], "the release pairs with the same release of torch"
