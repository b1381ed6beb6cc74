"""Programs written for CUDA on the session's backend: the tables of test_cuda_compat*.py, with values from PyTorch's CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_cuda_compat import DEVICES, MOVES, SAME_AS, checkpoint
from test_cuda_compat_training import AUTOCASTS, OPTIONS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import portable as pt
from portable.compat.engine import cuda_compat

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def mode(chosen: Any) -> Iterator[cuda_compat]:
    with pt.cuda_compat() as active:
        assert active.backend is chosen
        yield active


# What an emulated Trainium has not, and what its refusal says; the real one is not known to have them either.
REFUSED = {
    "sparse": (NotImplementedError, "Could not run .*sparse_coo_tensor"),
    "nested": (NotImplementedError, "NestedTensor|layout jagged|layout strided|nested"),
    "seeded": (pt.UnsupportedError, "torch.Generator.*Instead: draw with torch.Generator"),
}


def kinds(mode: cuda_compat) -> dict[str, str]:
    return {entry.construct: entry.kind for entry in mode.recorder.entries()}


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("move", MOVES)
def test_a_cuda_device_becomes_the_backends(chosen: Any, device: torch.device, move: str, mode: cuda_compat) -> None:
    if chosen.spec.name == "neuron" and move in REFUSED:
        error, message = REFUSED[move]
        with pytest.raises(error, match=message):
            MOVES[move](device)
        return
    found = MOVES[move](device)
    right = MOVES[SAME_AS.get(move, move)]("cpu")
    assert found.device.type == chosen.spec.device_type and found.dtype == right.dtype and found.shape == right.shape
    if move == "seeded":  # each device has numbers of its own
        assert torch.equal(found.cpu(), MOVES[move](device).cpu()) and 0 <= found.min() <= found.max() < 1
    else:
        assert torch.equal(found.detach().cpu(), right)
    assert "redirected" in kinds(mode).values()


def test_a_tensor_says_where_it_is(chosen: Any, mode: cuda_compat) -> None:
    there = chosen.spec.device_type != "cpu"
    assert X.cuda().is_cuda is there and not X.is_cuda
    assert X.cuda().get_device() == (0 if there else -1)
    assert next(nn.Linear(1, 1).cuda().parameters()).is_cuda is there
    assert X.cuda().cpu().device.type == "cpu" and X.cuda().to("cpu").tolist() == X.tolist()
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name("cuda:0") == pt.get_device_name()
    assert torch.cuda.get_device_properties(0).total_memory == pt.get_device_properties().total_memory
    with torch.device("cuda"):
        assert torch.zeros(1).device.type == nn.Linear(1, 1).weight.device.type == chosen.spec.device_type
    assert torch.accelerator.current_accelerator().type == "cuda"  # type: ignore[union-attr]


LOCATIONS: dict[str, Any] = {
    "none": None,
    "string": "cuda:0",
    "device": torch.device("cuda"),
    "dict": {"cuda:0": "cuda:0"},
    "function": lambda storage, location: storage.cuda(0),
    "identity": lambda storage, location: storage,  # PyTorch reads storages on the CPU, where this leaves them
    "cpu": "cpu",
}


@pytest.mark.parametrize("where", LOCATIONS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_saved_on_a_gpu_is_loaded(chosen: Any, mode: cuda_compat, where: str, weights_only: bool) -> None:
    found = torch.load(checkpoint("cuda:0"), map_location=LOCATIONS[where], weights_only=weights_only)["a"]
    assert found.device.type == ("cpu" if where in ("cpu", "identity") else chosen.spec.device_type)
    assert torch.equal(found.cpu(), X)


def test_a_gpu_that_is_not_there(chosen: Any, mode: cuda_compat) -> None:
    """One device stands for all where a process has but one by nature; elsewhere the ordinal is checked."""
    if chosen.spec.device_type == "cpu" or chosen.one_device_per_process:
        assert torch.load(checkpoint("cuda:1"))["a"].device.type == X.to("cuda:1").device.type == chosen.spec.device_type
        return
    for act in (lambda: X.to("cuda:1"), lambda: torch.load(checkpoint("cuda:1")), lambda: nn.Linear(1, 1).cuda(1)):
        with pytest.raises(pt.DeviceIndexError, match=f"asked for cuda:1, but the {chosen.spec.name} backend has 1 device"):
            act()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("asked", [torch.float16, torch.bfloat16, None, torch.float32], ids=str)
@pytest.mark.parametrize("spelling", AUTOCASTS)
def test_autocast_follows_the_policy(mode: cuda_compat, spelling: str, asked: Any) -> None:
    """float32 means off, as on CUDA; a 16-bit type that the device does not multiply becomes the policy's. None is float16."""
    generation, policy = pt.generation(), pt.precision_policy().autocast
    wanted = asked or torch.float16
    kept = generation is not None and str(wanted).removeprefix("torch.") in generation.autocast
    becomes = wanted if kept else torch.float32 if wanted is torch.float32 or policy is None else getattr(torch, policy)
    a = X.cuda()
    with AUTOCASTS[spelling](asked):
        found = a @ a.T
        assert torch.is_autocast_enabled("cuda") is torch.is_autocast_enabled() is (becomes is not torch.float32)
    right = X.to(becomes) @ X.to(becomes).T
    assert found.dtype is becomes and torch.equal(found.cpu(), right)
    assert not torch.is_autocast_enabled()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [torch.amp.GradScaler, lambda init_scale: torch.cuda.amp.GradScaler(init_scale=init_scale)])
