"""Checks of the emulated device's process group in two processes; each writes what it found. Started by test_processes.py.

Usage: processes.py FOLDER
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import portable as pt
from portable.rehearsal import current

found: dict[str, Any] = {}


def error(call: Any) -> str:
    try:
        call()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "no error"


def train(kind: str) -> dict[str, Any]:
    """Losses and final weights (as lists of numbers) of 5 steps, each rank on half of the batch."""
    torch.manual_seed(5)
    model: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).to(group.device)
    model = pt.distributed.ddp(model) if kind == "ddp" else pt.distributed.fsdp(model)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        x = torch.linspace(-1, 1, 32).view(8, 4).roll(step, 0)[group.rank * 4 :][:4].to(group.device)
        opt.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return {"losses": losses, "weights": [w.detach().cpu().flatten().tolist() for w in weights]}


group = pt.distributed.init(timeout=timedelta(seconds=60))
rank, device = group.rank, group.device
session = current()
assert session is not None
recorder = session.recorder
found["group"] = [group.world_size, str(device), group.backend, dist.get_backend()]


def ones(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((2,), value, device=device, dtype=dtype)


total = ones(rank + 1.0)
dist.all_reduce(total)
found["all_reduce"] = total.tolist()
work = dist.all_reduce(ones(), async_op=True)
found["async"] = [work.wait() is not False, work.is_completed()]
root = ones(7.0 if rank == 0 else 1.0)
dist.broadcast(root, 0)
found["broadcast"] = root.tolist()
parts = [ones(), ones()]
dist.all_gather(parts, ones(float(rank)))
found["all_gather"] = [p.tolist() for p in parts]
whole = torch.empty(4, device=device)
dist.all_gather_into_tensor(whole, ones(rank + 3.0))
found["all_gather_into_tensor"] = whole.tolist()
piece = ones()
dist.reduce_scatter_tensor(piece, torch.arange(4.0, device=device) + rank)
found["reduce_scatter_tensor"] = piece.tolist()
swapped = torch.empty(4, device=device)
dist.all_to_all_single(swapped, torch.arange(4.0, device=device) + 10 * rank)
found["all_to_all_single"] = swapped.tolist()
dist.barrier()
objects: list[Any] = [None, None]
dist.all_gather_object(objects, {"rank": rank})
found["objects"] = objects

exact, big = ones(2**23, torch.int64), ones(2**24 + 1, torch.int64)
dist.all_reduce(exact)
dist.all_reduce(big)
found["integers"] = [exact.tolist(), big.tolist()]
seed = torch.tensor([2**24 + 1 if rank == 0 else 0], device=device)
dist.broadcast(seed, 0)
found["integer broadcast"] = seed.item()
found["findings"] = sorted({(kind, op) for kind, op, _ in recorder.findings})
found["errors"] = {
    "send": error(lambda: dist.send(ones(), 1 - rank)),
    "recv": error(lambda: dist.recv(ones(), 1 - rank)),
    "monitored_barrier": error(lambda: dist.monitored_barrier()),
    "uneven": error(
        lambda: dist.all_to_all_single(
            torch.empty(3, device=device),
            torch.empty(3, device=device),
            [1, 2] if rank == 0 else [2, 1],
            [1, 2] if rank else [2, 1],
        )
    ),
    "cpu": error(lambda: dist.all_reduce(torch.ones(2))),
    "empty": error(lambda: dist.all_reduce(torch.empty(0, device=device))),
    "barrier of a part": error(lambda: dist.new_group([0, 1]).barrier()),
}
gloo = dist.new_group(backend="gloo")
host = torch.tensor([2**24 + 1 + rank])
dist.all_reduce(host, group=gloo)
found["gloo"] = host.item()
for kind in ("ddp", "fsdp"):
    found[kind] = train(kind)
found["collectives"] = dict(recorder.collectives)
pt.distributed.shutdown()
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
