"""What test_third_party_backend.py runs in a process of its own, where the example of docs/write-a-backend.md is installed.

Prints one JSON object: section to what was found.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import portable as pt


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    x, y = torch.randn(20, 16, 12, generator=generator), torch.randint(5, (20, 16), generator=generator)
    return list(zip(x, y, strict=True))


def discovery() -> dict[str, Any]:
    from portable.plugins import registry

    names = sorted(registry().backends)
    return {"backends": names, "vendor imported": "torch_acme" in sys.modules}


def shown() -> str:
    from rich.console import Console

    from portable.info import collect
    from portable.info_view import show

    out = io.StringIO()
    show(collect(), Console(file=out, width=200))
    return out.getvalue()


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except pt.PortableError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def device_api() -> dict[str, Any]:
    from portable.catalogue import BY_NAME

    backend = pt.active()
    calls = backend.bind()
    module = torch.acme  # type: ignore[attr-defined]
    natives = {
        name: cell.path for name, cell in backend.support.items() if cell.kind == "native" and hasattr(module, cell.path)
    }
    found: dict[str, Any] = {
        "active": backend.spec.name,
        "complete": set(calls) == set(BY_NAME),
        "natives": sorted(natives),
        "nothing in between": all(calls[name] == getattr(module, path) for name, path in natives.items()),
        "devices": [str(pt.device()), str(pt.device(1)), pt.device_count()],
        "memory": pt.memory.info(),
        "generation": pt.generation().name,  # type: ignore[union-attr]
        "bf16": pt.is_bf16_supported(),
        "capability": pt.get_device_capability(),
        "temperature": _error(pt.temperature),
        "graph": _error(pt.Graph),
        "wrong index": _error(lambda: pt.device(2)),
    }
    with pt.device_index(1):
        found["inside"] = [pt.current_device(), str(torch.zeros(1, device="acme").device)]
    found["after"] = pt.current_device()
    pt.seed_everything(5)
    state = pt.get_rng_state()
    drawn = torch.rand(3, device=pt.device()).cpu()
    pt.set_rng_state(state)
    found["draws repeat"] = torch.equal(drawn, torch.rand(3, device=pt.device()).cpu())
    return found


def training() -> dict[str, Any]:
    import emulated_device

    pt.seed_everything(0)
    net = pt.compile(model().to(pt.device()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, **pt.optimizer_options("AdamW"))
    scaler = pt.GradScaler()
    losses = []
    before = emulated_device.calls["aten::addmm"]
    for x, y in pt.prefetch(batches()):
        optimizer.zero_grad()
        with pt.autocast(enabled=False):
            loss = nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    pt.synchronize()
    return {
        "losses": losses,
        "devices": sorted({str(parameter.device) for parameter in net.parameters()}),
        "addmm": emulated_device.calls["aten::addmm"] - before,
    }


def other_hooks() -> dict[str, Any]:
    import portable_acme_extras

    from portable.hookspecs import AttentionPath, ConformanceCase, MigrationRule
    from portable.plugins import registry

    found = registry()
    found.add(portable_acme_extras, "acme_extras", "portable-acme 1.0")
    paths = [path for _, path in found.collect("portable_attention_paths", AttentionPath, backend="acme")]
    cases = [case for _, case in found.collect("portable_conformance_cases", ConformanceCase)]
    for case in cases:
        case.run(pt.active())
    return {
        "paths": [[path.name, path.why_not(SimpleNamespace(head_dim=24))] for path in paths],
        "for others": [path.name for _, path in found.collect("portable_attention_paths", AttentionPath, backend="cuda")],
        "cases": [case.name for case in cases],
        "rules": [rule.code for _, rule in found.collect("portable_migration_rules", MigrationRule)],
        "problems": [problem.message for problem in found.problems],
    }


def own_test(file: str) -> dict[str, Any]:
    """Run the document's test as its reader would, and count."""
    import pytest

    outcomes: dict[str, str] = {}

    class Record:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.failed:
                outcomes[report.nodeid.rpartition("::")[2]] = report.longreprtext or report.outcome

    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(Path(file).parent)]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*options, file], plugins=[Record()])
    return outcomes


if __name__ == "__main__":
    found: dict[str, Any] = {"discovery": discovery()}
    with pt.use("acme_npu"):
        found |= {"shown": shown(), "device api": device_api(), "training": training(), "other hooks": other_hooks()}
    found["own test"] = own_test(sys.argv[1])
    json.dump(found, sys.stdout)
