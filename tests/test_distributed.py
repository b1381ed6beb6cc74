"""pt.distributed with real gloo groups: two processes under torchrun, one without, and environments that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fakes
import pytest
import torch
from torch import distributed as dist
from torch import nn

import portable as pt
from portable.support import emulated

FOLDER = Path(__file__).parent / "distributed"
sys.path.insert(0, str(FOLDER))
import model as reference  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("on_cpu"),
    pytest.mark.skipif(not dist.is_available(), reason="this PyTorch was built without torch.distributed"),
]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No group and no launcher's variables, before and after."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    pt.distributed.shutdown()


def launch(processes: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PORTABLE_BACKEND": "cpu", "OMP_NUM_THREADS": "1", **variables}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    result = subprocess.run([*launcher, *command], env=environment, capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stderr
    return result


def expected_losses() -> list[float]:
    """Plain PyTorch in one process on the whole batches."""
    model = reference.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False, foreach=False)
    losses = []
    for step in range(reference.STEPS):
        x, y = reference.batch(step)
        optimizer.zero_grad()
        loss = reference.loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_two_processes_train_as_one(tmp_path):
    output = tmp_path / "losses.json"
    launch(2, str(FOLDER / "train.py"), str(output))
    found = json.loads(output.read_text())
    assert (found["world"], found["backend"]) == (2, "gloo")
    expected = expected_losses()
    for how, parameters in (("ddp", ["Parameter"]), ("fsdp", ["DTensor"])):
        assert found[how]["parameters"] == parameters
        assert found[how]["losses"] == pytest.approx(expected, rel=1e-11)
    assert expected[-1] < expected[0]


def test_group_of_two(tmp_path):
    launch(2, str(FOLDER / "group.py"), str(tmp_path))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["rank"] == found["local_rank"] == found["expected_rank"] == rank
        assert (found["world_size"], found["device"], found["backend"], found["sum"]) == (2, "cpu", "gloo", 3.0)
        assert found["is_main"] is (rank == 0)
        assert found["same"] is found["left"] is True


# -- one process ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_single_process_without_torchrun(how):
    world = pt.distributed.init()
    assert world == pt.distributed.World(0, 0, 1, torch.device("cpu"), "gloo")
    assert world.is_main
    model = reference.Net()
    wrapped = pt.distributed.ddp(model) if how == "ddp" else pt.distributed.fsdp(model, model.blocks)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, **pt.optimizer_options("AdamW"))
    losses = []
    for step in range(reference.STEPS):
        x, y = reference.batch(step)
        optimizer.zero_grad()
        loss = reference.loss_of(wrapped(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(expected_losses(), rel=1e-11)


def test_shutdown_and_another_group():
    pt.distributed.shutdown()
    for _ in range(2):
        assert pt.distributed.init().world_size == 1
        assert dist.is_initialized()
        pt.distributed.shutdown()
        assert not dist.is_initialized()
        pt.distributed.shutdown()


def test_group_that_exists_is_taken(monkeypatch):
    """Made by other means than torchrun's variables; even half of these does not matter then."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("RANK", "7")
    assert pt.distributed.init() == pt.distributed.World(0, 0, 1, torch.device("cpu"), "gloo")


