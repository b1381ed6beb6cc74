"""Options of pt.optimizer_options: accepted by the class, and the same trajectory as the plain loop."""

from __future__ import annotations

import inspect

import fakes
import pytest
import torch
from torch import nn

import portable as pt
from portable.spec import OptimizerSpec

pytestmark = pytest.mark.usefixtures("on_cpu")

CLASSES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
)
SETTINGS = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adagrad": {"lr": 1e-2, "weight_decay": 0.01},
}


@pytest.mark.parametrize("name", CLASSES)
def test_options_are_accepted(name):
    options = pt.optimizer_options(name)
    assert set(options) <= set(inspect.signature(getattr(torch.optim, name)).parameters)
    weights = [nn.Parameter(torch.ones(3, 3))]  # two-dimensional, as Muon asks
    optimizer = getattr(torch.optim, name)(weights, **options)
    assert {key: optimizer.defaults[key] for key in options} == options


def trajectory(name: str, dtype: torch.dtype, options: dict) -> list[torch.Tensor]:
    """The parameters after 20 steps of a small regression, from the same start for every call."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(32, 3, generator=generator, dtype=torch.float64)
    first = torch.randn(16, 8, generator=generator, dtype=torch.float64) / 3
    second = torch.randn(3, 16, generator=generator, dtype=torch.float64) / 4
    weights = [nn.Parameter(value.to(dtype)) for value in (first, second)]
    optimizer = getattr(torch.optim, name)(weights, **SETTINGS[name], **options)
    for _ in range(20):
        optimizer.zero_grad()
        predicted = torch.tanh(x.to(dtype) @ weights[0].T) @ weights[1].T
        (predicted - y.to(dtype)).square().mean().backward()
        optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_twenty_steps_equal_the_loop(name):
    """float64: fused and loop differ by rounding alone. float32: the fused one is as near to float64 as float32 allows."""
    options = pt.optimizer_options(name)
    assert options == {"fused": True}
    loop = trajectory(name, torch.float64, {"fused": False, "foreach": False})
    for found, expected in zip(trajectory(name, torch.float64, options), loop, strict=True):
        assert fakes.rel_error(found, expected) < 1e-12
    for found, expected in zip(trajectory(name, torch.float32, options), loop, strict=True):
        assert fakes.rel_error(found, expected) < 2e-5


def test_options_are_a_copy():
    pt.optimizer_options("AdamW")["fused"] = False
    assert pt.optimizer_options("AdamW") == {"fused": True}


def test_explanation():
    assert "measured" in pt.explain_optimizer("AdamW").reason
    other = pt.explain_optimizer("RMSprop")
    assert other.options == {}
    assert "default" in other.reason


def test_declared_by_the_backend(plugged):
    plugged(fakes.Fake(fakes.spec(optimizers={"SGD": OptimizerSpec({"foreach": False}, "one queue")})))
    pt.use("fake")
    assert pt.optimizer_options("SGD") == {"foreach": False}
    assert pt.optimizer_options("AdamW") == {}


@pytest.mark.parametrize("name", ["adamw", "lr_scheduler", "Optimizer", "", "AdamX", None])
def test_unknown_optimizer(name):
    with pytest.raises(pt.ConfigurationError) as caught:
        pt.optimizer_options(name)
    assert all(part in str(caught.value) for part in (repr(name), "AdamW", "case-sensitive"))
