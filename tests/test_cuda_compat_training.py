"""What training scripts write for CUDA: mixed precision, loaders, optimizers, profilers, library settings, process groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import fakes
import pytest
import torch
import torch.distributed as dist
from portable_cpu.facts import GENERATIONS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import portable as pt
from portable.compat.engine import cuda_compat
from portable.spec import OptimizerSpec
from portable.support import emulated

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def mode() -> Iterator[cuda_compat]:
    with pt.cuda_compat("cpu") as active:
        yield active


def generation(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the CPU be of this generation."""
    monkeypatch.setitem(vars(pt.selection.find("cpu")), "_generation", GENERATIONS[name])


def changed(mode: cuda_compat) -> dict[str, str]:
    return {entry.construct: entry.detail for entry in mode.recorder.entries() if entry.kind == "changed"}


# --- mixed precision --------------------------------------------------------------------------------------------------------

AUTOCASTS = {
    "torch.autocast": lambda dtype: torch.autocast("cuda", dtype=dtype),
    "by keyword": lambda dtype: torch.autocast(device_type="cuda", dtype=dtype, cache_enabled=False),
    "torch.amp": lambda dtype: torch.amp.autocast("cuda", dtype),
    "torch.cuda.amp": lambda dtype: torch.cuda.amp.autocast(True, dtype or torch.float16),
}
BECOMES = [  # generation of the CPU, dtype asked for, what matrix products run in
    ("avx2", torch.float16, torch.float32),
    ("avx2", torch.bfloat16, torch.float32),
    ("avx2", None, torch.float32),
    ("avx512_bf16", torch.bfloat16, torch.bfloat16),
    ("avx512_bf16", torch.float16, torch.bfloat16),
    ("avx512_bf16", None, torch.bfloat16),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("spelling", AUTOCASTS)
@pytest.mark.parametrize(("cpu", "asked", "becomes"), BECOMES)
def test_autocast_follows_the_precision_policy(
    mode: cuda_compat, monkeypatch: pytest.MonkeyPatch, spelling: str, cpu: str, asked: Any, becomes: torch.dtype
) -> None:
    generation(monkeypatch, cpu)
    with AUTOCASTS[spelling](asked):
        found = X.cuda() @ X.cuda().T
        assert torch.is_autocast_enabled("cuda") is torch.is_autocast_enabled() is (becomes is not torch.float32)
    assert found.dtype is becomes
    assert torch.is_autocast_enabled() is False
    reported = [entry for entry in mode.recorder.entries() if entry.construct == "torch.autocast"]
    kept = (asked or torch.float16) is becomes
    assert [entry.kind for entry in reported] == ["redirected" if kept else "changed"]
    if not kept:
        assert f"became {str(becomes).removeprefix('torch.')}: " in reported[0].detail


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("spelling", AUTOCASTS)
@pytest.mark.parametrize("cpu", ["avx2", "avx512_bf16"])
def test_autocast_to_a_wide_type_is_off_as_on_cuda(
    mode: cuda_compat, monkeypatch: pytest.MonkeyPatch, spelling: str, cpu: str
) -> None:
    generation(monkeypatch, cpu)
    with AUTOCASTS[spelling](torch.float32):
        assert (X.cuda() @ X.cuda().T).dtype is torch.float32 and not torch.is_autocast_enabled()
    assert not changed(mode)


def test_autocast_for_other_devices_and_as_decorator(mode: cuda_compat, monkeypatch: pytest.MonkeyPatch) -> None:
    generation(monkeypatch, "avx512_bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16) as context:
        assert context is None or isinstance(context, torch.autocast)
        assert (X @ X.T).dtype is torch.bfloat16
    with torch.autocast("cuda", enabled=False):
        assert (X @ X.T).dtype is torch.float32

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ x.T

    assert product(X).dtype is torch.bfloat16
    assert isinstance(torch.autocast("cuda"), torch.autocast)
    assert torch.get_autocast_dtype("cuda") is torch.get_autocast_gpu_dtype() is torch.get_autocast_dtype("cpu")
    assert torch.amp.is_autocast_available("cuda") is True


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.amp.GradScaler(init_scale=8.0),
        lambda: torch.amp.GradScaler("cuda", init_scale=8.0),
        lambda: torch.amp.GradScaler(device="cuda", init_scale=8.0),
        lambda: torch.cuda.amp.GradScaler(init_scale=8.0),
    ],
    ids=["default", "position", "keyword", "torch.cuda.amp"],
)
def test_grad_scaler_scales(mode: cuda_compat, make: Any) -> None:
    scaler = make()
    assert isinstance(scaler, torch.amp.GradScaler)
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler.scale(weight.square().sum()).backward()
    assert weight.grad is not None and weight.grad.item() == 32.0  # d(w^2)/dw = 4, scaled by 8
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.0  # 2 - 0.5 * 4
    weight.grad = torch.tensor([float("inf")])
    scaler.step(optimizer)
    scaler.update()
    assert (weight.item(), scaler.get_scale()) == (0.0, 4.0)  # skipped, and the scale halved


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_custom_functions_under_autocast(mode: cuda_compat, monkeypatch: pytest.MonkeyPatch) -> None:
    generation(monkeypatch, "avx512_bf16")
    seen: list[torch.dtype] = []

    class New(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append((x @ x.T).dtype)
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    class Old(torch.autograd.Function):
        @staticmethod
        @torch.cuda.amp.custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append((x @ x.T).dtype)
            return x * 3

        @staticmethod
        @torch.cuda.amp.custom_bwd
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 3

    for function, factor in ((New, 2.0), (Old, 3.0)):
        leaf = X.clone().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            function.apply(leaf).sum().backward()
        assert leaf.grad is not None and leaf.grad.unique().tolist() == [factor]
    assert seen == [torch.float32, torch.bfloat16]


# --- data -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ((), {"pin_memory": True}),
        ((), {"pin_memory": True, "pin_memory_device": "cuda"}),
        ((1, False, None, None, 0, None, True), {}),
        ((1,), {"pin_memory": True, "generator": "generator"}),
    ],
    ids=["keyword", "device", "position", "generator"],
)
def test_loaders_do_not_pin_where_it_is_of_no_use(mode: cuda_compat, arguments: Any, recwarn: pytest.WarningsRecorder) -> None:
    positional, named = arguments
    if "generator" in named:
        named = {**named, "generator": torch.Generator("cuda").manual_seed(1), "shuffle": True}
    loader = DataLoader(TensorDataset(X), *positional, **named)
    assert loader.pin_memory is False
    assert sorted(batch[0][0, 0].item() for batch in loader) == [0.0, 3.0]
    assert set(changed(mode)) == {"DataLoader(pin_memory=True)"}
    assert not [warning for warning in recwarn if "pin_memory" in str(warning.message)]


