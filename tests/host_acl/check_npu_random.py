"""Random numbers of the device's own generator, which torch_npu seeds: reproducible, apart from the CPU's, well distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

npu: Any = getattr(torch, "npu", None)

DRAWS: dict[str, Any] = {
    "rand": lambda d: torch.rand(64, device=d),
    "randn": lambda d: torch.randn(64, device=d),
    "randint": lambda d: torch.randint(1000, (64,), device=d),
    "randperm": lambda d: torch.randperm(64, device=d),
    "normal_": lambda d: torch.empty(64, device=d).normal_(2, 3),
    "uniform_": lambda d: torch.empty(64, device=d).uniform_(-1, 1),
    "exponential_": lambda d: torch.empty(64, device=d).exponential_(),
    "bernoulli": lambda d: torch.full((64,), 0.5, device=d).bernoulli(),
    "multinomial": lambda d: torch.ones(64, device=d).multinomial(32),
    "dropout": lambda d: F.dropout(torch.ones(64, device=d), 0.5),
    "rand_like": lambda d: torch.rand_like(torch.ones(64, device=d)),
    "rrelu": lambda d: F.rrelu(-torch.ones(64, device=d), training=True),
}


@pytest.fixture(autouse=True)
def _module(rehearsal: Any) -> None:
    global npu
    npu = torch.npu  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", DRAWS)
def test_draws_repeat_with_the_seed(dev: torch.device, name: str) -> None:
    draw = DRAWS[name]
    npu.manual_seed(7)
    first, second = draw(dev).cpu(), draw(dev).cpu()
    npu.manual_seed(7)
    assert torch.equal(draw(dev).cpu(), first) and torch.equal(draw(dev).cpu(), second)
    npu.manual_seed(8)
    assert not torch.equal(draw(dev).cpu(), first) and not torch.equal(first, second)
    torch.manual_seed(7)  # seeds every device
    assert torch.equal(draw(dev).cpu(), first)


@pytest.mark.parametrize("name", DRAWS)
def test_the_cpus_generator_is_left_alone(dev: torch.device, name: str) -> None:
    torch.manual_seed(3)
    right = torch.rand(4)
    torch.manual_seed(3)
    DRAWS[name](dev)
    assert torch.equal(torch.rand(4), right)
    npu.manual_seed(7)
    first = DRAWS[name](dev).cpu()
    npu.manual_seed(7)
    torch.rand(5)
    assert torch.equal(DRAWS[name](dev).cpu(), first)


@pytest.mark.parametrize("name", DRAWS)
def test_state_round_trip(dev: torch.device, name: str) -> None:
    npu.manual_seed(1)
    DRAWS[name](dev)
    state = npu.get_rng_state()
    first = DRAWS[name](dev).cpu()
    DRAWS["rand"](dev)
    npu.set_rng_state(state)
    assert torch.equal(DRAWS[name](dev).cpu(), first)


def test_generators(dev: torch.device) -> None:
    one, two = (torch.Generator(device="npu").manual_seed(5) for _ in range(2))
    npu.manual_seed(1)
    right = torch.rand(4, device=dev).cpu()
    npu.manual_seed(1)
    first = torch.randn(8, device=dev, generator=one)
    assert torch.equal(first.cpu(), torch.randn(8, device=dev, generator=two).cpu())
    assert not torch.equal(first.cpu(), torch.randn(8, device=dev, generator=one).cpu())
    assert torch.equal(torch.rand(4, device=dev).cpu(), right), "a generator of one's own leaves the device's alone"
    assert one.initial_seed() == 5 and one.device.type == "npu"


def test_initial_seed(dev: torch.device) -> None:
    npu.manual_seed(42)
    assert npu.initial_seed() == 42
    npu.manual_seed_all(43)
    assert npu.initial_seed() == 43


def test_distributions(dev: torch.device) -> None:
    """Moments, within five standard errors of 100,000 draws."""
    npu.manual_seed(0)
    count = 100_000
    for values, mean, deviation in (
        (torch.randn(count, device=dev), 0.0, 1.0),
        (torch.rand(count, device=dev), 0.5, 12**-0.5),
        (torch.empty(count, device=dev).exponential_(2.0), 0.5, 0.5),
        (torch.full((count,), 0.3, device=dev).bernoulli(), 0.3, (0.3 * 0.7) ** 0.5),
        (F.dropout(torch.ones(count, device=dev), 0.25), 1.0, (0.25 / 0.75) ** 0.5),
    ):
        found = values.double().cpu()
        assert abs(found.mean().item() - mean) < 5 * deviation / count**0.5
        assert abs(found.std().item() - deviation) < 0.03 * deviation
    both = torch.stack([torch.randn(count, device=dev), torch.randn(count, device=dev)]).cpu()
    assert abs(torch.corrcoef(both)[0, 1].item()) < 5 / count**0.5
