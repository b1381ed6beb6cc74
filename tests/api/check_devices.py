"""Choosing backends and devices, precision, compilation, loaders: the details, the same on every backend."""

from __future__ import annotations

import inspect
import logging
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import portable as pt
from portable import compiling

Pair = namedtuple("Pair", "x y")


def test_every_public_name_is_used_here() -> None:
    """By the check files, as pt.NAME; those of the device API are checked from the catalogue (check_functions.py)."""
    from portable import catalogue

    # custom_fwd and custom_bwd come by three names, pt.distributed by that of its module.
    text = "pt.custom_fwd pt.custom_bwd " + "".join(path.read_text() for path in Path(__file__).parent.glob("check_*.py"))
    listed = {function.public_name for function in catalogue.FUNCTIONS} | {function.name for function in catalogue.FUNCTIONS}
    names = {name for group in pt._EXPORTS.values() for name in group} | set(pt._MODULES)
    assert [name for name in sorted(names - listed) if f"pt.{name}" not in text] == []


# -- backends ------------------------------------------------------------------------------------------------------------------


def test_choosing(chosen: Any, name: str) -> None:
    assert pt.active() is chosen and pt.use(None).backend is not None
    with pt.use("cpu") as cpu:
        assert pt.active() is cpu and pt.device().type == "cpu" and pt.execution() == "hardware"
        with pt.use(name):
            assert pt.active() is chosen
    pt.use(name)
    for alias in (name.upper(), f" {name} ", *chosen.spec.aliases):
        assert pt.use(alias).backend is chosen
    with pytest.raises(pt.BackendNotFound, match=f"backend 'gpu9' .*{name}"):
        pt.use("gpu9")
    with pytest.raises(pt.BackendUnavailable, match=r"is not available: .* Next step: "):
        pt.use("cuda" if not torch.cuda.is_available() else "generic")
    assert pt.active() is chosen and pt.backends()[name].available
    assert pt.hookspecs and issubclass(pt.PluginError, pt.errors.PortableError)


def test_devices(chosen: Any, device: torch.device) -> None:
    kind = chosen.spec.device_type
    right = torch.device("cpu") if kind == "cpu" else torch.device(kind, 0)
    for form in (None, 0, kind, f"{kind}:0", torch.device(kind), torch.device(kind, 0)):
        assert pt.device(form) == right
        with pt.device_index(form):
            assert pt.current_device() == 0
    assert torch.ones(1, device=device).device == right, "equal to what tensors say"
    assert pt.device("cpu") == torch.device("cpu")
    for wrong, error in ((1, pt.DeviceIndexError), (-1, pt.DeviceIndexError), (f"{kind}:7", pt.DeviceIndexError)):
        with pytest.raises(error, match=r"0 to 0|has 1 device"):
            pt.device(wrong)
    for wrong in ("meta", "mtia", True, 0.5, "no device", object()):
        with pytest.raises(pt.ConfigurationError):
            pt.device(wrong)  # type: ignore[arg-type]
    with pt.device_of(torch.ones(1, device=device)), pt.device_of(torch.ones(1)):
        assert pt.current_device() == 0
    with pt.device_index(None), pt.device_index(-1):
        pt.set_device(-1)
        assert pt.current_device() == 0


def test_what_the_device_is(chosen: Any) -> None:
    generation = pt.generation()
    assert generation is not None and generation is chosen.spec.generations[generation.name] and generation.source
    expected = {"ascend": "Ascend910B2", "neuron": "trn2"}.get(chosen.spec.name, generation.name)
    assert generation.name == expected
    total = pt.get_device_properties().total_memory
    assert total == pt.memory.info()[1] and (generation.memory is None or total == generation.memory)
    policy = pt.precision_policy()
    assert isinstance(policy, pt.PrecisionPolicy) and policy.reason
    assert policy.autocast == (generation.autocast[0] if generation.autocast else None)
    assert policy.scaler == (policy.autocast == "float16")
    assert pt.graphs.is_supported() == (chosen.support["CUDAGraph"].kind == "native")


