"""A device of 256 MiB: torch_npu's own allocator, its error beyond that, and what a program does after it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from portable_ascend import host_acl
from torch import nn

import portable as pt

MIB = 2**20


@pytest.fixture
def npu(rehearsal: Any) -> Any:
    gc.collect()
    torch.npu.empty_cache()  # type: ignore[attr-defined]
    return torch.npu  # type: ignore[attr-defined]


def held() -> int:
    """What the vendor's allocator has taken from the runtime."""
    runtime = host_acl.active()
    assert runtime is not None
    return runtime.used()


def test_out_of_memory_is_the_vendors(npu: Any, dev: torch.device) -> None:
    assert npu.get_device_properties().total_memory == 256 * MIB
    keep = torch.ones(16 * MIB, device=dev)  # 64 MiB
    with pytest.raises(
        torch.OutOfMemoryError, match=r"NPU out of memory\. Tried to allocate .*256\.00 MiB total capacity"
    ) as info:
        torch.zeros(200 * MIB, dtype=torch.uint8, device=dev)
    assert "64.00 MiB already allocated" in str(info.value) and pt.is_out_of_memory(info.value)
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([keep] * 4)
    with pytest.raises(torch.OutOfMemoryError):
        keep.double() + keep.double()
    with pytest.raises(torch.OutOfMemoryError):
        keep.repeat(4)
    assert keep.sum().item() == 16 * MIB, "what was there is whole"
    del keep, info
    gc.collect()
    npu.empty_cache()
    assert torch.zeros(200 * MIB, dtype=torch.uint8, device=dev).numel() == 200 * MIB


def test_the_batch_that_fits_is_found(npu: Any, dev: torch.device) -> None:
    """What programs do: halve the batch until it fits."""
    layer = nn.Linear(1024, 1024).to(dev)
    batch = 2**18
    while True:
        try:
            layer(torch.ones(batch, 1024, device=dev)).sum().backward()
            break
        except torch.OutOfMemoryError:
            layer.zero_grad()
            batch //= 2
    # Input, output and the output's gradient: 12 KiB a row beside 8 MiB of weights and gradients.
    assert batch == 2**14


def test_accounts(npu: Any, dev: torch.device) -> None:
    npu.reset_peak_memory_stats()
    start, before = npu.memory_allocated(), held()
    x = torch.ones(8 * MIB, device=dev)
    # The vendor's allocator rounds to 512 bytes and adds 32.
    assert 0 <= npu.memory_allocated() - start - 32 * MIB <= 1024 and held() - before >= 32 * MIB
    y = x * 2
    del y
    assert 0 <= npu.max_memory_allocated() - start - 64 * MIB <= 2048
    free, total = npu.mem_get_info()
    assert total == 256 * MIB and total - free == held() == npu.memory_reserved()
    del x
    assert npu.memory_allocated() == start
    npu.empty_cache()
    assert held() == npu.memory_reserved() <= before
    assert pt.memory.max_allocated() == npu.max_memory_allocated()


def test_a_training_step_gives_everything_back(npu: Any, dev: torch.device) -> None:
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(dev)
    opt = torch.optim.AdamW(layer.parameters())

    def step(rows: int) -> None:
        layer(torch.ones(rows, 64, device=dev)).sum().backward()
        opt.step()
        opt.zero_grad()

    gc.disable()
    try:
        step(64)
        start = npu.memory_allocated()
        for rows in (64, 65, 66):
            step(rows)
            assert npu.memory_allocated() == start
        with pytest.raises(torch.OutOfMemoryError):
            step(2**20)
        opt.zero_grad()
        assert npu.memory_allocated() == start
    finally:
        gc.enable()


def test_the_peak_of_a_rehearsal(npu: Any, dev: torch.device, rehearsal: Any) -> None:
    npu.reset_peak_memory_stats()
    x = torch.zeros(4 * MIB, device=dev)
    x = x + 1
    del x
    assert rehearsal.recorder.to_dict()["peak_memory"] >= 32 * MIB
