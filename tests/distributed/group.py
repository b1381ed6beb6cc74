"""Checks that need two processes; each writes what it found to a file of its own. Started by test_distributed.py.

Usage: group.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

import portable as pt

first = pt.distributed.init(timeout=timedelta(seconds=60))
again = pt.distributed.init()  # the group is taken as it is
tensor = torch.tensor([float(first.rank + 1)])
dist.all_reduce(tensor)
pt.distributed.shutdown()
pt.distributed.shutdown()
found = {
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
Path(sys.argv[1], f"{first.rank}.json").write_text(json.dumps(found))
