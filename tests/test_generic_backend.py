"""The generic backend: which device it takes, its declarations, and each device's table bound to a stand-in module.

Nothing here runs on an XPU, MPS, Gaudi or MTIA device. What is native is looked up in PyTorch's own modules, which exist on
every machine except torch.hpu. An unlisted device is emulated in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fakes
import pytest
import torch
from portable_generic import backend as generic
from portable_generic import modules
from portable_generic.backend import GenericBackend
from portable_generic.facts import ANY, KNOWN, unknown
from portable_generic.modules import CHANGES

import portable as pt
from portable import plugins, selection
from portable.catalogue import BY_NAME
from portable.compiling import explain_compile
from portable.errors import UnsupportedError
from portable.policy import precision_policy
from portable.support import lookup
from portable.support_table import chain


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a device type PyTorch's accelerator, with a module under torch if one is given."""

    def have(kind: str | None, module: Any = None) -> None:
        # A stand-in for torch.device, which does not know the types that vendors' packages add.
        device = SimpleNamespace(type=kind) if kind else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
        if kind and module is not None:
            monkeypatch.setattr(torch, kind, module, raising=False)

    return have


def module(count: int = 2, **functions: Any) -> SimpleNamespace:
    return SimpleNamespace(
        __name__="torch.standin",
        is_available=lambda: count > 0,
        device_count=lambda: count,
        current_device=lambda: 0,
        synchronize=lambda device=None: None,
        **functions,
    )


def test_no_accelerator(accelerator, plugged):
    accelerator(None)
    plugged(GenericBackend())
    answer = pt.backends()["generic"]
    assert not answer.available
    assert answer.reason == "PyTorch sees no accelerator"
    assert "package for your device" in answer.next_step
    assert pt.active().spec.name == "cpu"


def test_a_device_that_another_backend_declares_is_left_to_it(accelerator, plugged):
    """Even where that backend says it is not available: it knows better why."""
    accelerator("xpu", module())
    plugged(GenericBackend(), fakes.Fake(fakes.spec("intel", "xpu"), answer=fakes.Availability(False, "driver too old", "new")))
    answer = pt.backends()["generic"]
    assert not answer.available
    assert answer.reason == "PyTorch sees no accelerator other than xpu, which the backend intel serves"
    with pytest.raises(pt.BackendNotFound):
        pt.use("xpu")


@pytest.mark.parametrize("kind", [*KNOWN, "acme"])
def test_the_accelerators_own_name_is_an_alias(accelerator, plugged, monkeypatch, kind):
    accelerator(kind, module())
    plugged(GenericBackend())
    assert pt.backends()["generic"].reason == f"2 {kind} devices"
    assert pt.active().spec.device_type == kind, "it goes before the CPU"
    pt.use("cpu")
    assert pt.use(kind).backend.spec.name == "generic"
    assert pt.active().spec.device_type == kind
    selection._activate(None)
    monkeypatch.setenv("PORTABLE_BACKEND", kind.upper())
    assert pt.active().spec.device_type == kind


def test_vendor_backends_go_first_and_the_cpu_last(accelerator, plugged):
    accelerator("acme", module())
    plugged(GenericBackend(), fakes.Fake(fakes.spec("vendor")))
    assert pt.active().spec.name == "vendor"
    assert 0 < GenericBackend().spec.priority < fakes.spec().priority


def test_a_backend_named_like_the_device_goes_before_the_alias(accelerator, plugged):
    accelerator("acme", module())
    plugged(GenericBackend(), fakes.Fake(fakes.spec("acme", "other_type")))
    assert pt.use("acme").backend.spec.device_type == "other_type"


@pytest.mark.parametrize(
    ("found", "reason", "next_step"),
    [
        (module(count=0), "PyTorch was built for xpu, but torch.xpu finds no device", "Intel's GPU driver"),
        (None, "PyTorch has the device type xpu but no torch.xpu", "PyTorch's XPU build"),
    ],
)
def test_a_build_without_a_device(accelerator, plugged, monkeypatch, found, reason, next_step):
    accelerator("xpu")
    monkeypatch.setattr(torch, "xpu", found)
    plugged(GenericBackend())
    answer = pt.backends()["generic"]
    assert (answer.available, answer.reason) == (False, reason)
    assert next_step in answer.next_step