def test_a_scaler_scales(mode: cuda_compat, make: Any) -> None:
    scaler = make(init_scale=8.0)
    weight = nn.Parameter(torch.tensor([2.0]).cuda())
    opt = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight.square().sum()).backward()
    assert weight.grad is not None and weight.grad.item() == 32.0  # d(w^2)/dw = 4, scaled by 8
    scaler.step(opt)
    scaler.update()
    assert weight.item() == 0.0
    weight.grad = torch.tensor([float("inf")]).cuda()
    scaler.step(opt)
    scaler.update()
    assert (weight.item(), scaler.get_scale()) == (0.0, 4.0)


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
def test_options_of_optimizers_give_the_cpus_result(mode: cuda_compat, kind: str, option: str) -> None:
    def trained(device: str, **options: Any) -> torch.Tensor:
        weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], device=device))
        opt = getattr(torch.optim, kind)([weight], lr=0.1, **options)
        for _ in range(3):
            opt.zero_grad()
            weight.square().sum().backward()
            opt.step()
        return weight.detach().cpu()

    torch.testing.assert_close(trained("cuda", **{option: True}), trained("cpu"), rtol=1e-5, atol=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders(chosen: Any, mode: cuda_compat, workers: int, recwarn: pytest.WarningsRecorder) -> None:
    loader = DataLoader(TensorDataset(torch.arange(12.0).view(6, 2)), batch_size=2, pin_memory=True, num_workers=workers)
    assert loader.pin_memory is chosen.spec.pin_memory.value
    batches = [batch.cuda(non_blocking=True) for (batch,) in loader]
    assert all(batch.device.type == chosen.spec.device_type for batch in batches)
    assert torch.cat(batches).tolist() == torch.arange(12.0).view(6, 2).tolist()
    assert not [warning for warning in recwarn if "pin_memory" in str(warning.message)]


def test_streams_events_and_ranges(mode: cuda_compat) -> None:
    stream = torch.cuda.Stream(device="cuda:0")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream), torch.cuda.nvtx.range("outer {}", 1):
        assert torch.cuda.current_stream() == stream
        start.record()
        x = X.cuda()
        x.record_stream(stream)
        end.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0 and x.sum().item() == 15
    assert isinstance(stream, torch.cuda.Stream) and isinstance(torch.Stream(device="cuda"), torch.Stream)


def test_generators_and_seeds(chosen: Any, mode: cuda_compat) -> None:
    if chosen.spec.name == "neuron":
        with pytest.raises(pt.UnsupportedError, match=r"torch.Generator.* is not available on the neuron backend"):
            torch.Generator(device="cuda")
        assert ("torch.Generator", "no equivalent") in {(entry.construct, entry.kind) for entry in mode.recorder.entries()}
    else:
        generator = torch.Generator(device="cuda").manual_seed(1)
        assert generator.device.type == chosen.spec.device_type
        first = torch.randn(4, device="cuda", generator=generator)
        assert torch.equal(first, torch.randn(4, device="cuda", generator=generator.manual_seed(1)))
    torch.cuda.manual_seed_all(3)
    state = torch.cuda.get_rng_state("cuda:0")
    first = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(state, "cuda:0")
    assert torch.equal(torch.rand(2, device="cuda"), first)
    with torch.random.fork_rng(devices=[0]):
        inside = torch.rand(2, device="cuda")
    assert torch.equal(torch.rand(2, device="cuda"), inside)


@pytest.mark.parametrize(
    "call",
    [torch.cuda.CUDAGraph, torch.cuda.current_blas_handle, lambda: torch.cuda.nccl.version()],
    ids=["CUDAGraph", "blas", "nccl"],
)
def test_without_equivalent_is_said_and_reported(chosen: Any, mode: cuda_compat, call: Callable[[], Any], request: Any) -> None:
    name = request.node.callspec.id
    call = {"CUDAGraph": lambda: torch.cuda.CUDAGraph(), "blas": lambda: torch.cuda.current_blas_handle()}.get(name, call)
    if name == "CUDAGraph" and pt.graphs.is_supported():
        assert call() is not None
        return
    with pytest.raises(pt.UnsupportedError, match=f"is not available on the {chosen.spec.name} backend: .* Instead: "):
        call()
    assert "no equivalent" in kinds(mode).values()


def test_a_model_trains_as_on_the_cpu(mode: cuda_compat) -> None:
    """With what such programs have: DataParallel, a profiler, cuDNN's switches, compile with CUDA's mode."""
    from torch.profiler import ProfilerActivity, profile

    def trained(device: str) -> list[float]:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        net = nn.DataParallel(plain).to(device) if device == "cuda" else plain
        opt = torch.optim.AdamW(net.parameters(), lr=0.01)
        losses = []
        for _ in range(5):
            opt.zero_grad(set_to_none=True)
            loss = net(X.to(device)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            losses.append(loss.item())
        return losses

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            found = trained("cuda")
        assert {"aten::addmm"} <= {event.key for event in recorded.key_averages()}
    finally:
        torch.backends.cudnn.benchmark = before
    assert found == pytest.approx(trained("cpu"), rel=1e-6) and found[-1] < found[0]


def test_afterwards_nothing_is_redirected(chosen: Any) -> None:
    with pt.cuda_compat() as active:
        X.cuda()
    assert kinds(active)
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            X.cuda()
