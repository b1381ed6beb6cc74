"""`Rehearsal.keep_going`: what the real device would refuse is recorded at the program's line and computed anyway."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = str(Path(__file__).relative_to(Path.cwd()))


def line_above() -> str:
    """The line before the one that calls this, as the recorder writes it."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return f"{HERE}:{frame.f_back.f_lineno - 1}"


@pytest.fixture
def lenient(rehearsal: Any, recorder: Any) -> Iterator[Any]:
    rehearsal.keep_going()
    yield recorder
    rehearsal.keep_going(False)


def refused(recorder: Any) -> dict[str, str]:
    """Line to message."""
    return {line: entry[1] for (kind, _, line), entry in recorder.findings.items() if kind == "refused"}


def test_strict_is_the_default(rehearsal: Any, recorder: Any, dev: torch.device) -> None:
    assert rehearsal.device.lenient is False
    with pytest.raises(RuntimeError, match="complex64"):
        torch.zeros(2, dtype=torch.complex64, device=dev)
    assert refused(recorder) == {}


def test_complex(lenient: Any, dev: torch.device) -> None:
    z = torch.complex(torch.tensor([1.0, 2.0], device=dev), torch.tensor([3.0, 4.0], device=dev))
    where = line_above()
    product = (z * z.conj()).real
    then = line_above()
    assert product.tolist() == [10.0, 20.0]
    assert torch.view_as_real(torch.fft.fft(z)).cpu().tolist() == [[3.0, 7.0], [-1.0, -1.0]]
    found = refused(lenient)
    assert "complex64" in found[where] and "view_as_real" in found[where]
    assert then in found


def test_float64_out(lenient: Any, dev: torch.device) -> None:
    out = torch.zeros(2, dtype=torch.float64, device=dev)
    torch.add(torch.ones(2, device=dev), torch.ones(2, device=dev), out=out)
    where = line_above()
    assert out.tolist() == [2.0, 2.0]
    assert list(refused(lenient)) == [where] and "out=" in refused(lenient)[where]


def test_scaler_with_fused_optimizer(lenient: Any, dev: torch.device) -> None:
    layer = torch.nn.Linear(2, 1).to(dev)
    before = layer.weight.detach().cpu().clone()
    opt = torch.optim.AdamW(layer.parameters(), fused=True)
    scaler = torch.amp.GradScaler("neuron", init_scale=4.0)
    scaler.scale(layer(torch.ones(1, 2, device=dev)).sum()).backward()
    scaler.step(opt)
    where = line_above()
    scaler.update()
    assert not torch.equal(layer.weight.detach().cpu(), before)
    assert "scaler" in refused(lenient)[where]


def test_out_of_memory(lenient: Any, rehearsal: Any, dev: torch.device) -> None:
    memory = rehearsal.device.memory[0]
    total, memory.total = memory.total, memory.used + 2**20
    try:
        x = torch.zeros(2**20, device=dev)
        where = line_above()
        assert "out of memory" in refused(lenient)[where]
        assert lenient.to_dict()["peak_memory"] == memory.peak >= 2**22
        del x
    finally:
        memory.total = total


def test_generator(lenient: Any, dev: torch.device) -> None:
    x = torch.zeros(4, device=dev)
    x.normal_(generator=torch.Generator().manual_seed(3))
    where = line_above()
    assert torch.equal(x.cpu(), torch.zeros(4).normal_(generator=torch.Generator().manual_seed(3)))
    assert "generator" in refused(lenient)[where]


def test_dynamic_shapes(lenient: Any, dev: torch.device) -> None:
    twice = torch.compile(lambda x: x * 2, backend="neuron", dynamic=True)
    assert twice(torch.ones(3, device=dev)).tolist() == [2.0, 2.0, 2.0]
    assert any("dynamic shape" in message for message in refused(lenient).values())


def test_refusals_are_in_the_dictionary(lenient: Any, dev: torch.device) -> None:
    torch.zeros(1, dtype=torch.complex64, device=dev)
    (entry,) = [e for e in lenient.to_dict()["findings"] if e["kind"] == "refused"]
    assert entry["op"] == "complex64" and entry["count"] == 1 and entry["line"].startswith(HERE)


def test_peak_line(rehearsal: Any, recorder: Any, dev: torch.device) -> None:
    rehearsal.device.memory[0].reset_peak()
    x = torch.zeros(2**20, device=dev)
    y = x * 2
    where = line_above()
    del y
    x.add_(1)
    assert recorder.to_dict()["peak_memory_line"] == where
