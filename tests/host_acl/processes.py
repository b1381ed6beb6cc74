"""Checks of the stand-in for hccl in two processes; each writes what it found. Started by test_host_acl_processes.py.

Usage: processes.py FOLDER [BACKEND]
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
    """Losses and final weights of 5 steps, each rank on half of the batch."""
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


group = pt.distributed.init(timeout=timedelta(seconds=60), **({"backend": sys.argv[2]} if len(sys.argv) > 2 else {}))
rank, device = group.rank, group.device
session = current()
assert session is not None
recorder = session.recorder
found["group"] = [group.world_size, str(device), group.backend, dist.get_backend()]


def ones(value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((2,), value, device=device, dtype=dtype)


for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
    total = ones(rank + 2.0)
    dist.all_reduce(total, op=getattr(dist.ReduceOp, name))
    found[f"all_reduce {name}"] = total.tolist()
work = dist.all_reduce(ones(), async_op=True)
found["async"] = [work.wait() is not False, work.is_completed()]
strided = torch.zeros(2, 2, device=device)
strided[:, 0] = rank + 1.0
column = strided[:, 0].contiguous()
dist.all_reduce(column)
found["column"] = column.tolist()
half = ones(rank + 0.5, torch.bfloat16)
dist.all_reduce(half)
found["bfloat16"] = half.tolist()
whole_numbers = ones(2**24 + 1, torch.int64)
dist.all_reduce(whole_numbers)
found["int64"] = whole_numbers.tolist()
root = ones(7.0 if rank == 0 else 1.0)
dist.broadcast(root, 0)
found["broadcast"] = root.tolist()
reduced = ones(rank + 1.0)
dist.reduce(reduced, 1)
found["reduce"] = reduced.tolist()
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
uneven = torch.empty(3, device=device)
dist.all_to_all_single(
    uneven, torch.arange(3.0, device=device) + 10 * rank, [1, 2] if rank == 0 else [2, 1], [1, 2] if rank == 0 else [2, 1]
)
found["uneven"] = uneven.tolist()
scattered = ones()
dist.scatter(scattered, [ones(4.0), ones(5.0)] if rank == 0 else None, 0)
found["scatter"] = scattered.tolist()
gathered = [ones(), ones()] if rank == 0 else None
dist.gather(ones(rank + 8.0), gathered, 0)
found["gather"] = None if gathered is None else [g.tolist() for g in gathered]
if rank == 0:
    dist.send(ones(9.0), 1)
    message = ones()
    dist.recv(message, 1)
else:
    message = ones()
    dist.recv(message, 0)
    dist.send(message + 1, 0)
found["point to point"] = message.tolist()
passed = [dist.P2POp(dist.isend, ones(rank + 1.0), 1 - rank), dist.P2POp(dist.irecv, root, 1 - rank)]
for request in dist.batch_isend_irecv(passed):
    request.wait()
found["batch"] = root.tolist()
dist.barrier()
objects: list[Any] = [None, None]
dist.all_gather_object(objects, {"rank": rank})
found["objects"] = objects
host = torch.tensor([2**24 + 1 + rank])
gloo = dist.new_group(backend="gloo")
dist.all_reduce(host, group=gloo)
found["gloo"] = host.item()
pair = dist.new_group([0, 1])
total = ones(rank + 1.0)
dist.all_reduce(total, group=pair)
found["new group"] = total.tolist()
found["collectives"] = dict(recorder.collectives)
for kind in ("ddp", "fsdp"):
    found[kind] = train(kind)
pt.distributed.shutdown()
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
