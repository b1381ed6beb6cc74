"""The API with two devices in one process. Run in a session of its own on ascend (test_api_sessions.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import portable as pt

pt.use("ascend")  # before its devices can be named
ZERO, ONE = torch.device("npu", 0), torch.device("npu", 1)


def test_ordinals(chosen: Any) -> None:
    assert pt.device_count() == 2 and pt.device(1) == pt.device("npu:1") == ONE and pt.device() == ZERO
    for wrong in (2, -1, "npu:2"):
        with pytest.raises(pt.DeviceIndexError, match=r"has 2 devices. Use an index from 0 to 1"):
            pt.device(wrong)
    assert [pt.get_device_name(n) for n in (0, 1)] == [pt.get_device_name()] * 2
    assert isinstance(pt.can_device_access_peer(0, 1), bool)
    with pytest.raises(pt.DeviceIndexError):
        pt.can_device_access_peer(0, 2)


def test_the_current_device(chosen: Any) -> None:
    for manager in (pt.device_index, pt.cuda.device):
        for form in (1, "npu:1", ONE):
            with manager(form):
                assert pt.current_device() == 1 and pt.device() == ONE == torch.ones(1, device="npu").device
            assert pt.current_device() == 0
        with pytest.raises(KeyError), manager(1):
            raise KeyError
        assert pt.current_device() == 0
    with pt.device_of(torch.ones(1, device=ONE)):
        assert pt.current_device() == 1
    pt.set_device(1)
    assert pt.device() == ONE
    pt.set_device("npu:0")
    assert pt.device() == ZERO


def test_memory_of_each(chosen: Any) -> None:
    before = [pt.memory.allocated(n) for n in (0, 1)]
    keep = torch.ones(2**20, device=ONE)
    assert pt.memory.allocated(0) == before[0] and pt.memory.allocated(ONE) >= before[1] + keep.nbytes
    assert pt.memory.max_allocated("npu:1") >= keep.nbytes and pt.memory.stats(1)["allocated_bytes.all.current"] >= keep.nbytes
    pt.reset_peak_memory_stats(1)
    assert pt.memory.info(0)[1] == pt.memory.info(1)[1]


def test_generators_of_each(chosen: Any) -> None:
    pt.manual_seed_all(4)
    first, second = (torch.rand(4, device=device).cpu() for device in (ZERO, ONE))
    states = pt.get_rng_state_all()
    assert len(states) == 2 and torch.equal(first, second)
    after = [torch.rand(4, device=device).cpu() for device in (ZERO, ONE)]
    pt.set_rng_state_all(states)
    assert all(torch.equal(torch.rand(4, device=device).cpu(), right) for device, right in zip((ZERO, ONE), after, strict=True))
    pt.set_rng_state(states[1], 1)
    with pt.fork_rng([1]):
        torch.rand(9, device=ONE)
    assert torch.equal(torch.rand(4, device=ONE).cpu(), after[1])


def test_streams_of_each(chosen: Any) -> None:
    stream = pt.Stream(device=1)
    with pt.stream(stream):
        assert pt.current_stream(1) == stream != pt.current_stream(0)
    assert pt.current_stream(1) == pt.default_stream(ONE)
    pt.synchronize(1)


def test_batches_go_where_they_are_asked(chosen: Any) -> None:
    batches = list(pt.prefetch([torch.full((2,), float(i)) for i in range(3)], 1))
    assert all(batch.device == ONE for batch in batches) and [batch[0].item() for batch in batches] == [0, 1, 2]


def test_programs_written_for_cuda(chosen: Any) -> None:
    x = torch.arange(6.0).view(2, 3)
    with pt.cuda_compat():
        assert torch.cuda.device_count() == 2
        assert x.cuda(1).device == x.to("cuda:1").device == nn.Linear(1, 1).cuda(1).weight.device == ONE
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1 and torch.zeros(1, device="cuda").device == x.cuda().device == ONE
        torch.cuda.set_device("cuda:1")
        assert torch.zeros(1, device="cuda").device == ONE
        torch.cuda.set_device(0)
        net = nn.DataParallel(nn.Linear(3, 2), device_ids=[0, 1]).cuda()
        assert torch.equal(net(x.cuda()).cpu(), nn.functional.linear(x, *(p.cpu() for p in net.parameters())))
        with pytest.raises(pt.DeviceIndexError, match="asked for cuda:2, but the ascend backend has 2 devices"):
            x.cuda(2)