# -- precision -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", [pt, pt.amp, pt.cuda], ids=["portable", "amp", "cuda"])
def test_custom_functions(device: torch.device, namespace: Any) -> None:
    """float32 inside where it is asked for; else the forward's state, in the backward pass too."""
    seen: dict[str, Any] = {}

    class Square(torch.autograd.Function):
        @staticmethod
        @namespace.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen["forward"] = (x.dtype, torch.is_autocast_enabled(device.type))
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @namespace.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen["backward"] = torch.is_autocast_enabled(device.type)
            return 2 * ctx.saved_tensors[0] * grad

    class Doubled(torch.autograd.Function):
        @staticmethod
        @namespace.custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen["plain"] = torch.is_autocast_enabled(device.type)
            return 2 * x

        @staticmethod
        @namespace.custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen["plain backward"] = torch.is_autocast_enabled(device.type)
            return 2 * grad

    x = torch.tensor([3.0], dtype=torch.bfloat16, device=device, requires_grad=True)
    with pt.autocast(torch.bfloat16):
        y, z = Square.apply(x), Doubled.apply(x)
    (y.sum() + z.sum()).backward()
    assert x.grad is not None and x.grad.item() == 8.0
    assert seen == {"forward": (torch.float32, False), "backward": False, "plain": True, "plain backward": True}


def test_autocast_nests_decorates_and_ends(device: torch.device) -> None:
    ones = torch.ones(4, 4, device=device)
    product = pt.autocast(torch.bfloat16)(lambda: ones @ ones)
    assert product().dtype == torch.bfloat16 and (ones @ ones).dtype == torch.float32
    with pt.autocast(torch.bfloat16):
        with pt.autocast(torch.bfloat16, enabled=False):
            assert (ones @ ones).dtype == torch.float32
        assert (ones @ ones).dtype == torch.bfloat16
    with pytest.raises(KeyError), pt.autocast(torch.bfloat16):
        raise KeyError
    assert not torch.is_autocast_enabled(device.type)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_scaler_grows_again(device: torch.device, bad: float) -> None:
    scaler = pt.GradScaler(enabled=True, init_scale=1024.0, growth_interval=2)
    weight = nn.Parameter(torch.ones(1, device=device))
    opt = torch.optim.SGD([weight], lr=1.0)
    seen = []
    for factor in (bad, 0.5, 0.25):
        scaler.scale(factor * weight.sum()).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        seen.append((weight.item(), scaler.get_scale()))
    assert seen == [(1.0, 512.0), (0.5, 512.0), (0.25, 1024.0)]
    twin = pt.cuda.GradScaler(enabled=True)
    twin.load_state_dict(scaler.state_dict())
    assert twin.get_scale() == 1024.0


# -- compilation and optimizers ------------------------------------------------------------------------------------------------