def test_the_device_may_become_known_after_the_plugins(accelerator, plugged):
    accelerator(None)
    backend = GenericBackend()
    plugged(backend)
    assert (backend.spec.device_type, backend.spec.aliases, backend.module()) == (ANY, (), None)
    accelerator("acme", module())
    assert (backend.spec.device_type, backend.spec.aliases) == ("acme", ("acme",))
    assert pt.use("acme").backend is backend


def test_while_plugins_are_looked_for_the_spec_can_be_read(accelerator, monkeypatch):
    """The registry reads each backend's name before it is complete; asking it for the others then would never end."""
    accelerator("cuda")
    monkeypatch.setattr(plugins, "_registry", None)
    assert GenericBackend().spec.name == "generic"
    assert plugins.found() is None
    assert plugins.registry().backends["generic"].spec.device_type == ANY, "cuda is served by its own backend"


def test_probe_imports_nothing(accelerator, plugged):
    accelerator("acme", module())
    plugged(GenericBackend())
    before = set(sys.modules)
    assert pt.backends()["generic"].available
    assert set(sys.modules) == before


def test_documents_are_the_same_on_every_machine(accelerator):
    from portable import backend_docs, support_table

    texts = []
    for kind in (None, "mps", "acme"):
        accelerator(kind, module())
        texts.append(support_table.render() + backend_docs.render())
    assert texts[0] == texts[1] == texts[2]
    for spec in KNOWN.values():
        assert f"| device type | `{spec.device_type}` |" in texts[0]


# The declarations, against PyTorch.


@pytest.mark.parametrize("kind", KNOWN)
def test_facts_name_what_pytorch_has(kind: str) -> None:
    from torch import distributed
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
    from torch.profiler import ProfilerActivity

    spec = KNOWN[kind]
    assert spec.name == "generic"
    assert torch.device(spec.device_type).type == spec.device_type == kind
    assert kind in spec.aliases
    registered = distributed.Backend.default_device_backend_map.get(kind, "fake")
    assert spec.process_group == {"fake": {"hpu": "hccl", "mtia": "gloo"}.get(kind)}.get(registered, registered)
    init_backend_registration()
    assert (spec.compile.backend == "inductor") == (get_scheduling_for_device(kind) is not None)
    assert all(hasattr(ProfilerActivity, name) for name in spec.profiler_activities)
    for generation in spec.generations.values():
        for name in generation.storage | generation.matmul | set(generation.autocast):
            assert isinstance(getattr(torch, name), torch.dtype)
        assert set(generation.autocast) <= generation.matmul <= generation.storage
        assert generation.source


@pytest.mark.parametrize("kind", ["xpu", "mps", "mtia"])
def test_native_cells_of_the_changes_exist_in_pytorch(kind: str) -> None:
    """A cell with a fallback may name what only newer versions have; what it falls back to must exist."""
    owner = getattr(torch, kind)
    assert set(CHANGES[kind]) <= set(BY_NAME)
    for name, cell in CHANGES[kind].items():
        last = chain(cell)[-1]
        if last.kind == "native":
            assert lookup(last.path, owner) is not None, name


def test_what_torch_xpu_has_depends_on_its_version() -> None:
    calls = GenericBackend("xpu").bind()
    for name, path in (("CUDAGraph", "XPUGraph"), ("graph", "graph"), ("temperature", "temperature")):
        if hasattr(torch.xpu, path):
            assert calls[name] is getattr(torch.xpu, path)
        else:
            assert calls[name].portable_unsupported
    assert getattr(calls["power_draw"], "portable_unsupported", False) != hasattr(torch.xpu, "power_draw")