@pytest.mark.parametrize(
    ("construct", "make"),
    [
        ("Tensor.pin_memory", lambda: X.pin_memory()),
        ("torch.zeros(pin_memory=True)", lambda: torch.zeros(2, 3, pin_memory=True)),
        ("torch.empty_like(pin_memory=True)", lambda: torch.empty_like(X, pin_memory=True)),
        ("Tensor.new_zeros(pin_memory=True)", lambda: X.new_zeros(2, 3, pin_memory=True)),
    ],
)
def test_tensors_are_not_pinned_either(mode: cuda_compat, construct: str, make: Any) -> None:
    made = make()
    assert made.shape == (2, 3) and made.is_pinned() is made.is_pinned("cuda") is False
    assert set(changed(mode)) == {construct}


# --- optimizers -------------------------------------------------------------------------------------------------------------

OPTIONS = [
    (name, option)
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type)
    for option in ("fused", "capturable")
    if option in inspect.signature(kind).parameters
]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_options_of_optimizers_give_the_plain_result(mode: cuda_compat, name: str, option: str) -> None:
    kind = getattr(torch.optim, name)

    def trained(**options: Any) -> torch.Tensor:
        weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]).cuda())
        optimizer = kind([weight], lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
        return weight.detach()

    assert torch.allclose(trained(**{option: True}), trained(), rtol=1e-5)
    declared = pt.selection.find("cpu").spec.optimizers
    if option == "capturable":
        assert changed(mode) == {f"{name}(capturable=True)": "False: the device records no graphs"}
    else:
        assert bool(changed(mode)) is (name not in declared)


def test_fused_is_looked_up_by_the_class_that_was_named(plugged: Callable[..., None]) -> None:
    """AdamW's constructor goes through Adam's: what the backend says of Adam must not decide about AdamW."""
    options = {"AdamW": OptimizerSpec({"fused": True}, "has it"), "Adam": OptimizerSpec({"foreach": False}, "a loop")}
    plugged(fakes.Fake(fakes.spec(device_type="cpu", optimizers=options)))

    class Mine(torch.optim.AdamW):
        pass

    with pt.cuda_compat("fake") as active:
        made = [kind([nn.Parameter(X)], fused=True) for kind in (torch.optim.AdamW, Mine, torch.optim.Adam, torch.optim.SGD)]
    assert [(one.defaults["fused"], one.defaults["foreach"]) for one in made] == [
        *[(True, None)] * 2,
        (None, False),
        (None, None),
    ]
    assert changed(active) == {
        "Adam(fused=True)": "foreach=False: a loop",
        "SGD(fused=True)": "PyTorch's default: the fake backend declares no fused SGD",
    }


def test_subclasses_of_optimizers(mode: cuda_compat) -> None:
    class Mine(torch.optim.AdamW):
        pass

    assert type(Mine([nn.Parameter(X)], capturable=True)) is Mine
    assert set(changed(mode)) == {"AdamW(capturable=True)"}


# --- streams and events that a function makes ---------------------------------------------------------------------------------


def test_functions_in_the_place_of_classes_get_their_arguments(plugged: Callable[..., None]) -> None:
    """A vendor's module may have functions named Stream and Event."""
    table = {
        "Stream": emulated(lambda device=None, priority=0: ("stream", str(device), priority), "a function"),
        "Event": emulated(lambda enable_timing=False, blocking=False: ("event", enable_timing, blocking), "a function"),
    }
    plugged(fakes.Fake(fakes.spec(device_type="cpu"), table=table))
    with pt.cuda_compat("fake"):
        assert torch.cuda.Event(enable_timing=True) == torch.cuda.Event(True, False) == ("event", True, False)
        assert torch.cuda.Stream("cuda:0", priority=-1) == torch.cuda.Stream(torch.device("cuda"), -1) == ("stream", "cpu", -1)
        assert not isinstance(X, torch.cuda.Stream) and not isinstance(X, torch.cuda.Event)


# --- profilers and settings -------------------------------------------------------------------------------------------------


def test_profiler_activities(mode: cuda_compat) -> None:
    from torch.profiler import ProfilerActivity, profile, record_function

    with (
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as recorded,
        record_function("step"),
    ):
        X @ X.T
    assert {"step", "aten::mm"} <= {event.key for event in recorded.key_averages()}
    with profile(activities=[ProfilerActivity.CUDA]) as only:
        X @ X.T
    assert "aten::mm" in {event.key for event in only.key_averages()}


def test_settings_are_kept_and_read_back(mode: cuda_compat, recwarn: pytest.WarningsRecorder) -> None:
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    before = cudnn.benchmark, cudnn.deterministic, cuda.matmul.allow_tf32, cuda.math_sdp_enabled()
    try:
        cudnn.benchmark, cudnn.deterministic, cuda.matmul.allow_tf32 = True, True, True
        assert (cudnn.benchmark, cudnn.deterministic, cuda.matmul.allow_tf32) == (True, True, True)
        cuda.enable_math_sdp(False)
        assert cuda.math_sdp_enabled() is False
        cuda.cufft_plan_cache.max_size = 7
        cuda.cufft_plan_cache[0].clear()
        assert (cuda.cufft_plan_cache.max_size, cuda.cufft_plan_cache.size) == (7, 0)
        with torch.backends.cudnn.flags(enabled=False), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            pass
        assert cuda.preferred_linalg_library("magma") == cuda.preferred_linalg_library()
        with pytest.raises(RuntimeError, match="Unknown input value"):
            cuda.preferred_linalg_library("nonsense")
    finally:
        cudnn.benchmark, cudnn.deterministic, cuda.matmul.allow_tf32 = before[:3]
        cuda.enable_math_sdp(before[3])
    found = changed(mode)
    assert {"torch.backends.cudnn.benchmark", "torch.backends.cuda.matmul.allow_tf32"} <= set(found)
    assert "without effect" in found["torch.backends.cudnn.benchmark"]


# --- process groups ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(mode: cuda_compat, tmp_path: Any) -> Iterator[cuda_compat]:
    """A group of one process, asked for as NCCL with a device."""
    if not dist.is_available():
        pytest.skip("this PyTorch was built without torch.distributed")
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    yield mode
    dist.destroy_process_group()


def test_nccl_becomes_the_backends_group(group: cuda_compat) -> None:
    assert dist.get_backend() == "gloo"
    assert dist.is_nccl_available() and dist.is_backend_available("nccl")
    assert not dist.is_backend_available("nonsense")
    values = torch.tensor([1.0, 2.0], device="cuda:0")
    dist.all_reduce(values)
    dist.barrier(device_ids=[0])
    assert values.tolist() == [1.0, 2.0]
    for name in ("nccl", "NCCL", "cpu:gloo,cuda:nccl", "cuda:nccl"):
        assert "gloo" in dist.get_backend(dist.new_group([0], backend=name))
    details = {entry.detail for entry in group.recorder.entries() if entry.construct == "torch.distributed backend"}
    assert {"nccl became gloo", "cpu:gloo,cuda:nccl became cpu:gloo", "cuda:nccl became cpu:gloo"} <= details


def test_data_parallel_wrappers(group: cuda_compat) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    plain = nn.Linear(3, 2)
    expected = plain(X)
    wrapped = DistributedDataParallel(plain.cuda(0), device_ids=[0], output_device=0)
    assert torch.equal(wrapped(X), expected)
    sharded = FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.cuda.current_device())
    sharded(X.cuda()).sum().backward()
    assert {parameter.device.type for parameter in sharded.parameters()} == {"cpu"}


def test_meshes(group: cuda_compat) -> None:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    assert init_device_mesh("cuda", (1,)).device_type == "cpu"
    assert DeviceMesh("cuda", [0]).device_type == "cpu"
    assert dist.init_device_mesh("cuda", (1,), mesh_dim_names=("dp",)).mesh_dim_names == ("dp",)


@pytest.mark.parametrize("devices", [None, [0], [0, 1]])
def test_data_parallel_over_threads(mode: cuda_compat, devices: Any) -> None:
    plain = nn.Linear(3, 2)
    wrapped = nn.DataParallel(plain, device_ids=devices).cuda()
    assert torch.equal(wrapped(X), plain(X))
    assert set(wrapped.state_dict()) == {"module.weight", "module.bias"}
    assert torch.equal(nn.parallel.data_parallel(plain, X, devices), plain(X))
    assert {"nn.DataParallel", "nn.parallel.data_parallel"} == set(changed(mode))