def test_compile_arguments(chosen: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_warned", set())
    caplog.set_level(logging.WARNING, logger="portable")
    declared = chosen.spec.compile
    choice = pt.explain_compile(mode="reduce-overhead")
    assert isinstance(choice, pt.CompileChoice)
    assert choice.backend == (None if chosen.compile_problem() else declared.backend)
    if choice.backend is not None:
        assert set(choice.dropped) == ({"mode"} if "mode" in declared.forbidden or declared.backend == "inductor" else set())
        assert choice.kwargs == dict(declared.kwargs)
        pt.compile(nn.Linear(2, 2), mode="reduce-overhead")
        assert ["mode is not passed on" in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(TypeError, match="fulgraph"):
        pt.explain_compile(fulgraph=True)


def test_a_compiled_function_has_the_values_and_gradients_of_eager(device: torch.device) -> None:
    x = torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        with pt.autocast(torch.bfloat16):
            return (x @ x.t()).float().tanh().sum()

    eager = function(x)
    (right,) = torch.autograd.grad(eager, x)
    compiled = pt.compile(function, backend="aot_eager", fullgraph=True)(x)
    (found,) = torch.autograd.grad(compiled, x)
    assert compiled.item() == eager.item() and torch.equal(found.cpu(), right.cpu())


def test_optimizer_options_are_accepted(device: torch.device) -> None:
    for name, kind in sorted(vars(torch.optim).items()):
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
            continue
        options = pt.optimizer_options(name)
        assert pt.explain_optimizer(name).reason and set(options) <= set(inspect.signature(kind).parameters)
        weight = nn.Parameter(torch.ones(3, 3, device=device))
        if name != "SparseAdam":
            weight.square().sum().backward()
            opt = kind([weight], **options)
            opt.step(*([lambda w=weight: w.square().sum()] if name == "LBFGS" else []))
            assert weight.detach().cpu().sum().item() != 9, name
    with pytest.raises(pt.ConfigurationError, match="case-sensitive"):
        pt.optimizer_options("adamw")


# -- loaders -------------------------------------------------------------------------------------------------------------------


def test_prefetch_keeps_structures(device: torch.device) -> None:
    batch = {"a": [torch.ones(2), ("text", 3)], "b": Pair(torch.zeros(1), None), "c": {1, 2}}
    (found,) = pt.prefetch([batch])
    assert type(found["b"]) is Pair and found["b"].y is None and found["c"] == {1, 2} and found["a"][1] == ("text", 3)
    assert found["a"][0].device == found["b"].x.device == device and found["a"][0].tolist() == [1, 1]
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    ((moved,),) = pt.prefetch([(packed,)])
    assert moved.data.device == device and moved.batch_sizes.device.type == "cpu"
    ((there,),) = pt.prefetch([[torch.ones(1, device=device)]], device)
    assert there.device == device


def test_prefetch_over_epochs_and_errors(device: torch.device) -> None:
    batches = pt.prefetch(DataLoader(TensorDataset(torch.arange(10)), batch_size=3))
    assert len(batches) == 4
    for _ in range(2):
        assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]

    def failing() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        yield torch.ones(1)
        raise OSError("disk")

    iterator = iter(pt.prefetch(failing(), device))
    assert [next(iterator).item(), next(iterator).item()] == [0, 1]
    with pytest.raises(OSError, match="disk"):
        next(iterator)
    assert list(pt.prefetch([])) == []
    with pytest.raises(pt.PortableError):
        pt.prefetch([], 9)


# -- determinism, random numbers -----------------------------------------------------------------------------------------------


def test_deterministic_sets_and_restores(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for key in chosen.spec.determinism.environment:
        monkeypatch.delenv(key, raising=False)
    with pt.deterministic(warn_only=True):
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert {key: os.environ.get(key) for key in chosen.spec.determinism.environment} == chosen.spec.determinism.environment
    assert not torch.are_deterministic_algorithms_enabled()
    assert not set(chosen.spec.determinism.environment) & set(os.environ)


def test_seeds_from_entropy_differ(device: torch.device) -> None:
    for seeding in (pt.seed, pt.seed_all, pt.random.seed):
        drawn = set()
        for _ in range(3):
            seeding()
            drawn.add(tuple(torch.rand(4, device=device).tolist()))
        assert len(drawn) == 3
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match="NumPy takes 0 to"):
            pt.seed_everything(seed)


# -- memory, streams -----------------------------------------------------------------------------------------------------------


def test_both_names_of_memory_agree(device: torch.device) -> None:
    keep = torch.ones(2**20, device=device)
    for short, long in (
        ("allocated", "memory_allocated"),
        ("reserved", "memory_reserved"),
        ("max_allocated", "max_memory_allocated"),
    ):
        assert abs(getattr(pt.memory, short)() - getattr(pt.cuda, long)()) < 2**22
    stats = pt.memory.stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] >= keep.nbytes
    assert pt.is_out_of_memory(pt.OutOfMemoryError("full")) and not pt.is_out_of_memory(RuntimeError("shapes"))


def test_stream_objects(device: torch.device) -> None:
    stream = pt.streams.Stream()
    event = pt.streams.Event(enable_timing=True)
    event.record(stream)
    with pytest.raises(KeyError), pt.stream(stream):
        raise KeyError
    assert pt.current_stream() == pt.default_stream()
    with pt.stream(None):
        assert pt.current_stream() == pt.default_stream()
    pt.set_stream(stream)
    assert pt.current_stream() == stream
    pt.set_stream(pt.default_stream())
    stream.synchronize()
    event.synchronize()
    assert stream.query() and event.query()
    later = pt.Event(enable_timing=True)
    later.record()
    later.synchronize()
    assert event.elapsed_time(later) >= 0
    plain = pt.Event()
    plain.record()
    with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
        event.elapsed_time(plain)