@pytest.mark.parametrize("kind", ["xpu", "mtia", "mps"])
def test_functions_take_the_arguments_that_portable_passes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pt.* passes an ordinal or None by position; torch.mps' functions of the same purpose mostly take no argument."""
    import inspect

    calls = GenericBackend(kind).bind()
    one = [
        "synchronize", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
        "reset_peak_memory_stats", "reset_accumulated_memory_stats", "mem_get_info", "get_device_properties", "current_stream",
        "get_rng_state", "get_device_name", "utilization", "temperature", "power_draw", "clock_rate", "memory_usage",
    ]  # fmt: skip
    for name in one:
        inspect.signature(calls[name]).bind(0)
    inspect.signature(calls["set_per_process_memory_fraction"]).bind(0.5, None)
    inspect.signature(calls["set_rng_state"]).bind(torch.empty(0), 0)
    inspect.signature(calls["is_bf16_supported"]).bind(True)
    for name in ("empty_cache", "seed", "seed_all", "initial_seed", "get_rng_state_all"):
        inspect.signature(calls[name]).bind()
    for name in ("manual_seed", "manual_seed_all", "set_device"):
        inspect.signature(calls[name]).bind(0)


def test_values_of_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number reaches the function of torch.mps whose documentation describes it."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 3 * 2**20)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5 * 2**20)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * 2**20)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", asked.append)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M9")
    monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda: 10)
    backend = GenericBackend("mps")
    calls = backend.bind()
    assert calls["memory_allocated"](0) == 3 * 2**20
    assert calls["memory_reserved"](None) == 5 * 2**20
    assert calls["mem_get_info"](0) == (7 * 2**20, 12 * 2**20)
    calls["set_per_process_memory_fraction"](1, None)
    assert asked == [1.0] and isinstance(asked[0], float), "torch.mps refuses integers"
    assert (backend.device_name(), backend.total_memory()) == ("Apple M9", 12 * 2**20)
    properties = calls["get_device_properties"](0)
    assert (properties.name, properties.total_memory, properties.multi_processor_count) == ("Apple M9", 12 * 2**20, 10)
    assert calls["Event"] is torch.mps.Event
    for name in ("max_memory_allocated", "memory_stats", "Stream", "CUDAGraph", "temperature"):
        with pytest.raises(UnsupportedError, match=f"{name} is not available on the generic backend"):
            calls[name]()
    generation = backend.generation()
    assert generation is not None and not {"float64", "complex128"} & generation.storage
    assert precision_policy(backend).autocast is None


def test_values_of_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "power_draw", lambda device=None: 117.25, raising=False)
    matrix_units = True
    monkeypatch.setattr(
        torch.xpu,
        "get_device_properties",
        lambda device=None: SimpleNamespace(has_subgroup_matrix_multiply_accumulate=matrix_units, total_memory=16 * 2**30),
    )
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda device=None: "Intel Arc")
    backend = GenericBackend("xpu")
    assert modules._watts_to_milliwatts(0) == 117250, "torch.xpu answers watts, torch.cuda milliwatts"
    assert (backend.device_name(), backend.total_memory()) == ("Intel Arc", 16 * 2**30)
    policy = precision_policy(backend)
    assert (policy.autocast, policy.scaler) == ("bfloat16", False)
    matrix_units = False
    assert precision_policy(backend).autocast is None


def test_values_of_mtia_and_gaudi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mtia, "get_device_properties", lambda device=None: {"total_memory": 64})
    assert GenericBackend("mtia").bind()["get_device_properties"](0).total_memory == 64
    assert precision_policy(GenericBackend("mtia")).autocast is None
    assert precision_policy(GenericBackend("hpu")).autocast == "bfloat16"
    choice = explain_compile(GenericBackend("hpu"), mode="max-autotune")
    assert "mode" in choice.dropped
    assert choice.backend is None and "habana_frameworks" in choice.reason


