"""The runtime under torch_npu: properties, events, streams, callbacks, what a program sees of the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from portable_ascend import host_acl


@pytest.fixture
def npu(rehearsal: Any) -> Any:
    return torch.npu  # type: ignore[attr-defined]


def test_what_runs_is_the_vendors_package(npu: Any) -> None:
    import torch_npu

    assert torch_npu.__version__.startswith("2.13.0")
    assert torch._C._get_privateuse1_backend_name() == "npu" and npu is torch_npu.npu


def test_execution_is_never_hardware(rehearsal: Any) -> None:
    assert rehearsal.execution == "vendor-package-on-host"
    done = subprocess.run([sys.executable, "-m", "portable", "info", "--json"], capture_output=True, text=True, check=True)
    (entry,) = [found for found in json.loads(done.stdout)["backends"] if found["name"] == "ascend"]
    assert entry["execution"] == "vendor-package-on-host"


def test_properties(npu: Any) -> None:
    found = npu.get_device_properties(0)
    chip = host_acl.active().settings  # type: ignore[union-attr]
    assert npu.is_available() and npu.device_count() == 1 and npu.current_device() == 0
    assert found.name == npu.get_device_name() == "Ascend910B2" and found.total_memory == chip.hbm == 64 * 2**30
    assert (found.cube_core_num, found.vector_core_num) == (chip.soc.cube, chip.soc.vector)
    assert npu.is_bf16_supported()


def test_events_measure_time(npu: Any) -> None:
    """Lower bounds only: the machine may be slow, but sleep never returns early."""
    start, middle, end = (npu.Event(enable_timing=True) for _ in range(3))
    start.record()
    time.sleep(0.02)
    middle.record()
    time.sleep(0.04)
    end.record()
    end.synchronize()
    first, second, whole = start.elapsed_time(middle), middle.elapsed_time(end), start.elapsed_time(end)
    assert first >= 20 and second >= 40 and whole == pytest.approx(first + second, abs=0.01) and end.query()
    with pytest.raises(RuntimeError, match="recorded"):
        npu.Event(enable_timing=True).elapsed_time(end)
    plain = npu.Event()
    plain.record()
    with pytest.raises(RuntimeError, match="without enable_timing=True"):
        start.elapsed_time(plain)


def test_work_is_measured(npu: Any, dev: torch.device) -> None:
    """Work is done when it is submitted, so an event after it is later by what it took."""
    a = torch.randn(400, 400, device=dev)
    start, end = (npu.Event(enable_timing=True) for _ in range(2))
    before = time.perf_counter()
    start.record()
    for _ in range(5):
        a = a @ a
    end.record()
    wall = (time.perf_counter() - before) * 1e3
    assert 0 < start.elapsed_time(end) <= wall


def test_streams(npu: Any, dev: torch.device) -> None:
    first, second = npu.Stream(), npu.Stream()
    assert first != second and npu.current_stream() == npu.default_stream()
    with npu.stream(first):
        assert npu.current_stream() == first
        x = torch.ones(1000, device=dev)
        for _ in range(10):
            x = x * 2
        done = first.record_event()
    with npu.stream(second):
        second.wait_event(done)
        y = x + 1
    npu.current_stream().wait_stream(second)
    x.record_stream(second)
    assert npu.current_stream() == npu.default_stream()
    assert bool((y.cpu() == 1025).all()) and second.query() and done.query()
    npu.synchronize()


def test_threads_have_streams_of_their_own(npu: Any, dev: torch.device) -> None:
    found: list[Any] = []

    def work(number: int) -> None:
        with npu.stream(npu.Stream()):
            x = torch.full((64,), float(number), device=dev, requires_grad=True)
            (x * x).sum().backward()
            found.append((number, x.grad.cpu()))  # type: ignore[union-attr]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(bool((grad == 2 * n).all()) for n, grad in found)


def test_pinned_memory(npu: Any, dev: torch.device) -> None:
    host = torch.arange(10.0).pin_memory()
    assert host.is_pinned() and not torch.arange(10.0).is_pinned()
    assert torch.equal(host.to(dev, non_blocking=True).cpu(), host)


@pytest.mark.parametrize("call", [lambda n: torch.ones(1, device="npu:5"), lambda n: n.set_device(5)], ids=["tensor", "set"])
def test_devices_that_do_not_exist(npu: Any, call: Any) -> None:
    with pytest.raises(RuntimeError, match="device 5 does not exist: the host ACL runtime has 1"):
        call(npu)
    assert npu.current_device() == 0 and torch.ones(1, device="npu").item() == 1


def test_a_program_ends_cleanly(npu: Any) -> None:
    """Also with tensors, streams, graphs and threads alive; no message of an ACL function left out."""
    program = (
        "import torch, portable as pt\npt.use('ascend')\nx = torch.ones(3, device='npu', requires_grad=True)\n"
        "s = torch.npu.Stream()\ne = torch.npu.Event()\ny = (x * 2).sum()\nworld = [x, s, e, y]\nprint(y.item())"
    )
    done = subprocess.run([sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "6.0")
    assert "host ACL" not in done.stderr and "rror" not in done.stderr, done.stderr


def test_children(npu: Any, dev: torch.device) -> None:
    """Spawned processes have the same device, by the variable."""
    program = "import torch, portable as pt; pt.use('ascend'); print((torch.ones(2, device='npu') + 1).tolist())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[2.0, 2.0]"


def test_the_program_uses_torch_npu_itself(npu: Any) -> None:
    """Scripts written for Ascend import torch_npu after choosing the backend, and find the same device."""
    program = (
        "import portable\nportable.use('ascend')\n"
        "import torch, torch_npu\n"
        "from torch_npu.contrib import transfer_to_npu\n"
        "print(torch.ones(2).cuda().device, torch.cuda.is_available())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[-2] == "npu:0 True"
