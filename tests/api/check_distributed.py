"""pt.distributed in one process, as without torchrun: the group, DDP and FSDP2 against plain PyTorch on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import portable as pt

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import model as reference

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this PyTorch was built without gloo"
)


@pytest.fixture
def world(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    yield pt.distributed.init()
    pt.distributed.shutdown()


def trained(how: str, device: torch.device) -> list[float]:
    model: Any = reference.Net().float().to(device)
    if how == "ddp":
        model = pt.distributed.ddp(model)
    elif how == "fsdp":
        model = pt.distributed.fsdp(model, reference.Block)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, **(pt.optimizer_options("AdamW") if how else {}))
    losses = []
    for step in range(reference.STEPS):
        x, y = (part.float().to(device) for part in reference.batch(step))
        opt.zero_grad()
        loss = reference.loss_of(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def test_a_world_of_one(chosen: Any, world: Any) -> None:
    spec = chosen.spec
    name = spec.process_group if spec.device_type == "cpu" or not spec.composite_group else f"cpu:gloo,{spec.device_type}:"
    assert (world.rank, world.local_rank, world.world_size, world.is_main) == (0, 0, 1, True)
    assert world.device == pt.device() and world.backend.startswith(name) and pt.distributed.init() == world
    for device in {world.device, torch.device("cpu")} if spec.composite_group else {world.device}:
        values = torch.tensor([1.0, 2.0], device=device)
        dist.all_reduce(values)
        assert values.tolist() == [1, 2]
    dist.barrier()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_training(world: Any, how: str) -> None:
    right = trained("", torch.device("cpu"))
    assert trained(how, world.device) == pytest.approx(right, rel=1e-5) and right[-1] < right[0]


def test_without_a_group(chosen: Any) -> None:
    pt.distributed.shutdown()
    for how in ("ddp", "fsdp"):
        with pytest.raises(pt.ConfigurationError, match=rf"pt\.distributed\.{how}\(\).*pt\.distributed\.init\(\)"):
            getattr(pt.distributed, how)(reference.Net())


def test_wrong_environments(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(pt.ConfigurationError, match=r"WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set.*torchrun"):
        pt.distributed.init()
    monkeypatch.delenv("RANK")
    with pytest.raises(pt.ConfigurationError, match="'nonsense' was asked for"):
        pt.distributed.init("nonsense")
    assert not dist.is_initialized()
