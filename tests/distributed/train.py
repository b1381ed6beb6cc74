"""Train a small model on this process's share of each batch, and write the losses; started by test_distributed.py.

Usage: train.py OUTPUT (first with DDP, then with FSDP2, in the same group)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from model import STEPS, Net, batch, loss_of
from torch import distributed as dist

import portable as pt


def train(how: str, world: pt.distributed.World) -> dict[str, object]:
    model = Net().to(world.device)
    wrapped = pt.distributed.ddp(model) if how == "ddp" else pt.distributed.fsdp(model, type(model.blocks[0]))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, **pt.optimizer_options("AdamW"))
    losses = []
    for step in range(STEPS):
        x, y = (whole.chunk(world.world_size)[world.rank].to(world.device) for whole in batch(step))
        optimizer.zero_grad()
        loss = loss_of(wrapped(x), y)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world.world_size)
    kinds = sorted({type(parameter).__name__ for parameter in wrapped.parameters()})
    return {"losses": losses, "parameters": kinds}


if __name__ == "__main__":
    here = pt.distributed.init()
    results = {how: train(how, here) for how in ("ddp", "fsdp")}
    pt.distributed.shutdown()
    if here.is_main:
        Path(sys.argv[1]).write_text(json.dumps({**results, "world": here.world_size, "backend": here.backend}))
