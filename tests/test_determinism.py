"""pt.deterministic: what it sets, and that it puts everything back."""

from __future__ import annotations

import os

import fakes
import pytest
import torch

import portable as pt
from portable.spec import DeterminismSpec

VARIABLE = "PORTABLE_TEST_WORKSPACE"


@pytest.fixture(autouse=True)
def clean():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def declared(plugged, monkeypatch):
    """A backend that asks for two flags (one of which this PyTorch lacks) and a variable."""
    flags = {"backends.cudnn.benchmark": False, "backends.cudnn.deterministic": True, "backends.absent.flag": True}
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    plugged(fakes.Fake(fakes.spec(determinism=DeterminismSpec({VARIABLE: ":4096:8"}, flags))))
    pt.use("fake")


def state() -> tuple:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        os.environ.get(VARIABLE),
    )


BEFORE = (False, False, True, False, None)
DURING = (True, False, False, True, ":4096:8")


def test_takes_effect_at_once(declared):
    pt.deterministic()
    assert state() == DURING


def test_block_restores_everything(declared):
    with pt.deterministic():
        assert state() == DURING
    assert state() == BEFORE


def test_nested_blocks(declared):
    with pt.deterministic():
        with pt.deterministic(warn_only=True):
            assert state() == (True, True, *DURING[2:])
            with pt.deterministic(False):
                assert state()[0] is False
            assert state() == (True, True, *DURING[2:])
        assert state() == DURING
    assert state() == BEFORE


def test_exception_restores_everything(declared):
    with pytest.raises(KeyError), pt.deterministic():
        raise KeyError
    assert state() == BEFORE


def test_block_may_be_entered_twice(declared):
    block = pt.deterministic()
    for _ in range(2):
        with block:
            assert state() == DURING
        assert state() == BEFORE


def test_restored_flags_are_the_backends_that_set_them(declared):
    """Another backend chosen inside the block does not keep the first one's flags alive."""
    with pt.deterministic():
        pt.use("cpu")
    assert state() == BEFORE


def test_a_set_variable_is_the_users(declared, monkeypatch):
    monkeypatch.setenv(VARIABLE, ":16:8")
    with pt.deterministic():
        assert os.environ[VARIABLE] == ":16:8"
    assert os.environ[VARIABLE] == ":16:8"


def test_nondeterministic_operator_raises_or_warns(on_cpu):
    """put_ without accumulate has no deterministic kernel (torch.use_deterministic_algorithms documentation)."""

    def operate():
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

    operate()
    with pt.deterministic(), pytest.raises(RuntimeError, match="deterministic"):
        operate()
    with pt.deterministic(warn_only=True), pytest.warns(UserWarning, match="deterministic"):
        operate()
    operate()


def test_training_repeats_bit_for_bit(on_cpu):
    def train() -> torch.Tensor:
        pt.seed_everything(1)
        model = torch.nn.Sequential(
            torch.nn.Embedding(50, 8), torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4)
        )
        optimizer = torch.optim.AdamW(model.parameters(), **pt.optimizer_options("AdamW"))
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randint(50, (64, 4))).square().mean().backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    with pt.deterministic():
        assert torch.equal(train(), train())


def test_one_object_in_two_nested_blocks_holds_until_the_outer_ends() -> None:
    both = pt.deterministic()
    with both:
        with both:
            pass
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
