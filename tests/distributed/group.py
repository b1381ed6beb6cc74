"""Checks that need two processes; each prints what it found as one JSON line. Started by test_distributed.py."""

from __future__ import annotations

import json
import os
from datetime import timedelta

import torch
from torch import distributed as dist

import portable as pt

first = pt.distributed.init(timeout=timedelta(seconds=60))
again = pt.distributed.init()  # the group is taken as it is
tensor = torch.tensor([float(first.rank + 1)])
dist.all_reduce(tensor)
pt.distributed.shutdown()
pt.distributed.shutdown()
line = {
    "rank": first.rank,
    "local_rank": first.local_rank,
    "world_size": first.world_size,
    "device": str(first.device),
    "backend": first.backend,
    "is_main": first.is_main,
    "same": first == again,
    "sum": tensor.item(),
    "expected_rank": int(os.environ["RANK"]),
    "left": not dist.is_initialized(),
}
print(json.dumps(line), flush=True)
