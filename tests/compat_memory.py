"""Where PyTorch remembers functions: a search that tests of pt.cuda_compat share, and run in a process of its own."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

import portable as pt

# Code that TorchInductor generates; a replacement that it kept behaves like the original afterwards.
_GENERATED = "torch._inductor.runtime.compile_tasks."
_LATE = (
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.ao.quantization",
    "torch.utils.checkpoint",
)


def work() -> None:
    """Use the parts that remember: Dynamo, TorchScript, export, PyTorch's tables of overridable functions."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.to("cuda") + torch.zeros(2, device="cuda") + torch.full_like(x, 1.0)

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    torch.jit.script(nn.Linear(2, 2))(torch.ones(2))
    torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.overrides.get_testing_overrides()
    torch.overrides.get_overridable_functions()
    torch.overrides.get_ignored_functions()
    with torch.device("cuda"):
        torch.zeros(1)


def replacements() -> list[Any]:
    """What is put in place of PyTorch's own now."""
    from portable.compat import engine

    return [vars(owner)[name] for owner, name in engine._patches.owners()]


def remembered(made: list[Any]) -> Iterator[str]:
    """Where in PyTorch's modules, classes, closures and caches one of these objects is held."""
    gc.collect()
    identities = {id(item) for item in made}

    def holds(value: Any, depth: int = 4) -> bool:
        if id(value) in identities:
            return True
        if depth and isinstance(value, dict):
            return any(holds(item, depth - 1) for pair in list(value.items()) for item in pair)
        if depth and isinstance(value, (list, tuple, set, frozenset)):
            return any(holds(item, depth - 1) for item in list(value))
        return False

    cache = type(functools.lru_cache(lambda: None))
    for item in gc.get_objects():
        if type(item) is cache and any(holds(held) for held in gc.get_referents(item)):
            yield f"cache {item.__module__}.{item.__qualname__}"
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or name.startswith(_GENERATED):
            continue
        for key, value in list(vars(module).items()):
            if key != "__builtins__" and holds(value):
                yield f"{name}.{key}"
            if isinstance(value, type):
                yield from (f"{name}.{key}.{inner}" for inner, item in list(vars(value).items()) if holds(item, 3))
            # A lowering of TorchInductor keeps the functions it was registered for in a closure, for messages.
            if isinstance(value, FunctionType) and not name.startswith("torch._inductor."):
                cells = [cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)()]
                if any(holds(cell, 3) for cell in cells):
                    yield f"closure of {name}.{key}"


def main() -> None:
    with pt.cuda_compat("cpu"):
        made = replacements()
        for name in _LATE:
            importlib.import_module(name)
        work()
    print("remembered:", list(remembered(made)))


if __name__ == "__main__":
    main()