# Texts of PyTorch's aten/src/ATen/mps/MPSFallback.mm and of intel/torch-xpu-ops' XPUFallback.template, an operator put in.
FALLBACKS = {
    "mps": "The operator 'aten::col2im' is not currently supported on the MPS backend and will fall back to run on the CPU. "
    "This may have performance implications.",
    "xpu": "The operator 'aten::col2im on the XPU backend is falling back to run on the CPU.",
}


@pytest.mark.parametrize("kind", FALLBACKS)
def test_fallbacks_are_counted(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    import warnings

    with GenericBackend(kind).fallbacks() as seen:
        warnings.warn(FALLBACKS[kind], stacklevel=1)
        warnings.warn(FALLBACKS[kind], stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert seen == {"aten::col2im": 2}
    assert [str(warning.message) for warning in recwarn] == ["something else"]


@pytest.mark.parametrize("always", [True, False])
def test_every_announcement_is_counted_not_only_the_first_of_the_process(always: bool) -> None:
    """The texts above are printed by TORCH_WARN_ONCE; ``Tensor.T`` of a 3-d tensor warns in the same way on any machine."""
    declared = fakes.FallbackSpec(True, "for a test", warning=r"The use of `x\.(?P<op>T)` on tensors")
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(always)
    with fakes.Fake(fakes.spec(fallback=declared)).fallbacks() as seen:
        for _ in range(3):
            _ = torch.ones(2, 2, 2).T
    assert seen == {"T": 3}
    assert torch.is_warn_always_enabled() == always
    torch.set_warn_always(before)


# A device that no table lists.


def test_what_an_unlisted_devices_package_registered_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import distributed

    plain = generic.declared("acme")
    assert (plain.process_group, plain.composite_group, plain.compile.backend) == ("gloo", False, None)
    monkeypatch.setitem(distributed.Backend.default_device_backend_map, "acme", "accl")
    monkeypatch.setattr(torch, "acme", ModuleType("torch.acme"), raising=False)
    for name in ("Scheduling", "PythonWrapperCodegen", "CppWrapperCodegen"):
        setattr(torch.acme, name, object())  # type: ignore[attr-defined]
    found = generic.declared("acme")
    assert (found.process_group, found.composite_group, found.compile.backend) == ("accl", True, "inductor")
    assert found.aliases == ("acme",)
    monkeypatch.setitem(distributed.Backend.default_device_backend_map, "acme", "fake")  # torch.testing's stand-in
    assert generic.declared("acme").process_group == "gloo"
    assert unknown(ANY).aliases == ()


EMULATED = """
import json, sys, torch
import emulated_device
emulated_device.install("widget", device_count=3)
import portable as pt
from portable.info import collect

found = collect().as_dict()
row = next(entry for entry in found["backends"] if entry["name"] == "generic")
net = torch.nn.Linear(4, 2).to(pt.device())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **pt.optimizer_options("SGD"))
x = torch.arange(12.0).reshape(3, 4)
for batch in pt.prefetch([x, x]):
    with pt.autocast():
        loss = net(batch).square().mean()
    loss.backward()
    optimizer.step()
json.dump({
    "active": found["active"], "type": row["device_type"], "reason": row["reason"],
    "names": [device["name"] for device in row["devices"]], "memory": row["devices"][0]["memory"],
    "autocast": row["precision"]["autocast"], "device": str(pt.device(2)), "weight": str(net.weight.device),
    "dtype": str(net(x.to("widget")).dtype), "problems": found["plugin_problems"],
}, sys.stdout)
"""


def test_an_unlisted_device_gets_the_baseline() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PORTABLE_BACKEND"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", EMULATED], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "active": "generic",
        "type": "widget",
        "reason": "3 widget devices",
        "names": ["widget:0", "widget:1", "widget:2"],
        "memory": None,
        "autocast": None,
        "device": "widget:2",
        "weight": "widget:0",
        "dtype": "torch.float32",
        "problems": [],
    }


def test_facts_import_neither_torch_nor_a_vendor() -> None:
    source = Path(importlib.import_module("portable_generic.facts").__file__ or "").read_text(encoding="utf-8")
    assert not re.search(r"^\s*(import|from) torch", source, re.MULTILINE)