def test_fsdp_by_class_shards_inner_blocks_first():
    """Nested blocks of one class, the model itself being one: each becomes a unit of its own."""
    from torch.distributed.fsdp import FSDPModule

    class Nested(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.inner = Nested(depth - 1) if depth else None

        def forward(self, x):
            x = x * self.weight
            return x if self.inner is None else self.inner(x)

    pt.distributed.init()
    model = pt.distributed.fsdp(Nested(2), Nested)
    assert [isinstance(module, FSDPModule) for module in model.modules()] == [True] * 3
    model(torch.full((1, 4), 2.0)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.full_tensor().tolist() == [2.0] * 4


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_without_a_group(how):
    with pytest.raises(pt.ConfigurationError, match=rf"pt\.distributed\.{how}\(\).*pt\.distributed\.init\(\)"):
        getattr(pt.distributed, how)(reference.Net())


# -- wrong environments -----------------------------------------------------------------------------------------------------

GOOD = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}


@pytest.mark.parametrize(
    "present", [("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("RANK", "WORLD_SIZE"), ("RANK", "MASTER_ADDR")]
)
def test_half_an_environment(monkeypatch, present):
    for name in present:
        monkeypatch.setenv(name, GOOD.get(name, "0"))
    with pytest.raises(pt.ConfigurationError) as caught:
        pt.distributed.init()
    missing = [name for name in GOOD if name not in present]
    assert all(part in str(caught.value) for part in (*missing, "torchrun", "not set"))
    assert not dist.is_initialized()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["", "one", "-1", "1.0", "²", " 0"])
def test_a_number_that_is_none(monkeypatch, name, value):
    for key, good in {**GOOD, "LOCAL_RANK": "0", name: value}.items():
        monkeypatch.setenv(key, good)
    with pytest.raises(pt.ConfigurationError) as caught:
        pt.distributed.init()
    assert all(part in str(caught.value) for part in (name, repr(value), "torchrun"))


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("0", "0")])
def test_rank_outside_the_world(monkeypatch, rank, size):
    for key, good in {**GOOD, "RANK": rank, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(key, good)
    with pytest.raises(pt.ConfigurationError, match=f"RANK={rank} and WORLD_SIZE={size}"):
        pt.distributed.init()


def test_whole_environment_of_one_process(monkeypatch):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for key, good in {**GOOD, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(key, good)
    assert pt.distributed.init().world_size == 1


@pytest.mark.parametrize("name", ["nonsense", "cpu:gloo,cuda:nonsense"])
def test_backend_that_is_not_built_in(name):
    with pytest.raises(pt.ConfigurationError) as caught:
        pt.distributed.init(name)
    assert all(part in str(caught.value) for part in ("'nonsense'", torch.__version__, "gloo"))


# -- devices of the processes, on a made-up backend -------------------------------------------------------------------------


class Claiming(fakes.Fake):
    """Writes down whether its device was claimed before or after the group was joined."""

    def __init__(self, **kwargs):
        self.claims = []
        super().__init__(table={"set_device": emulated(self._claim, "recorded")}, **kwargs)

    def _claim(self, index):
        self.claims.append((index, dist.is_initialized()))


@pytest.fixture
def started(monkeypatch):
    """init() with the given local rank of a world of one, on the given backend; the group itself is gloo's."""

    def start(local_rank: int):
        for key, good in {**GOOD, "LOCAL_RANK": str(local_rank)}.items():
            monkeypatch.setenv(key, good)
        monkeypatch.setattr(dist, "init_process_group", made)
        return pt.distributed.init()

    real = dist.init_process_group

    def made(name, **options):
        made.name = name
        real("gloo", store=dist.HashStore(), rank=0, world_size=1)

    start.asked = lambda: made.name
    return start


@pytest.mark.parametrize("late", [False, True])
def test_device_is_claimed_in_the_declared_order(plugged, started, late):
    fake = Claiming(count=4)
    fake.group_before_device = late
    plugged(fake)
    pt.use("fake")
    world = started(3)
    assert (world.device, world.local_rank) == (torch.device("fpga:3"), 3)
    assert fake.claims == [(3, late)]
    assert started.asked() == "cpu:gloo,fpga:gloo"  # joined with gloo, so that CPU tensors have a group too


def test_no_composite_group_where_declared(plugged, started):
    plugged(Claiming(declared=fakes.spec(composite_group=False)))
    pt.use("fake")
    started(0)
    assert started.asked() == "gloo"


def test_more_processes_than_devices(plugged, started):
    plugged(Claiming(count=2))
    pt.use("fake")
    with pytest.raises(pt.DeviceIndexError) as caught:
        started(2)
    assert all(part in str(caught.value) for part in ("process 2", "fake backend has 2", "--nproc-per-node"))
    assert not dist.is_initialized()


def test_one_device_per_process(plugged, started):
    fake = Claiming(count=1)
    fake.one_device_per_process = True
    plugged(fake)
    pt.use("fake")
    assert started(5).device == torch.device("fpga:0")
