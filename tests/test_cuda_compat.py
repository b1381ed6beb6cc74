"""pt.cuda_compat on the CPU: every place where a device may stand, and no place where one may not.

The reference is plain PyTorch on the CPU, outside the mode.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import portable as pt
from portable.compat import factories, spawn
from portable.compat.engine import cuda_compat
from portable.compat.report import Recorder
from portable.errors import ConfigurationError, UnsupportedError

CPU = torch.device("cpu")
DEVICES = ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0)
STRINGS_AND_DEVICES = DEVICES[:-1]


@pytest.fixture
def mode() -> Iterator[cuda_compat]:
    with pt.cuda_compat("cpu") as active:
        yield active


def counts(recorder: Recorder) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in recorder.entries():
        found[entry.construct] = found.get(entry.construct, 0) + entry.count
    return found


X = torch.arange(6.0).reshape(2, 3)

MOVES: dict[str, Callable[[Any], torch.Tensor]] = {
    "to": lambda d: X.to(d),
    "to with dtype": lambda d: X.to(d, torch.float64),
    "to by keyword": lambda d: X.to(device=d, dtype=torch.float64, non_blocking=True),
    "cuda": lambda d: X.cuda(d),
    "cuda by keyword": lambda d: X.cuda(device=d, non_blocking=True),
    "Parameter": lambda d: nn.Parameter(X).to(d),
    "Module.to": lambda d: _filled(nn.Linear(3, 2).to(d)).weight,
    "Module.to by keyword": lambda d: _filled(nn.Linear(3, 2).to(device=d, dtype=torch.float64)).weight,
    "Module.cuda": lambda d: _filled(nn.Linear(3, 2).cuda(d)).weight,
    "Module made there": lambda d: _filled(nn.Linear(3, 2, device=d)).weight,
    "to_empty": lambda d: _filled(nn.Linear(3, 2, device="meta").to_empty(device=d)).weight,
    "PackedSequence": lambda d: nn.utils.rnn.pack_sequence([X]).to(d).data,
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "zeros_like": lambda d: torch.zeros_like(X, device=d),
    "tensor": lambda d: torch.tensor([[1.0, 2.0]], device=d),
    "as_tensor": lambda d: torch.as_tensor([1, 2], dtype=torch.int32, device=d),
    "asarray": lambda d: torch.asarray([1, 2], device=d),
    "full": lambda d: torch.full((2,), 7.0, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "eye": lambda d: torch.eye(3, device=d),
    "sparse": lambda d: torch.sparse_coo_tensor([[0], [1]], [3.0], (2, 2), device=d).to_dense(),
    "fftfreq": lambda d: torch.fft.fftfreq(5, device=d),
    "window": lambda d: torch.signal.windows.hann(5, device=d),
    "nested": lambda d: torch.nested.nested_tensor([X, X + 1], device=d).to_padded_tensor(0.0),
    "new_full": lambda d: X.new_full((2,), 4, device=d),
    "new_tensor": lambda d: X.new_tensor([1, 2], device=d),
    "seeded": lambda d: torch.rand(4, device=d, generator=torch.Generator(d).manual_seed(5)),
}


# Moves that take no CPU device outside the mode, with the one that gives their result.
SAME_AS = {"cuda": "to", "cuda by keyword": "to", "Module.cuda": "Module.to"}


def _filled(module: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0).reshape(2, 3))
    return module


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_a_cuda_device_becomes_the_cpu(name: str, device: Any) -> None:
    expected = MOVES[SAME_AS.get(name, name)]("cpu")
    with pt.cuda_compat("cpu") as mode:
        found = MOVES[name](device)
    assert (found.device, found.dtype) == (CPU, expected.dtype)
    assert torch.equal(found, expected)
    assert any(entry.kind == "redirected" for entry in mode.recorder.entries())


def test_every_public_function_whose_documentation_shows_a_device_is_covered() -> None:
    covered = {name for owner, name in factories.functions() if owner is torch}
    elsewhere = {"load", "set_default_device", "get_default_device", "get_device_module"}  # handled in other places
    missing = []
    for name in dir(torch):
        function = getattr(torch, name)
        if name.startswith("_") or not callable(function) or isinstance(function, type):
            continue
        signature = (function.__doc__ or "")[:600].split("->")[0]
        if re.search(r"\bdevice\b", signature) and name not in covered | elsewhere:
            missing.append(name)
    assert missing == []
    assert len(covered) > 35


def test_replacements_look_like_what_they_replace() -> None:
    before = {(owner, name): getattr(owner, name) for owner, name in factories.functions()}
    with pt.cuda_compat("cpu"):
        for (owner, name), original in before.items():
            found = getattr(owner, name)
            assert found is not original
            assert (found.__name__, found.__doc__) == (name, original.__doc__)
            assert pickle.loads(pickle.dumps(found)) is found
        assert pickle.loads(pickle.dumps(torch.Tensor.to)) is torch.Tensor.to
        assert inspect.signature(torch.compile).parameters.keys() >= {"model", "mode", "backend"}


@pytest.mark.parametrize("text", ["cuda:", "cuda:x", "cuda:-1", "mycuda", "CUDA", "cuda0"])
def test_what_is_no_device_gets_pytorchs_own_error(mode: cuda_compat, text: str) -> None:
    with pytest.raises(RuntimeError) as inside:
        torch.zeros(2, device=text)
    with pytest.raises(RuntimeError) as expected:
        torch.device(text)
    assert str(inside.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_strings_that_are_not_devices_stay(mode: cuda_compat) -> None:
    net = nn.ModuleDict({"cuda:0": nn.Linear(1, 1), "on_cuda": nn.Identity()})
    assert set(net.state_dict()) == {"cuda:0.weight", "cuda:0.bias"}
    buffer = io.BytesIO()
    torch.save({"cuda": "cuda:0", "device": torch.device("cuda:1")}, buffer)
    buffer.seek(0)
    assert torch.load(buffer) == {"cuda": "cuda:0", "device": torch.device("cuda", 1)}
    device = torch.device("cuda:1")
    assert (device.type, device.index, str(device), f"{device}") == ("cuda", 1, "cuda:1", "cuda:1")
    assert copy.deepcopy(device) == pickle.loads(pickle.dumps(device)) == device
    assert isinstance(device, torch.device)


def test_moves_without_a_device_are_pytorchs_own(mode: cuda_compat) -> None:
    assert X.to(torch.int64).dtype is torch.int64
    assert X.to(torch.ones(1, dtype=torch.float16)).dtype is torch.float16
    assert X.to(dtype=torch.float64).dtype is torch.float64
    assert X.to("cpu") is X
    for _ in range(2):
        assert X.to(torch.device("cpu")) is X
    assert X.to("meta").device.type == "meta"
    assert counts(mode.recorder) == {}


@pytest.mark.parametrize("device", STRINGS_AND_DEVICES, ids=str)
def test_default_device(mode: cuda_compat, device: Any) -> None:
    with torch.device(device):
        assert torch.zeros(1).device == nn.Linear(1, 1).weight.device == CPU
    torch.set_default_device(device)
    try:
        assert torch.zeros(1).device == CPU
    finally:
        torch.set_default_device(None)
    assert counts(mode.recorder)["torch.device as default device"] == 2


def test_other_default_devices_go_on_working(mode: cuda_compat) -> None:
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"
        assert nn.Linear(2, 2).weight.device.type == "meta"
        assert torch.zeros(2, device="cuda").device == CPU


def test_a_cpu_tensor_is_no_cuda_tensor(mode: cuda_compat) -> None:
    # It lies in host memory: code that would hand its address to a CUDA kernel must not be told otherwise.
    assert X.cuda().is_cuda is False
    assert next(nn.Linear(1, 1).cuda().parameters()).is_cuda is False
    assert X.cuda().get_device() == -1


def test_ordinals_mean_the_one_cpu(mode: cuda_compat, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.zeros(1, device="cuda:7").device == CPU
    assert X.to(3).device == CPU
    assert torch.cuda.device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 4


def test_legacy_types(mode: cuda_compat) -> None:
    assert torch.equal(torch.cuda.FloatTensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)
    assert X.type("torch.cuda.HalfTensor").dtype is torch.float16
    assert X.type(torch.cuda.LongTensor).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert X.type() == "torch.FloatTensor"
    assert isinstance(X, torch.cuda.FloatTensor)
    assert not isinstance(X, torch.cuda.DoubleTensor)
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    try:
        assert torch.zeros(1).dtype is torch.float64
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
        torch.set_default_device(None)
    assert torch.zeros(1).dtype is torch.float32


# --- checkpoints ------------------------------------------------------------------------------------------------------------


def checkpoint(location: str) -> io.BytesIO:
    """A file whose storages are tagged with a location, as if saved there."""
    plain, tagged = io.BytesIO(), io.BytesIO()
    torch.save({"a": X}, plain)
    size = bytes([len(location)])
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(tagged, "w", zipfile.ZIP_STORED) as made:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("data.pkl"):  # pickle's BINUNICODE: X, length in four bytes, text
                data = data.replace(b"X\3\0\0\0cpu", b"X" + size + b"\0\0\0" + location.encode())
            made.writestr(name, data)
    tagged.seek(0)
    return tagged


LOCATIONS: dict[str, Any] = {
    "none": None,
    "string": "cuda:1",
    "device": torch.device("cuda"),
    "dict": {"cuda:0": "cuda:1"},
    "function": lambda storage, location: storage.cuda(1),
    "identity": lambda storage, location: storage,
    "cpu": "cpu",
}


@pytest.mark.parametrize("where", LOCATIONS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_checkpoint_saved_on_a_gpu_is_loaded(mode: cuda_compat, where: str, weights_only: bool) -> None:
    found = torch.load(checkpoint("cuda:0"), map_location=LOCATIONS[where], weights_only=weights_only)["a"]
    assert found.device == CPU
    assert torch.equal(found, X)


def test_such_a_checkpoint_does_not_load_without_the_mode() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device, on which the checkpoint loads")
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(checkpoint("cuda:0"))


# --- torch.cuda -------------------------------------------------------------------------------------------------------------


def test_torch_cuda_answers_for_the_backend(mode: cuda_compat) -> None:
    assert torch.cuda.is_available() is True
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    for device in (*DEVICES, None):
        torch.cuda.synchronize(device)
        assert torch.cuda.get_device_name(device) == pt.cuda.get_device_name()
        assert torch.cuda.memory_allocated(device) > 2**20
        assert torch.cuda.get_device_properties(device or 0).total_memory > 2**28
    with torch.cuda.device(0), torch.cuda.device("cuda:0"), torch.cuda.device_of(X):
        torch.cuda.set_device("cuda:0")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert counts(mode.recorder)["torch.cuda.synchronize"] == len(DEVICES) + 1


def test_names_in_submodules_are_the_same(mode: cuda_compat) -> None:
    from torch.cuda.memory import memory_allocated
    from torch.cuda.random import manual_seed

    assert memory_allocated() > 2**20
    manual_seed(3)
    first = torch.rand(2)
    torch.cuda.manual_seed_all(3)
    assert torch.equal(torch.rand(2), first)


def test_pytorchs_own_code_gets_the_truth(mode: cuda_compat) -> None:
    # torch.utils.collect_env asks for real CUDA; a wrong yes would send it into CUDA's libraries.
    from torch.utils import collect_env

    assert collect_env.get_gpu_info(lambda command: (1, "", "")) is None or torch.version.cuda


@pytest.mark.parametrize("name", sorted(set(torch.cuda.__all__)))
def test_every_name_of_torch_cuda_can_be_read(mode: cuda_compat, name: str) -> None:
    getattr(torch.cuda, name)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.cuda.CUDAGraph(),
        lambda: torch.cuda.graph(None),
        lambda: torch.cuda.memory_snapshot(),
        lambda: torch.cuda.current_blas_handle(),
        lambda: torch.cuda.nccl.version(),
        lambda: torch.cuda.tunable.enable(True),
        lambda: torch.cuda.cudart().cudaHostRegister(0, 0, 0),
        lambda: torch.nn.parallel.comm.broadcast(X, [0, 1]),
    ],
    ids=["CUDAGraph", "graph", "snapshot", "blas", "nccl", "tunable", "cudart", "comm"],
)
def test_without_equivalent_is_said_when_called_and_reported(mode: cuda_compat, call: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"is not available on the cpu backend: .* Instead: "):
        call()
    (entry,) = (entry for entry in mode.recorder.entries() if entry.kind == "no equivalent")
    assert entry.construct.startswith("torch.")
    assert "test_cuda_compat.py:" in entry.where


def test_what_a_program_can_do_without_is_left_out_and_reported(mode: cuda_compat) -> None:
    torch.cuda.set_per_process_memory_fraction(0.5)
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda.profiler.start()
    torch.cuda.profiler.stop()
    torch.cuda.memory._record_memory_history()
    torch.cuda.set_sync_debug_mode("warn")
    callables = (nn.Linear(3, 2), nn.ReLU())
    assert torch.cuda.make_graphed_callables(callables, ((X,), (X,))) is callables
    assert {entry.kind for entry in mode.recorder.entries()} == {"changed"}
    assert len(mode.recorder.entries()) == 6


def test_streams_and_events(mode: cuda_compat) -> None:
    stream = torch.cuda.Stream(device="cuda:0")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        start.record()
        X.cuda().record_stream(stream)
        end.record(stream)
    stream.wait_stream(torch.cuda.current_stream("cuda"))
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    assert isinstance(stream, torch.cuda.Stream)
    assert isinstance(torch.Stream(device="cuda"), torch.Stream)
    assert torch.Event("cuda", enable_timing=True).query() is True
    assert torch.cuda.default_generators[0] is torch.default_generator


def test_ranges(mode: cuda_compat) -> None:
    with torch.profiler.profile() as profile:
        with torch.cuda.nvtx.range("outer {}", 1):
            torch.cuda.nvtx.range_push(msg="pushed")
            torch.cuda.nvtx.range_pop()
        handle = torch.cuda.nvtx.range_start("started")
        torch.cuda.nvtx.range_end(handle)
        with torch.autograd.profiler.emit_nvtx():
            X.sum()
    assert {"outer 1", "pushed", "started"} <= {event.key for event in profile.key_averages()}


def test_torch_accelerator_as_on_a_cuda_machine(mode: cuda_compat) -> None:
    assert torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator()
    assert device is not None and device.type == "cuda"
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize(device)
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_device_index() == 0
    assert torch.get_device_module() is torch.get_device_module(device) is torch.get_device_module("cuda:0") is torch.cuda
    assert torch.get_device_module("cpu") is torch.cpu
    assert X.to(device).device == CPU


def test_generators(mode: cuda_compat) -> None:
    generator = torch.Generator(device="cuda").manual_seed(1)
    assert generator.device == CPU
    assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(X, torch.Generator)
    assert pickle.loads(pickle.dumps(torch.Generator)) is torch.Generator

    class Mine(torch.Generator):
        pass

    assert type(Mine()) is Mine
    torch.manual_seed(2)
    with torch.random.fork_rng(devices=[0]):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), inside)
    state = torch.cuda.get_rng_state("cuda:0")
    first = torch.rand(2)
    torch.cuda.set_rng_state(state, "cuda:0")
    assert torch.equal(torch.rand(2), first)


# --- the report -------------------------------------------------------------------------------------------------------------


def test_counts_and_the_first_place(mode: cuda_compat) -> None:
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    for _ in range(3):
        X.to("cuda")
    X.to("cuda")
    (entry,) = mode.recorder.entries()
    assert (entry.kind, entry.construct, entry.detail, entry.count) == ("redirected", "Tensor.to", "cpu", 4)
    assert entry.where.endswith(f"test_cuda_compat.py:{line}")


def test_threads_share_the_mode_and_lose_no_count(mode: cuda_compat) -> None:
    def work() -> None:
        for _ in range(500):
            torch.zeros(1, device="cuda")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(mode.recorder)["torch.zeros"] == 2000


def test_another_backend_inside_is_refused(mode: cuda_compat, plugged: Callable[..., None]) -> None:
    import fakes

    plugged(fakes.Fake())
    with pytest.raises(ConfigurationError, match=r"pt.cuda_compat\('fake'\) was asked for inside pt.cuda_compat\('cpu'\)"):
        pt.cuda_compat("fake").__enter__()
    assert torch.zeros(1, device="cuda").device == CPU


def test_spawned_children_enter_by_unpickling(mode: cuda_compat) -> None:
    data = spawn.spawn.get_preparation_data("child")
    entry = data[spawn._KEY]
    function, arguments = entry.__reduce__()
    assert function is spawn.enter
    assert arguments == ("cpu", None)
    assert pickle.dumps(entry)
