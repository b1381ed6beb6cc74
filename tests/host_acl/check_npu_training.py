"""Programs on torch_npu's tensors: training equals the CPU to the bit; checkpoints, loaders, autocast, scaling."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from check_parity import CPU, OPTIMIZERS, same, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=["foreach", "fused", "for loop"])
def test_twenty_steps_of_adamw(dev: torch.device, options: dict[str, Any]) -> None:
    make = lambda p: torch.optim.AdamW(p, lr=1e-3, **options)  # noqa: E731
    here, there = train(CPU, make), train(dev, make)
    same(here, there)
    assert here[0][-1] < here[0][0], "the run trains"


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(dev: torch.device, name: str, foreach: bool) -> None:
    for options in OPTIMIZERS[name]:
        make = lambda p, options=options: getattr(torch.optim, name)(p, foreach=foreach, **options)  # noqa: E731
        same(train(CPU, make, steps=4), train(dev, make, steps=4))


def test_lbfgs(dev: torch.device) -> None:
    make = lambda p: torch.optim.LBFGS(p, max_iter=3)  # noqa: E731
    same(train(CPU, make, steps=2), train(dev, make, steps=2))


def test_training_with_dropout_repeats_with_the_seed(dev: torch.device) -> None:
    make = lambda p: torch.optim.AdamW(p, lr=1e-3)  # noqa: E731
    first, again, plain = train(dev, make, 0.2, 5), train(dev, make, 0.2, 5), train(dev, make, 0.0, 5)
    same(first, again)
    assert not torch.equal(first[0], plain[0])


# -- autocast: the vendor's own lists ------------------------------------------------------------------------------------------

CASTS: list[tuple[str, Any, torch.dtype]] = [
    ("matmul of float32", lambda h, f: f @ f, torch.bfloat16),
    ("linear", lambda h, f: F.linear(f, f), torch.bfloat16),
    ("einsum", lambda h, f: torch.einsum("ij,jk->ik", f, h), torch.bfloat16),
    ("exp", lambda h, f: torch.exp(h), torch.float32),
    ("softmax", lambda h, f: torch.softmax(h, -1), torch.float32),
    ("layer_norm", lambda h, f: F.layer_norm(h, (2,)), torch.float32),
    ("sum", lambda h, f: h.sum(), torch.float32),
    ("widest", lambda h, f: torch.cat([h, f]), torch.float32),
    ("left alone", lambda h, f: h + h, torch.bfloat16),
]


@pytest.mark.parametrize(("call", "dtype"), [c[1:] for c in CASTS], ids=[c[0] for c in CASTS])
def test_autocast_results(dev: torch.device, call: Any, dtype: torch.dtype) -> None:
    half, full = torch.ones(2, 2, device=dev, dtype=torch.bfloat16), torch.ones(2, 2, device=dev)
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert call(half, full).dtype == dtype
    assert call(full, full).dtype == torch.float32


def test_autocast_without_a_dtype_is_float16(dev: torch.device) -> None:
    with torch.autocast("npu"):
        assert nn.Linear(2, 2).to(dev)(torch.ones(1, 2, device=dev)).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_the_low_dtype(dev: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)
    right = F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype)).detach()
    layer.to(dev)
    with torch.autocast("npu", dtype=dtype):
        out = layer(x.to(dev))
    assert torch.equal(out.cpu(), right)
    out.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", ["torch.amp", "torch.npu.amp"])
def test_an_overflow_skips_the_step_and_halves_the_scale(dev: torch.device, kind: str) -> None:
    scaler: Any = torch.amp.GradScaler("npu", init_scale=1024.0) if kind == "torch.amp" else _vendor_scaler()
    layer = nn.Linear(4, 1).to(dev)
    opt = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.weight.detach().cpu().clone()
    for factor, moved in ((1e30, False), (1.0, True)):
        opt.zero_grad()
        scaler.scale(layer(torch.ones(2, 4, device=dev)).sum() * factor * 1e6 ** (not moved)).backward()
        scaler.step(opt)
        scaler.update()
        assert bool((layer.weight.detach().cpu() != before).any()) == moved
        assert scaler.get_scale() == 512.0
    # Without overflow the gradient is the sum of the two rows of ones.
    torch.testing.assert_close(layer.weight.detach().cpu(), before - 0.2)


def _vendor_scaler() -> Any:
    import torch_npu

    return torch_npu.npu.amp.GradScaler(init_scale=1024.0)


# -- copies, checkpoints, loaders ----------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 1))


def step(model: nn.Module, opt: torch.optim.Optimizer, number: int) -> float:
    device = next(model.parameters()).device
    x = torch.linspace(-1, 1, 24).view(6, 4).roll(number).to(device)
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    return float(loss.detach())


@pytest.mark.parametrize(("first", "second"), [("npu", "cpu"), ("cpu", "npu"), ("npu", "npu")])
def test_training_resumes_on_the_other_device(dev: torch.device, tmp_path: Path, first: str, second: str) -> None:
    def fresh(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network().to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    model, opt = fresh("cpu")
    straight = [step(model, opt, n) for n in range(6)]
    model, opt = fresh(first)
    before = [step(model, opt, n) for n in range(3)]
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "state.pt")
    model, opt = fresh(second)
    state = torch.load(tmp_path / "state.pt", map_location=second, weights_only=True)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    assert before + [step(model, opt, n) for n in range(3, 6)] == straight


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(("start", "where", "end"), [("npu", None, "npu"), ("npu", "cpu", "cpu"), ("cpu", "npu", "npu")])
def test_map_location(dev: torch.device, tmp_path: Path, weights_only: bool, start: str, where: Any, end: str) -> None:
    values = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "ids": torch.tensor([2**40]), "empty": torch.zeros(0)}
    torch.save({name: t.to(start) for name, t in values.items()}, tmp_path / "x.pt")
    got = torch.load(tmp_path / "x.pt", map_location=where, weights_only=weights_only)
    for name, t in values.items():
        assert got[name].device.type == end and got[name].dtype == t.dtype and torch.equal(got[name].cpu(), t)


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "save"])
def test_copies_of_tensors_and_modules(dev: torch.device, how: str) -> None:
    def again(value: Any) -> Any:
        if how == "pickle":
            return pickle.loads(pickle.dumps(value))
        if how == "deepcopy":
            return copy.deepcopy(value)
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    model = network().to(dev)
    model[0].weight.requires_grad_(False)
    twin = again(model)
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert b.device.type == "npu" and torch.equal(a.cpu(), b.cpu()) and a.data_ptr() != b.data_ptr()
    assert isinstance(twin[0].weight, nn.Parameter) and not twin[0].weight.requires_grad and twin[3].weight.requires_grad


def test_printing(dev: torch.device) -> None:
    x = torch.tensor([1.0, 2.5], device=dev, requires_grad=True)
    assert repr(x) == "tensor([1.0000, 2.5000], device='npu:0', requires_grad=True)"
    assert f"{x[1]:.1f}" == "2.5" and repr(torch.zeros(0, 3, device=dev)) == "tensor([], device='npu:0', size=(0, 3))"


def test_numpy_gives_pytorchs_error(dev: torch.device) -> None:
    with pytest.raises(TypeError, match=r"can't convert npu:0 device type tensor to numpy"):
        torch.ones(2, device=dev).numpy()


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
@pytest.mark.parametrize("pin", [False, True])
def test_loader(dev: torch.device, context: str | None, pin: bool) -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    workers = 0 if context is None else 1
    loader = DataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context=context, pin_memory=pin)
    batches = list(loader)
    assert all(x.is_pinned() == pin for x, _ in batches)
    rows = [(x.to(dev, non_blocking=True) * 2).cpu() for x, _ in batches]
    assert torch.equal(torch.cat(rows), torch.arange(12.0).view(6, 2) * 2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_dropout(dev: torch.device, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).to(dev)
    grads = []
    for wrapped in (False, True):
        torch.manual_seed(5)
        x = torch.ones(4, 16, device=dev, requires_grad=True)
        out = checkpoint(layer, x, use_reentrant=reentrant) if wrapped else layer(x)
        torch.rand(3, device=dev)  # moves the generator between forward and backward
        out.sum().backward()
        grads.append(x.grad.cpu())  # type: ignore[union-attr]
    assert torch.equal(*grads) and bool((grads[0] != 0).any())


def test_custom_functions(dev: torch.device) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    x = torch.tensor([2.0, 3.0], device=dev, requires_grad=True)
    Cube.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [12, 27]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graphs_of_dynamo(dev: torch.device, backend: str) -> None:
    model = network()
    compiled = torch.compile(copy.deepcopy(model).to(dev), backend=backend)
    x = torch.randn(6, 4)
    out, mine = model(x), compiled(x.to(dev))
    assert torch.equal(out, mine.cpu())
    out.sum().backward()
    mine.sum().backward()
    for a, b in zip(model.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.cpu())  # type: ignore[arg-type, union-attr]
