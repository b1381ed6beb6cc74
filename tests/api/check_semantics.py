"""Device API, precision, optimizers, loaders and profiles mean the same on every backend: values against PyTorch's CPU."""

from __future__ import annotations

import copy
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import portable as pt

MIB = 2**20


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=draw), torch.randint(4, (8,), generator=draw)) for _ in range(count)]


def train(device: torch.device, name: str = "AdamW", steps: int = 20, **options: Any) -> tuple[list[float], list[Tensor]]:
    model = network().to(device)
    opt = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **options)
    losses = []
    for x, y in batches(1) * steps:
        opt.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()]


# -- training ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_training_equals_the_cpu_to_the_bit(device: torch.device, optimizer: str) -> None:
    """With the optimizer options that the backend chooses, against the same ones on the CPU."""
    options = pt.optimizer_options(optimizer)
    (losses, weights), (right, expected) = (train(where, optimizer, **options) for where in (device, torch.device("cpu")))
    assert losses == right and right[-1] < right[0]
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_a_compiled_model_equals_eager(device: torch.device) -> None:
    model = network().to(device)
    x = batches(1)[0][0].to(device)
    out, right = pt.compile(copy.deepcopy(model))(x), model(x)
    torch.testing.assert_close(out, right)
    assert "compile" in type(pt.explain_compile()).__name__.lower() and pt.explain_compile().reason


def test_checkpoints_move_between_devices(device: torch.device, tmp_path: Path) -> None:
    model = network().to(device)
    torch.save(model.state_dict(), tmp_path / "m.pt")
    for where in ("cpu", device):
        state = torch.load(tmp_path / "m.pt", map_location=where, weights_only=True)
        assert all(t.device.type == torch.device(where).type for t in state.values())
        assert all(torch.equal(t.cpu(), model.state_dict()[n].cpu()) for n, t in state.items())


# -- precision -----------------------------------------------------------------------------------------------------------------


