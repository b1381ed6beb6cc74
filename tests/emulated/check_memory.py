"""A device of 8 MiB: allocations beyond it fail, and the program can go on after that."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

MIB = 2**20


def test_out_of_memory_and_after(dev: torch.device, rehearsal: Any) -> None:
    neuron: Any = torch.neuron  # type: ignore[attr-defined]
    assert neuron.get_device_properties().total_memory == 8 * MIB
    keep = torch.ones(MIB, device=dev)  # 4 MiB
    with pytest.raises(torch.OutOfMemoryError, match=r"6,291,456 bytes were asked for, 4,194,304 of 8,388,608 are in use"):
        torch.zeros(6 * MIB, dtype=torch.uint8, device=dev)
    assert neuron.memory_allocated() == 4 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        keep.to(torch.float64)
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([keep, keep])
    with pytest.raises(RuntimeError, match="smaller batch"):  # as programs catch it
        torch.zeros(5 * MIB, dtype=torch.uint8).to(dev)
    assert keep.sum().item() == MIB
    del keep
    assert neuron.memory_allocated() == 0
    assert torch.zeros(8 * MIB, dtype=torch.uint8, device=dev).numel() == 8 * MIB


def test_the_batch_that_fits_is_found(dev: torch.device) -> None:
    """What programs do: halve the batch until it fits."""
    layer = nn.Linear(256, 256).to(dev)
    batch = 16384
    while True:
        try:
            layer(torch.ones(batch, 256, device=dev)).sum().backward()
            break
        except torch.OutOfMemoryError:
            batch //= 2
    # Input, output and the output's gradient: 3 KiB a row beside 0.25 MiB of weights and as much of gradients.
    assert batch == 2048


def test_memory_is_given_back_without_the_garbage_collector(dev: torch.device) -> None:
    """Nothing of the emulation may hold tensors in cycles: forward and backward pass, findings, failures."""
    neuron: Any = torch.neuron  # type: ignore[attr-defined]
    layer = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(dev)
    opt = torch.optim.AdamW(layer.parameters(), fused=True)

    def step(rows: int) -> None:
        x = torch.ones(rows, 64, device=dev)
        loss = layer(x).sum() + F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        loss.item()

    gc.collect()
    gc.disable()
    try:
        step(64)
        start = neuron.memory_allocated()
        for rows in (64, 65, 66):
            step(rows)
            assert neuron.memory_allocated() == start
        with pytest.raises(torch.OutOfMemoryError):
            step(65536)
        with pytest.raises(RuntimeError, match="dtype complex64"):
            torch.ones(2**18, device=dev).to(torch.complex64)
        opt.zero_grad()
        assert neuron.memory_allocated() == start
    finally:
        gc.enable()


def test_storages_are_freed_and_restored(dev: torch.device) -> None:
    """As FSDP does it with its parameters."""
    neuron: Any = torch.neuron  # type: ignore[attr-defined]
    start = neuron.memory_allocated()
    x = torch.ones(MIB // 4, device=dev)
    storage = x.untyped_storage()
    storage.resize_(0)
    assert neuron.memory_allocated() == start and storage.size() == 0 and x.shape == (MIB // 4,)
    storage.resize_(MIB)
    assert neuron.memory_allocated() == start + MIB and storage.nbytes() == MIB
    storage.resize_(0)
    del x, storage
    assert neuron.memory_allocated() == start, "freed once, not twice"
    y = torch.ones(4, device=dev)
    with pytest.raises(NotImplementedError, match="to 0 and back"):
        y.untyped_storage().resize_(8)
    assert torch.UntypedStorage(8).resize_(16).size() == 16 and torch.UntypedStorage(8, device=dev).device.type == "neuron"


def test_scores_of_attention_do_not_fit(dev: torch.device) -> None:
    q = torch.zeros(1, 8, 520, 16, device=dev)
    with pytest.raises(torch.OutOfMemoryError):
        F.scaled_dot_product_attention(q, q, q)  # 8 x 520 x 520 scores: 8.3 MiB
    q = torch.zeros(1, 8, 512, 16, device=dev)
    assert F.scaled_dot_product_attention(q, q, q).shape == q.shape


def test_the_peak_and_its_line(dev: torch.device, rehearsal: Any) -> None:
    neuron: Any = torch.neuron  # type: ignore[attr-defined]
    neuron.reset_peak_memory_stats()
    x = torch.zeros(MIB // 2, device=dev)
    y = x.exp()
    here = inspect.currentframe()
    assert here is not None
    where = f"check_memory.py:{here.f_lineno - 3}"
    del y, here
    assert neuron.max_memory_allocated() == 4 * MIB and neuron.memory_allocated() == 2 * MIB
    found = rehearsal.recorder.to_dict()
    assert found["peak_memory"] == 4 * MIB and found["peak_memory_line"].endswith(where)
    assert neuron.memory_stats()["allocated_bytes.all.peak"] == 4 * MIB


def test_lenient_goes_on(dev: torch.device, rehearsal: Any) -> None:
    rehearsal.keep_going()
    try:
        assert torch.zeros(3 * MIB, device=dev).numel() == 3 * MIB
        assert [kind for kind, name, _ in rehearsal.recorder.findings if name == "memory"] == ["refused"]
    finally:
        rehearsal.keep_going(False)
