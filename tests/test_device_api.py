"""Every function of the device API on the CPU, against /proc, the clock and torch's own CPU functions."""

from __future__ import annotations

import os
import threading
import time
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import fakes
import portable_cpu.host as host
import pytest
import torch

import portable as pt
from portable import catalogue
from portable.support import emulated, native, noop, unsupported

pytestmark = pytest.mark.usefixtures("on_cpu")

MIB = 2**20
DEVICES = [None, 0, "cpu", "cpu:0", torch.device("cpu")]
WRONG_DEVICES = [
    (1, IndexError),
    (-1, IndexError),
    ("cpu:1", IndexError),
    ("cuda", ValueError),
    (True, ValueError),
    (0.0, ValueError),
]
linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc, which only Linux has")


def proc(path: str, key: str) -> int:
    """Bytes that the kernel states for a key, in kB lines such as ``VmRSS:  1234 kB``."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def by_both_names(name: str) -> list:
    """The function under `portable` and under `portable.cuda`."""
    return [attrgetter(catalogue.BY_NAME[name].public_name)(pt), attrgetter(name)(pt.cuda)]


# What a call without arguments (or with those given) answers on a CPU. Every function that is neither a no-op nor unsupported
# is here or in a test of its own below; test_every_function_is_tested compares the lists.
ANSWERS = {
    "is_available": True,
    "is_initialized": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_capability": (0, 0),
    "get_arch_list": [],
    "is_bf16_supported": True,
    "is_tf32_supported": False,
    "is_current_stream_capturing": False,
    "get_per_process_memory_fraction": 1.0,
}
NOTHING_TO_DO = {
    "init": (),
    "set_device": (0,),
    "synchronize": (),
    "reset_accumulated_memory_stats": (),
    "empty_cache": (),
    "ipc_collect": (),
}
REFUSED = {
    "memory_snapshot": ((), "profile_memory"),
    "set_per_process_memory_fraction": ((0.5,), "ulimit"),
    "CUDAGraph": ((), "pt.compile"),
    "graph": ((object(),), "pt.compile"),
    "make_graphed_callables": ((len, ()), "pt.compile"),
    "graph_pool_handle": ((), "pt.compile"),
    "memory_usage": ((), "perf"),
    "temperature": ((), "sensors"),
    "power_draw": ((), "sensors"),
    "clock_rate": ((), "sensors"),
    "list_gpu_processes": ((), "top"),
}
TESTED_BELOW = {
    "device", "device_of", "get_device_name", "get_device_properties", "can_device_access_peer", "Stream", "Event", "stream",
    "set_stream", "current_stream", "default_stream", "memory_allocated", "max_memory_allocated", "memory_reserved",
    "max_memory_reserved", "memory_stats", "memory_summary", "reset_peak_memory_stats", "mem_get_info", "OutOfMemoryError",
    "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state", "get_rng_state_all",
    "set_rng_state", "set_rng_state_all", "nvtx.range_push", "nvtx.range_pop", "nvtx.range", "nvtx.mark", "utilization",
}  # fmt: skip


def test_every_function_is_tested(on_cpu):
    kinds = {name: cell.kind for name, cell in on_cpu.support.items()}
    assert set(kinds) == set(catalogue.BY_NAME)
    assert {name for name, kind in kinds.items() if kind == "no-op"} == set(NOTHING_TO_DO)
    assert {name for name, kind in kinds.items() if kind == "unsupported"} == set(REFUSED)
    assert {name for name, kind in kinds.items() if kind in ("native", "emulated")} == set(ANSWERS) | TESTED_BELOW


def test_every_cell_explains_itself(on_cpu):
    for name, cell in on_cpu.support.items():
        assert cell.note or cell.kind == "native", name
        assert bool(cell.alternative) == (cell.kind == "unsupported"), name


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    for function in by_both_names(name):
        assert function() == ANSWERS[name]
        assert type(function()) is type(ANSWERS[name])


@pytest.mark.parametrize("name", NOTHING_TO_DO)
def test_no_op_returns_none(name):
    for function in by_both_names(name):
        assert function(*NOTHING_TO_DO[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_says_what_instead(name):
    arguments, alternative = REFUSED[name]
    for function in by_both_names(name):
        with pytest.raises(pt.UnsupportedError) as caught:
            function(*arguments)
        error = caught.value
        assert (error.backend, error.function) == ("cpu", name)
        assert alternative in error.alternative
        assert all(part in str(error) for part in ("cpu backend", name, error.alternative.rstrip(".")))
        assert isinstance(error, NotImplementedError)


def test_graphs_can_be_asked_for_without_an_error():
    assert pt.graphs.is_supported() is False


# -- devices ---------------------------------------------------------------------------------------------------------------

TAKES_DEVICE = [
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "memory_summary",
    "mem_get_info", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "get_per_process_memory_fraction",
    "get_device_name", "get_device_properties", "get_device_capability", "synchronize", "current_stream", "default_stream",
    "utilization", "get_rng_state",
]  # fmt: skip


@pytest.mark.parametrize("name", TAKES_DEVICE)
def test_device_arguments_of_every_form(name):
    for function in by_both_names(name):
        kind = type(function())
        for device in DEVICES:
            assert type(function(device)) is kind
        for device, error in WRONG_DEVICES:
            with pytest.raises(error) as caught:
                function(device)
            assert isinstance(caught.value, pt.PortableError)


def test_device_index_changes_nothing_on_one_device():
    for manager in by_both_names("device"):
        for device in [*DEVICES, -1]:
            with manager(device):
                assert pt.current_device() == 0
        for wrong in (1, "cuda:0", True):
            with pytest.raises(pt.PortableError):
                manager(wrong)


def test_device_of():
    for manager in by_both_names("device_of"):
        with manager(torch.zeros(1)):
            assert pt.current_device() == 0


def test_can_device_access_peer():
    for function in by_both_names("can_device_access_peer"):
        assert function(0, "cpu") is False
        with pytest.raises(pt.DeviceIndexError):
            function(0, 1)


@linux
def test_name_and_properties():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    for function in by_both_names("get_device_name"):
        assert function() in models if models else function()
    for function in by_both_names("get_device_properties"):
        found = function()
        assert found.name == pt.get_device_name()
        assert found.multi_processor_count == len(os.sched_getaffinity(0))
        assert 0 < found.total_memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        assert found.total_memory == pt.memory.info()[1]
        assert (found.major, found.minor) == (0, 0)
        assert found.capability == torch.backends.cpu.get_cpu_capability()


def test_generation_agrees_with_the_processor_flags(on_cpu):
    path = Path("/proc/cpuinfo")
    flags = set(path.read_text().split()) if path.exists() else set()
    found = pt.generation()
    for name, flag in (("amx", "amx_bf16"), ("avx512_bf16", "avx512_bf16"), ("avx512", "avx512f"), ("avx2", "avx2")):
        if flag in flags:
            assert found.name == name
            break


def test_bf16_without_emulation_needs_instructions(monkeypatch):
    for flags, expected in (({"avx2": True}, False), ({"amx_bf16": True}, True), ({"avx512_bf16": True}, True)):
        monkeypatch.setattr(host, "capabilities", lambda flags=flags: flags)
        assert pt.is_bf16_supported(including_emulation=False) is expected
        assert pt.is_bf16_supported() is True


def test_out_of_memory_is_recognised():
    for error in (pt.OutOfMemoryError("x"), pt.cuda.OutOfMemoryError("x"), MemoryError()):
        assert pt.is_out_of_memory(error)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert pt.is_out_of_memory(caught.value)
    for error in (RuntimeError("shapes do not match"), ValueError("DefaultCPUAllocator: can't allocate memory"), KeyError(1)):
        assert not pt.is_out_of_memory(error)
    assert pt.OutOfMemoryError is torch.OutOfMemoryError


# -- memory ----------------------------------------------------------------------------------------------------------------


@linux
def test_allocated_follows_the_resident_set():
    pt.memory_allocated()
    before = pt.memory_allocated()
    tensor = torch.ones(200 * MIB // 4)  # written, so that the pages are really there
    for name in ("memory_allocated", "memory_reserved"):
        for function in by_both_names(name):
            assert abs(function() - proc("/proc/self/status", "VmRSS")) < 8 * MIB
            assert abs(function() - before - 200 * MIB) < 16 * MIB
    assert abs(pt.memory_stats()["allocated_bytes.all.current"] - proc("/proc/self/status", "VmRSS")) < 8 * MIB
    del tensor
    assert abs(pt.memory_allocated() - before) < 16 * MIB


@linux
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system does not let the peak be reset")
def test_peak_and_its_reset():
    pt.reset_peak_memory_stats()
    before = pt.memory_allocated()
    tensor = torch.ones(200 * MIB // 4)
    del tensor
    for name in ("max_memory_allocated", "max_memory_reserved"):
        for function in by_both_names(name):
            assert abs(function() - before - 200 * MIB) < 16 * MIB
            assert abs(function() - proc("/proc/self/status", "VmHWM")) < 8 * MIB
    assert abs(pt.memory_stats()["allocated_bytes.all.peak"] - before - 200 * MIB) < 16 * MIB
    assert pt.memory_allocated() < before + 16 * MIB
    pt.cuda.reset_peak_memory_stats()
    assert pt.max_memory_allocated() < before + 16 * MIB
    assert pt.max_memory_allocated() >= pt.memory_allocated() - 8 * MIB


@linux
def test_memory_info_against_the_kernel(monkeypatch):
    monkeypatch.setattr(host, "_CGROUPS", Path("/nowhere"))  # the machine alone, without its control groups
    for function in by_both_names("mem_get_info"):
        free, total = function()
        assert total == proc("/proc/meminfo", "MemTotal")
        assert abs(free - proc("/proc/meminfo", "MemAvailable")) < 512 * MIB  # other processes come and go


def test_memory_info_of_a_control_group(monkeypatch, tmp_path):
    """Version 2: the group's own limit counts, and that of the groups above; page cache can be given up."""
    (tmp_path / "cgroup").write_text("0::/outer/inner\n")
    for folder, limit, used, cache in (("outer", 4096, 3000, 1000), ("outer/inner", "max", 500, 100)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    assert pt.mem_get_info() == (4096 - 3000 + 1000, 4096)


def test_memory_info_of_a_version_1_control_group(monkeypatch, tmp_path):
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("8192\n")
    (folder / "memory.usage_in_bytes").write_text("9000\n")  # a group may be over its limit for a moment
    (folder / "memory.stat").write_text("cache 10\ntotal_inactive_file 0\n")
    monkeypatch.setattr(host, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    assert pt.mem_get_info() == (0, 8192)


def test_memory_summary_names_the_figures():
    for function in by_both_names("memory_summary"):
        for text in (function(), function(0, abbreviated=True)):
            assert f"{pt.mem_get_info()[1] / MIB:,.1f} MiB" in text
            assert "high-water mark" in text


# -- streams and events ----------------------------------------------------------------------------------------------------


def test_event_measures_milliseconds():
    for make in by_both_names("Event"):
        start, end = make(enable_timing=True), make(True, False)
        begun = time.perf_counter()
        start.record()
        time.sleep(0.05)
        end.record(pt.current_stream())
        bound = (time.perf_counter() - begun) * 1000
        end.synchronize()
        end.wait()
        assert end.query() is True
        assert 50 <= start.elapsed_time(end) <= bound
        assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_event_without_timing_or_record():
    timed, plain = pt.Event(enable_timing=True), pt.Event()
    plain.record()
    with pytest.raises(ValueError, match="recorded"):
        timed.elapsed_time(timed)
    timed.record()
    for pair in ((timed, plain), (plain, timed)):
        with pytest.raises(ValueError, match="enable_timing"):
            pair[0].elapsed_time(pair[1])


def test_streams_nest_and_come_back():
    default = pt.default_stream()
    assert pt.current_stream() is default is pt.cuda.current_stream("cpu")
    for make, enter in zip(by_both_names("Stream"), by_both_names("stream"), strict=True):
        outer, inner = make(), make(device="cpu", priority=-1)
        with enter(outer):
            with enter(inner):
                assert pt.current_stream() is inner
                with enter(None):
                    assert pt.current_stream() is inner
            assert pt.current_stream() is outer
            with pytest.raises(KeyError), inner:
                raise KeyError
            assert pt.current_stream() is outer
        assert pt.current_stream() is default
        with outer, outer:
            assert pt.current_stream() is outer
        assert pt.current_stream() is default
        assert isinstance(outer.record_event(), type(pt.Event()))
        assert outer.wait_stream(inner) is outer.wait_event(pt.Event()) is outer.synchronize() is None
        assert outer.query() is True


def test_set_stream():
    for change in by_both_names("set_stream"):
        side = pt.Stream()
        change(side)
        assert pt.current_stream() is side
        change(None)  # torch.cuda: None changes nothing
        assert pt.current_stream() is side
        change(pt.default_stream())
        assert pt.current_stream() is pt.default_stream()


def test_streams_belong_to_threads():
    """Threads that enter one stream in overlapping order each get their own former stream back."""
    shared, others = pt.Stream(), [pt.Stream(), pt.Stream()]
    entered, left = threading.Barrier(2), threading.Event()
    seen: dict[int, object] = {}

    def work(number: int) -> None:
        pt.set_stream(others[number])
        with shared:
            entered.wait()
            if number:
                left.wait()
        seen[number] = pt.current_stream()
        left.set()

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {0: others[0], 1: others[1]}
    assert pt.current_stream() is pt.default_stream()


# -- random numbers --------------------------------------------------------------------------------------------------------


def test_manual_seed_gives_torchs_stream():
    for seed in (0, 1234, -1, 2**63):
        torch.manual_seed(seed)
        expected = torch.rand(5), torch.randn(5)
        for name in ("manual_seed", "manual_seed_all"):
            for function in by_both_names(name):
                assert function(seed) is None
                assert torch.equal(torch.rand(5), expected[0])
                assert torch.equal(torch.randn(5), expected[1])


def test_initial_seed():
    pt.manual_seed(77)
    torch.rand(3)
    for function in by_both_names("initial_seed"):
        assert function() == torch.initial_seed() == 77


def test_seed_draws_from_entropy():
    for name in ("seed", "seed_all"):
        for function in by_both_names(name):
            drawn = set()
            for _ in range(3):
                function()
                drawn.add(torch.initial_seed())
            assert len(drawn) == 3


def test_state_round_trip():
    for get, put in zip(by_both_names("get_rng_state"), by_both_names("set_rng_state"), strict=True):
        for device in DEVICES:
            state = get(device)
            assert torch.equal(state, torch.get_rng_state())
            first = torch.rand(4)
            assert put(state, device) is None
            assert torch.equal(torch.rand(4), first)
    with pytest.raises(pt.DeviceIndexError):
        pt.set_rng_state(state, 1)


def test_states_of_all_round_trip():
    for get, put in zip(by_both_names("get_rng_state_all"), by_both_names("set_rng_state_all"), strict=True):
        states = get()
        assert len(states) == 1
        first = torch.rand(4)
        put(states)
        assert torch.equal(torch.rand(4), first)
        for wrong in ([], states * 2):
            with pytest.raises(ValueError, match="one generator"):
                put(wrong)


def test_fork_rng():
    for fork in (pt.fork_rng, pt.cuda.fork_rng):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        with fork():
            torch.rand(100)
            torch.manual_seed(9)
        assert torch.equal(torch.rand(3), expected)
        torch.manual_seed(5)
        with pytest.raises(KeyError), fork(devices=[0]):
            raise KeyError(torch.rand(1))
        assert torch.equal(torch.rand(3), expected)
        torch.manual_seed(5)
        with fork(enabled=False):
            torch.rand(3)
        assert not torch.equal(torch.rand(3), expected)
        with pytest.raises(pt.DeviceIndexError):
            fork(devices=[0, 1])


def test_seed_everything():
    import random

    numpy = pytest.importorskip("numpy", reason="NumPy is not installed")
    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
    expected = random.random(), numpy.random.rand(), torch.rand(1)
    for seed in (3, numpy.int64(3)):
        pt.seed_everything(seed)
        assert (random.random(), numpy.random.rand(), torch.rand(1)) == expected
    for wrong in (-1, 2**32):
        with pytest.raises(ValueError, match=str(wrong)):
            pt.seed_everything(wrong)
    for wrong in (1.5, "3", None):
        with pytest.raises(TypeError):
            pt.seed_everything(wrong)


def test_seed_everything_reaches_the_devices(plugged):
    seeds: list[int] = []
    plugged(fakes.Fake(table={"manual_seed_all": emulated(seeds.append, "recorded")}))
    pt.seed_everything(11)
    assert seeds == [11]
    assert torch.initial_seed() == 11


# -- profiler ranges and monitoring ----------------------------------------------------------------------------------------


def test_ranges_appear_in_a_profile():
    for nvtx in (pt.nvtx, pt.cuda.nvtx):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as session:
            assert nvtx.range_push("outer") == 0
            assert nvtx.range_push("inner") == 1
            nvtx.mark("instant")
            assert nvtx.range_pop() == 1
            assert nvtx.range_pop() == 0
            with nvtx.range("step {}, {what}", 3, what="forward"):
                pass
            with pytest.raises(KeyError), nvtx.range("100 % {plain}"):
                raise KeyError
        names = {event.name for event in session.events()}
        assert {"outer", "inner", "instant", "step 3, forward", "100 % {plain}"} <= names
        inner, outer = (next(e for e in session.events() if e.name == name) for name in ("inner", "outer"))
        assert outer.time_range.start <= inner.time_range.start <= inner.time_range.end <= outer.time_range.end
    assert pt.nvtx.range_pop() < 0  # none is open


def test_utilization_is_the_load_average(monkeypatch):
    for load, cores, percent in ((1.0, 4, 25), (0.0, 4, 0), (9.0, 4, 100)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        for function in by_both_names("utilization"):
            assert function() == percent


# -- what the table's kinds mean, on a made-up device ------------------------------------------------------------------------


def test_native_calls_the_vendors_own_function(plugged):
    module = ModuleType("torch.fake")
    module.memory = SimpleNamespace(held=lambda: 5)

    class Native(fakes.Fake):
        def module(self):
            return module

    table = {
        "memory_allocated": native("memory.held"),
        "memory_reserved": native("memory.absent", emulated(lambda: 6, "another way")),
        "memory_stats": native("absent"),
        "init": noop("nothing"),
        "power_draw": unsupported("no sensor", "guess"),
    }
    plugged(Native(table=table))
    calls = pt.active().bind()
    assert calls["memory_allocated"] is module.memory.held  # nothing in between
    assert calls["memory_reserved"]() == 6
    with pytest.raises(
        pt.UnsupportedError, match=r"memory_stats is not available on the fake backend: .*torch.fake has no absent"
    ):
        calls["memory_stats"]()
    with pytest.raises(
        pt.UnsupportedError, match=r"power_draw is not available on the fake backend: no sensor\. Instead: guess\."
    ):
        pt.power_draw()