def test_autocast_computes_in_the_policys_dtype(device: torch.device) -> None:
    name = pt.precision_policy().autocast
    layer, x = nn.Linear(6, 4), torch.randn(3, 6)
    there = copy.deepcopy(layer).to(device)
    with pt.autocast():
        out = there(x.to(device))
    if name is None:
        assert out.dtype == torch.float32
        return
    dtype = getattr(torch, name)
    assert out.dtype == dtype
    low = [t.to(dtype) for t in (x, layer.weight, layer.bias)]
    assert torch.equal(out.cpu(), F.linear(*low))
    with pt.autocast(), pt.autocast(enabled=False):
        assert there(x.to(device)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_in_a_dtype_asked_for(device: torch.device, dtype: torch.dtype) -> None:
    layer = nn.Linear(6, 4).to(device)
    with pt.autocast(dtype=dtype):
        out = layer(torch.randn(3, 6, device=device))
    assert out.dtype == dtype
    out.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_a_scaler_follows_the_policy() -> None:
    assert pt.GradScaler().is_enabled() == pt.precision_policy().scaler


def test_an_overflow_skips_the_step_and_halves_the_scale(device: torch.device) -> None:
    layer = nn.Linear(4, 1).to(device)
    before = layer.weight.detach().cpu().clone()
    scaler = pt.GradScaler(enabled=True, init_scale=1024.0)
    opt = torch.optim.SGD(layer.parameters(), lr=0.1)
    for factor, moved in ((1e38, False), (1.0, True)):
        opt.zero_grad()
        scaler.scale(layer(torch.ones(2, 4, device=device)).sum() * factor).backward()
        scaler.step(opt)
        scaler.update()
        assert bool((layer.weight.detach().cpu() != before).any()) == moved and scaler.get_scale() == 512.0
    torch.testing.assert_close(layer.weight.detach().cpu(), before - 0.2)


def test_a_disabled_scaler_passes_through(device: torch.device) -> None:
    scaler = pt.GradScaler(enabled=False)
    loss = torch.ones(1, device=device)
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0


# -- streams, events, ranges ---------------------------------------------------------------------------------------------------


def test_events_measure_milliseconds(device: torch.device) -> None:
    start, end = pt.Event(enable_timing=True), pt.Event(enable_timing=True)
    begun = time.perf_counter()
    start.record()
    time.sleep(0.03)
    end.record()
    bound = (time.perf_counter() - begun) * 1e3
    end.synchronize()
    assert 30 <= start.elapsed_time(end) <= bound + 0.01 and end.query()


def test_streams_nest_and_come_back(device: torch.device) -> None:
    default, outer, inner = pt.default_stream(), pt.Stream(), pt.Stream()
    with pt.stream(outer):
        assert pt.current_stream() == outer
        with pt.stream(inner):
            assert pt.current_stream() == inner
        x = torch.ones(4, device=device) + 1
        event = outer.record_event()
    inner.wait_event(event)
    inner.wait_stream(outer)
    assert pt.current_stream() == default and x.tolist() == [2] * 4
    pt.synchronize()


def test_ranges_and_marks() -> None:
    with pt.nvtx.range("step {}", 1):
        pt.nvtx.mark("here")
        pt.nvtx.range_push("inner")
        pt.nvtx.range_pop()


# -- memory --------------------------------------------------------------------------------------------------------------------


def test_memory_follows_tensors(device: torch.device) -> None:
    pt.reset_peak_memory_stats()
    before = pt.memory_allocated()
    x = torch.ones(64 * MIB // 4, device=device)
    assert abs(pt.memory_allocated() - before - 64 * MIB) < 16 * MIB
    assert pt.memory.max_allocated() >= before + 48 * MIB and pt.memory.reserved() >= pt.memory_allocated() - MIB
    del x
    pt.empty_cache()
    assert abs(pt.memory_allocated() - before) < 16 * MIB
    free, total = pt.memory.info()
    assert 0 < free <= total


def test_out_of_memory_is_recognised(device: torch.device) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**45, dtype=torch.uint8, device=device)
    assert pt.is_out_of_memory(caught.value)
    assert torch.ones(2, device=device).sum().item() == 2, "and work goes on"


# -- random numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeding", [pt.manual_seed, pt.manual_seed_all, torch.manual_seed, pt.seed_everything])
def test_draws_repeat_with_the_seed(device: torch.device, seeding: Any) -> None:
    def draw(seed: int) -> list[Tensor]:
        seeding(seed)
        ones = torch.ones(99, device=device)
        return [t.cpu() for t in (torch.rand(9, device=device), torch.randn_like(ones), F.dropout(ones))]

    first, again, other = draw(5), draw(5), draw(6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert pt.initial_seed() == 6


def test_seed_everything_reaches_python(device: torch.device) -> None:
    pt.seed_everything(4)
    first = random.random()
    pt.seed_everything(4)
    assert random.random() == first


def test_state_round_trip(device: torch.device) -> None:
    for get, put in ((pt.get_rng_state, pt.set_rng_state), (pt.get_rng_state_all, pt.set_rng_state_all)):
        state: Any = get()
        first = torch.rand(5, device=device).cpu()
        torch.rand(3, device=device)
        put(state)
        assert torch.equal(torch.rand(5, device=device).cpu(), first)


def test_fork_rng(device: torch.device) -> None:
    pt.manual_seed(5)
    right = torch.rand(3, device=device).cpu()
    pt.manual_seed(5)
    with pt.fork_rng():
        torch.rand(7, device=device)
        pt.manual_seed(9)
    assert torch.equal(torch.rand(3, device=device).cpu(), right)


def test_deterministic_training_repeats(device: torch.device) -> None:
    runs = []
    for _ in range(2):
        pt.seed_everything(7)
        with pt.deterministic():
            model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 4)).to(device)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in batches(4):
                opt.zero_grad()
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()
                opt.step()
            runs.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# -- loaders ------------------------------------------------------------------------------------------------------


def test_prefetch_brings_the_same_batches(device: torch.device) -> None:
    found = list(pt.prefetch(batches(5)))
    assert len(found) == 5
    for (x, y), (a, b) in zip(found, batches(5), strict=True):
        assert x.device.type == y.device.type == device.type
        assert torch.equal(x.cpu(), a) and torch.equal(y.cpu(), b)
