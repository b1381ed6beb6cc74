"""Two devices in one process, as torch_npu allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from portable_ascend import host_acl
from torch import nn

import portable as pt


@pytest.fixture
def npu(rehearsal: Any) -> Any:
    return torch.npu  # type: ignore[attr-defined]


def test_both_are_there(npu: Any) -> None:
    assert npu.device_count() == pt.device_count() == 2
    assert torch.ones(1, device="npu:1").device == torch.device("npu", 1)
    with pytest.raises(RuntimeError, match="device 2 does not exist: the host ACL runtime has 2"):
        torch.ones(1, device="npu:2")


def test_the_current_device(npu: Any) -> None:
    with npu.device(1):
        assert npu.current_device() == 1 and torch.ones(1, device="npu").device.index == 1
        assert torch.randn(2, device="npu").device.index == 1
    assert npu.current_device() == 0
    with pt.device_of(torch.ones(1, device="npu:1")):
        assert pt.current_device() == 1


def test_results_stay_with_their_inputs(npu: Any) -> None:
    x = torch.arange(4.0, device="npu:1", requires_grad=True)
    y = (x * 2).sum()
    y.backward()
    assert y.device.index == 1 and x.grad is not None and x.grad.device.index == 1 and x.grad.tolist() == [2] * 4
    assert torch.linalg.eigvalsh(torch.eye(2, device="npu:1")).device.index == 1, "also what falls back to the CPU"
    assert npu.current_device() == 0


def test_copies_between_them(npu: Any) -> None:
    x = torch.arange(6.0, device="npu:0").view(2, 3)
    y = x.t().to("npu:1")
    x.fill_(0)
    assert y.device.index == 1 and y.tolist() == [[0, 3], [1, 4], [2, 5]]
    x.copy_(y.t())
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_mixing_them_is_refused(npu: Any) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="npu:0") + torch.ones(2, device="npu:1")


def test_memory_is_counted_for_each(npu: Any) -> None:
    runtime = host_acl.active()
    assert runtime is not None
    before = [npu.memory_allocated(n) for n in (0, 1)], [runtime.used(n) for n in (0, 1)]
    keep = torch.ones(2**22, device="npu:1")
    assert npu.memory_allocated(0) == before[0][0] and npu.memory_allocated(1) >= before[0][1] + 2**24
    assert runtime.used(0) == before[1][0] and runtime.used(1) >= before[1][1] + 2**24
    del keep


def test_generators_are_apart(npu: Any) -> None:
    npu.manual_seed_all(5)
    first, second = (torch.rand(4, device=f"npu:{n}").cpu() for n in (0, 1))
    assert torch.equal(first, second), "one seed for all"
    torch.rand(3, device="npu:0")
    assert not torch.equal(*(torch.rand(4, device=f"npu:{n}").cpu() for n in (0, 1)))


def test_draws_without_a_tensor_take_the_current_devices_generator(npu: Any) -> None:
    npu.manual_seed_all(5)
    right = torch.rand(4, device="npu:0").cpu()
    before = npu.get_rng_state(0)
    npu.manual_seed_all(5)
    start = npu.get_rng_state(0)
    with npu.device(1):
        found = torch.rand(4, device="npu")
    assert found.device.index == 1 and torch.equal(found.cpu(), right)
    assert torch.equal(npu.get_rng_state(0), start) and not torch.equal(before, start)


def test_a_model_over_two_devices(npu: Any) -> None:
    torch.manual_seed(0)
    front, back = nn.Linear(4, 4), nn.Linear(4, 1)
    x = torch.randn(3, 4)
    right = back(front(x).relu())
    right.sum().backward()
    grad = front.weight.grad
    front.zero_grad()
    front.to("npu:0")
    back.to("npu:1")
    out = back(front(x.to("npu:0")).relu().to("npu:1"))
    out.sum().backward()
    assert torch.equal(out.cpu(), right) and torch.equal(front.weight.grad.cpu(), grad)  # type: ignore[union-attr, arg-type]
    assert front.weight.grad is not None and front.weight.grad.device.index == 0
