"""Two processes on emulated devices: collectives, their limits, DDP and FSDP2 through pt.distributed.init()."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()),
    reason="this PyTorch was built without gloo, which carries the bytes",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    script = str(Path(__file__).parent / "processes.py")
    environment = {**os.environ, "PORTABLE_NEURON_EMULATED": "1", "PORTABLE_BACKEND": "neuron", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, str(folder)]
    done = subprocess.run(launcher, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_the_group(found: list[dict[str, Any]]) -> None:
    assert [rank["group"] for rank in found] == [[2, "neuron:0", "neuron", "neuron"]] * 2


def test_collectives(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["all_reduce"] == [3, 3] and rank["broadcast"] == [7, 7] and rank["async"] == [True, True]
        assert rank["all_gather"] == [[0, 0], [1, 1]] and rank["all_gather_into_tensor"] == [3, 3, 4, 4]
        assert rank["objects"] == [{"rank": 0}, {"rank": 1}]
        assert rank["collectives"]["all_reduce"] >= 9 and rank["collectives"]["barrier"] == 1
    # The sum of [0, 1, 2, 3] and [1, 2, 3, 4], each rank its half; and each rank's half of both.
    assert [rank["reduce_scatter_tensor"] for rank in found] == [[1, 3], [5, 7]]
    assert [rank["all_to_all_single"] for rank in found] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_integers_are_exact_to_24_bits(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["integers"] == [[2**24] * 2, [2**25] * 2], "2 (2^24 + 1) is 2^25 + 2"
        assert rank["integer broadcast"] == 2**24, "a broadcast is a sum too"
        assert ["integer collective through float32", "all_reduce"] in rank["findings"]
        assert ["integer collective through float32", "broadcast"] in rank["findings"]
        assert rank["gloo"] == 2**25 + 3, "a gloo group is exact"


def test_what_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        errors = rank["errors"]
        for name, message in {
            "send": "no point-to-point operations",
            "recv": "no point-to-point operations",
            "monitored_barrier": "monitored_barrier",
            "uneven": "equal splits only",
            "cpu": "use a gloo group for tensors on the CPU",
            "empty": "first dimension is 0",
            "barrier of a part": "default group only",
        }.items():
            assert message in errors[name] and "no error" not in errors[name]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one(found: list[dict[str, Any]], kind: str) -> None:
    """Reference: PyTorch on the CPU, one process, whole batches. The order of additions differs: float32's rounding."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        x = torch.linspace(-1, 1, 32).view(8, 4).roll(step, 0)
        opt.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    weights = [w for p in model.parameters() for w in p.flatten().tolist()]
    for rank in found:
        assert rank[kind]["losses"] == pytest.approx(losses, rel=1e-5)
        assert [w for p in rank[kind]["weights"] for w in p] == pytest.approx(weights, rel=1e-4, abs=1e-5)
    assert found[0][kind] == found[1][kind]
