"""Programs on the emulated device: checkpoints, copies, loaders, autocast, scaling, generators, threads."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CPU = torch.device("cpu")


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


# -- making tensors ----------------------------------------------------------------------------------------------------------


def test_data_arrives(dev: torch.device) -> None:
    for made in (
        torch.tensor([[1.5, 2.0], [3.0, 4.0]], device="neuron"),
        torch.as_tensor(np.array([[1.5, 2.0], [3.0, 4.0]], dtype=np.float32), device="neuron"),
        torch.from_numpy(np.array([[1.5, 2.0], [3.0, 4.0]], dtype=np.float32)).to("neuron"),
        torch.asarray([[1.5, 2.0], [3.0, 4.0]], device="neuron"),
        torch.tensor([[1.5, 2.0], [3.0, 4.0]]).neuron(),  # type: ignore[attr-defined]
        torch.tensor([[1.5, 2.0], [3.0, 4.0]]).to(dev, torch.float32, non_blocking=True, copy=True),
    ):
        assert made.device == torch.device("neuron", 0) and made.dtype == torch.float32
        assert made.is_neuron and made.tolist() == [[1.5, 2.0], [3.0, 4.0]]  # type: ignore[attr-defined]
    assert torch.tensor(3, device=dev).item() == 3 and torch.tensor(True, device=dev).dtype == torch.bool


def test_a_copy_does_not_share_memory_with_the_cpu(dev: torch.device) -> None:
    host = torch.zeros(3)
    there = host.to(dev)
    host.fill_(5)
    back = there.cpu()
    there.fill_(7)
    assert back.tolist() == [0, 0, 0]
    assert there.to(dev) is there and there.to(dev, copy=True).add_(1).tolist() == [8, 8, 8] and there.tolist() == [7, 7, 7]


def test_factories(dev: torch.device) -> None:
    with torch.device("neuron"):
        made = [torch.zeros(2), torch.arange(3), torch.full((2,), 7), torch.tensor([1]), torch.eye(2), torch.randn(2)]
        layer = nn.Linear(2, 2)
    assert all(t.device.type == "neuron" for t in (*made, *layer.parameters()))
    torch.set_default_device("neuron")
    try:
        assert torch.ones(1).device.type == "neuron" and torch.get_default_device() == torch.device("neuron", 0)
    finally:
        torch.set_default_device(None)
    assert torch.ones(1).device == CPU
    like = torch.zeros(2, dtype=torch.bfloat16, device=dev)
    for t in (torch.zeros_like(like), like.new_ones(3), torch.rand_like(like), like.new_tensor([1, 2]), torch.empty_like(like)):
        assert t.device.type == "neuron" and t.dtype == torch.bfloat16
    assert torch.zeros_like(like, device="cpu").device == CPU


def test_numpy_gives_pytorchs_error(dev: torch.device) -> None:
    with pytest.raises(TypeError, match=r"can't convert neuron:0 device type tensor to numpy"):
        torch.ones(2, device=dev).numpy()
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        np.asarray(torch.ones(2, device=dev))


def test_printing(dev: torch.device) -> None:
    x = torch.tensor([1.0, 2.5], device=dev, requires_grad=True)
    assert repr(x) == "tensor([1.0000, 2.5000], device='neuron:0', requires_grad=True)"
    assert repr(x.detach()) == "tensor([1.0000, 2.5000], device='neuron:0')"
    assert repr(x * 2) == "tensor([2., 5.], device='neuron:0', grad_fn=<MulBackward0>)"
    assert repr(nn.Parameter(x.detach())) == (
        "Parameter containing:\ntensor([1.0000, 2.5000], device='neuron:0', requires_grad=True)"
    )
    assert f"{x[1]:.1f}" == "2.5" and "device=neuron:0" not in repr(nn.Linear(2, 2).to(dev))
    assert repr(torch.zeros(0, 3, device=dev)) == "tensor([], device='neuron:0', size=(0, 3))"


# -- copies and checkpoints --------------------------------------------------------------------------------------------------


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

    base = torch.arange(6.0, device=dev)
    pair = again([base, base.view(2, 3)[1]])
    assert [t.device.type for t in pair] == ["neuron"] * 2 and pair[1].tolist() == [3, 4, 5]
    pair[0].add_(1)
    # Views of one storage still share it, except through pickle, which is so on the CPU too.
    assert pair[1].tolist() == ([3, 4, 5] if how == "pickle" else [4, 5, 6])
    assert base.tolist() == [0, 1, 2, 3, 4, 5]
    model = network().to(dev)
    model[0].weight.requires_grad_(False)
    twin = again(model)
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert b.device.type == "neuron" and torch.equal(a.cpu(), b.cpu()) and a.data_ptr() != b.data_ptr()
    assert isinstance(twin[0].weight, nn.Parameter) and not twin[0].weight.requires_grad and twin[3].weight.requires_grad


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize(
    ("start", "where", "end"), [("neuron", None, "neuron"), ("neuron", "cpu", "cpu"), ("cpu", "neuron", "neuron")]
)
def test_map_location(dev: torch.device, tmp_path: Path, weights_only: bool, start: str, where: Any, end: str) -> None:
    values = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16), "ids": torch.tensor([2**40]), "empty": torch.zeros(0)}
    torch.save({name: t.to(start) for name, t in values.items()}, tmp_path / "x.pt")
    got = torch.load(tmp_path / "x.pt", map_location=where, weights_only=weights_only)
    for name, t in values.items():
        assert got[name].device.type == end and got[name].dtype == t.dtype and torch.equal(got[name].cpu(), t)
    for form in (torch.device("neuron", 0), {start: "cpu"}, lambda storage, tag: storage.cpu()):
        assert torch.equal(torch.load(tmp_path / "x.pt", map_location=form, weights_only=weights_only)["w"].cpu(), values["w"])


@pytest.mark.parametrize(("first", "second"), [("neuron", "cpu"), ("cpu", "neuron"), ("neuron", "neuron")])
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
    assert {t.device.type for s in opt.state.values() for name, t in s.items() if name != "step"} == {second}


def test_shared_weights_stay_shared(dev: torch.device) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    weight = model["a"].weight
    model.to(dev)
    assert model["b"].weight is model["a"].weight is weight and len(list(model.parameters())) == 3
    model.to(torch.bfloat16).cpu()
    assert model["b"].weight is model["a"].weight and model["a"].weight.device == CPU


def test_meta_modules_materialise(dev: torch.device) -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 2)
    layer = layer.to_empty(device=dev)
    layer.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    assert layer(torch.ones(1, 3, device=dev)).tolist() == [[3, 3]]


# -- loaders -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [None, "fork", "spawn"])
@pytest.mark.parametrize("pin", [False, True])
def test_loader(dev: torch.device, context: str | None, pin: bool) -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    workers = 0 if context is None else 1
    loader = DataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context=context, pin_memory=pin)
    rows = [(x.to(dev, non_blocking=True) * 2).cpu() for x, _ in loader]
    assert torch.equal(torch.cat(rows), torch.arange(12.0).view(6, 2) * 2)


# -- autocast and scaling ----------------------------------------------------------------------------------------------------


def test_autocast_without_a_dtype_is_float16(dev: torch.device) -> None:
    layer, x = nn.Linear(2, 2).to(dev), torch.ones(1, 2, device=dev)
    with torch.autocast("neuron"):
        assert layer(x).dtype == torch.float16 and torch.get_autocast_dtype("neuron") == torch.float16
    with torch.autocast("neuron", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        with torch.autocast("neuron", enabled=False):
            assert layer(x).dtype == torch.float32
        with torch.autocast("neuron", dtype=torch.float16):
            assert layer(x).dtype == torch.float16
        assert layer(x).dtype == torch.bfloat16
        assert (layer(x.cpu().to(dev)).sum() + layer(x).exp()).dtype == torch.float32
    assert layer(x).dtype == torch.float32


def test_autocast_lists_are_cudas(dev: torch.device) -> None:
    """Reference: the operators for which this build of PyTorch has a CUDA autocast kernel."""
    from portable.rehearsal import autocast

    has = torch._C._dispatch_has_kernel_for_dispatch_key
    cuda = {n[6:] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::") and has(n, "AutocastCUDA")}
    mine = {*autocast.LOWER, *autocast.FLOAT32, *autocast.FLOAT32_RESULT, *autocast.WIDEST, "binary_cross_entropy"}
    assert {n.removesuffix(".default") for n in cuda} - mine == {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert mine <= cuda


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda h, f: h @ h, torch.bfloat16),
        (lambda h, f: f @ f, torch.bfloat16),
        (lambda h, f: torch.einsum("ij,jk->ik", f, h), torch.bfloat16),
        (lambda h, f: torch.exp(h), torch.float32),
        (lambda h, f: torch.softmax(h, -1), torch.float32),
        (lambda h, f: torch.softmax(h, -1, dtype=torch.float16), torch.float16),
        (lambda h, f: h.sum(), torch.float32),
        (lambda h, f: (h > 0).sum(), torch.int64),
        (lambda h, f: nn.functional.layer_norm(h, (2,)), torch.float32),
        (lambda h, f: nn.functional.mse_loss(h, f), torch.float32),
        (lambda h, f: torch.addcmul(h, h, f), torch.float32),
        (lambda h, f: torch.addcmul(h, h, h), torch.bfloat16),
        (lambda h, f: torch.cat([h, f]), torch.float32),
        (lambda h, f: h + h, torch.bfloat16),
        (lambda h, f: torch.relu(h), torch.bfloat16),
        (lambda h, f: torch.linalg.vector_norm(h), torch.float32),
    ],
)
def test_autocast_result(dev: torch.device, call: Any, dtype: torch.dtype) -> None:
    """As CUDA's table in PyTorch's documentation ("Autocast Op Reference") says."""
    half, full = torch.ones(2, 2, device=dev, dtype=torch.bfloat16), torch.ones(2, 2, device=dev)
    with torch.autocast("neuron", dtype=torch.bfloat16):
        assert call(half, full).dtype == dtype


def test_autocast_refuses_what_overflows(dev: torch.device) -> None:
    with torch.autocast("neuron", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
        nn.functional.binary_cross_entropy(torch.rand(2, device=dev), torch.rand(2, device=dev))


def test_autocast_casts_a_weight_once(dev: torch.device, recorder: Any) -> None:
    layer, x = nn.Linear(8, 8, bias=False).to(dev), torch.ones(1, 8, device=dev, dtype=torch.bfloat16)

    def casts(**options: Any) -> int:
        before = recorder.ops["aten::_to_copy"]
        with torch.autocast("neuron", dtype=torch.bfloat16, **options):
            for _ in range(3):
                layer(x)
        return recorder.ops["aten::_to_copy"] - before

    assert casts() == 1 and casts() == 1 and casts(cache_enabled=False) == 3
    with torch.autocast("neuron", dtype=torch.bfloat16):
        first = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with torch.autocast("neuron", dtype=torch.bfloat16):
        assert torch.equal(layer(x).cpu(), first.cpu() * 2), "the cache does not outlive the block"


def test_autocast_computes_in_the_low_dtype(dev: torch.device) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)
    right = nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    layer.to(dev)
    with torch.autocast("neuron", dtype=torch.bfloat16):
        out = layer(x.to(dev))
    assert torch.equal(out.cpu(), right)
    out.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32


def test_custom_functions_under_autocast(dev: torch.device) -> None:
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="neuron", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append((x.dtype, torch.is_autocast_enabled("neuron")))
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="neuron")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append((grad.dtype, torch.is_autocast_enabled("neuron")))
            return 2 * grad * ctx.saved_tensors[0]

    x = torch.full((2,), 3.0, device=dev, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("neuron", dtype=torch.bfloat16):
        out = Square.apply(x)
    out.sum().backward()
    assert seen == [(torch.float32, False), (torch.float32, False)]
    assert x.grad is not None and x.grad.tolist() == [6, 6]


def test_checkpointing_under_autocast(dev: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    layer, x = nn.Linear(4, 4).to(dev), torch.ones(2, 4, device=dev, requires_grad=True)
    grads = []
    for wrapped in (False, True):
        layer.zero_grad()
        with torch.autocast("neuron", dtype=torch.bfloat16):
            out = checkpoint(layer, x, use_reentrant=False) if wrapped else layer(x)
        out.float().square().sum().backward()
        assert layer.weight.grad is not None
        grads.append(layer.weight.grad.cpu())
    assert torch.equal(*grads)


def test_an_overflow_skips_the_step_and_halves_the_scale(dev: torch.device) -> None:
    weight = nn.Parameter(torch.ones(2, device=dev))
    opt = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("neuron", init_scale=1024.0, growth_interval=2)
    scales = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        opt.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 512.0, 512.0, 1024.0]
    assert weight.tolist() == [1 - 3 * 0.5] * 2, "three of four steps were taken, with unscaled gradients"


# -- generators, streams, threads --------------------------------------------------------------------------------------------


def test_seeds_repeat(dev: torch.device) -> None:
    neuron: Any = torch.neuron  # type: ignore[attr-defined]
    draws = []
    for seed in (torch.manual_seed, neuron.manual_seed, neuron.manual_seed_all):
        seed(11)
        draws.append([torch.randn(3, device=dev).cpu(), torch.rand(2, device=dev).cpu(), torch.randperm(5, device=dev).cpu()])
    assert all(torch.equal(a, b) for other in draws[1:] for a, b in zip(draws[0], other, strict=True))
    state = neuron.get_rng_state()
    first = torch.randn(3, device=dev).cpu()
    neuron.set_rng_state(state)
    assert torch.equal(first, torch.randn(3, device=dev).cpu()) and neuron.initial_seed() == 11
    with torch.random.fork_rng(devices=[0], device_type="neuron"):
        torch.randn(9, device=dev)
    neuron.set_rng_state(state)
    assert torch.equal(first, torch.randn(3, device=dev).cpu())


def test_generators_of_the_device_are_refused(dev: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"[Gg]enerator"):
        torch.Generator(device="neuron")
    with pytest.raises(RuntimeError, match="Draw on the CPU with that generator"):
        torch.zeros(3, device=dev).normal_(generator=torch.Generator())


def test_streams_and_events(dev: torch.device) -> None:
    neuron: Any = torch.neuron  # type: ignore[attr-defined]
    stream = neuron.Stream()
    with neuron.stream(stream):
        x = torch.ones(2, device=dev) + 1
    assert x.record_stream(neuron.current_stream()) is None
    stream.synchronize()
    neuron.current_stream().wait_stream(stream)
    start, end = neuron.Event(enable_timing=True), neuron.Event(enable_timing=True)
    start.record()
    end.record(stream)
    end.synchronize()
    assert end.query() and x.tolist() == [2, 2] and start.elapsed_time(end) >= 0 and isinstance(end, torch.Event)
    with pytest.raises(RuntimeError, match="enable_timing"):
        stream.record_event().elapsed_time(end)
    torch.accelerator.synchronize()
    assert torch.accelerator.current_accelerator() == torch.device("neuron")
    assert torch.accelerator.device_count() == 1 and torch.accelerator.current_device_index() == 0


def test_threads(dev: torch.device, recorder: Any) -> None:
    def work(number: int, out: dict[int, float]) -> None:
        torch.manual_seed(0)
        x = torch.full((50,), float(number), device=dev, requires_grad=True)
        for _ in range(40):
            y = (x * x).sum()
            (grad,) = torch.autograd.grad(y, x)
        out[number] = float(grad.sum())

    out: dict[int, float] = {}
    threads = [threading.Thread(target=work, args=(n, out)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out == {n: 100.0 * n for n in range(4)}
    assert recorder.ops["aten::sum"] == 4 * 41


def test_the_device_is_a_dictionary_key_and_an_argument(dev: torch.device) -> None:
    assert {torch.device("neuron", 0): 1}[torch.ones(1, device=dev).device] == 1
    with pytest.raises(RuntimeError, match="this process has 1 neuron device"):
        torch.zeros(1, device="neuron:1")
    with pytest.raises(RuntimeError, match="Move it with"):
        torch.ones(2, device=dev) + torch.ones(2)
    assert (torch.ones(2, device=dev) + torch.tensor(1.0)).tolist() == [2, 2], "numbers on the CPU are allowed, as on CUDA"
