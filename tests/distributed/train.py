"""Train a small model on this process's share of each batch, and write the losses; started by test_distributed.py.

Usage: train.py (ddp|fsdp) OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from model import STEPS, Net, batch, loss_of
from torch import distributed as dist

import portable as pt


def main(how: str, output: Path) -> None:
    world = pt.distributed.init()
    model = Net().to(world.device)
    wrapped = pt.distributed.ddp(model) if how == "ddp" else pt.distributed.fsdp(model, type(model.blocks[0]))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, **pt.optimizer_options("AdamW"))
    losses = []
    for step in range(STEPS):
        x, y = (whole.chunk(world.world_size)[world.rank] for whole in batch(step))
        optimizer.zero_grad()
        loss = loss_of(wrapped(x), y)
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world.world_size)
    sharded = sorted({type(parameter).__name__ for parameter in wrapped.parameters()})
    pt.distributed.shutdown()
    pt.distributed.shutdown()  # harmless without a group
    if world.is_main:
        facts = {"losses": losses, "world": world.world_size, "backend": world.backend, "parameters": sharded}
        output.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
