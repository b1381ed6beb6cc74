"""What all tests share: the switch for slow tests, and a backend choice that no test leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fakes import PlugIn

from portable import plugins, selection
from portable.backend import Backend


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure() -> None:
    # The tensors here are small, and on a busy machine several OpenMP threads mostly wait for one another.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="a longer run; taken with --slow"))


@pytest.fixture(autouse=True)
def _choice_restored() -> Iterator[None]:
    before = selection._active
    yield
    if selection._active is not before:
        selection._activate(before)


@pytest.fixture
def on_cpu() -> Iterator[Backend]:
    """The CPU backend is active, whatever else the machine has."""
    with selection.use("cpu") as backend:
        yield backend


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that makes the given backends, and the CPU's, the only ones, with nothing chosen yet."""
    import portable_cpu

    def plug(*backends: Backend, cpu: bool = True) -> None:
        registry = plugins.Registry()
        if cpu:
            registry.add(portable_cpu, "cpu", "portable 0", shipped=True)
        for backend in backends:
            registry.add(PlugIn(backend), backend.spec.name, "fakes 1.0")
        monkeypatch.setattr(plugins, "_registry", registry)
        monkeypatch.setattr(selection, "_availability", {})
        selection._activate(None)

    monkeypatch.delenv(selection.VARIABLE, raising=False)
    yield plug
    selection._activate(None)
