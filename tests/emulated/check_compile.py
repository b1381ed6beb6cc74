"""torch.compile on the emulated device: graphs and recompilations are counted, the rules of the compiler enforced."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import portable as pt


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counts(recorder: Any) -> tuple[int, int]:
    """(graphs, recompilations) of all functions."""
    return sum(n for n, _ in recorder.graphs.values()), sum(again for _, again in recorder.graphs.values())


def test_one_graph_for_one_shape(dev: torch.device, recorder: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    right = layer(x)
    layer.to(dev)
    compiled = torch.compile(layer, backend="neuron", fullgraph=True, dynamic=False)
    for _ in range(3):
        out = compiled(x.to(dev))
    assert torch.equal(out.cpu(), right)
    assert counts(recorder) == (1, 0)
    assert not [op for op, _ in recorder.compiles if op in ("aten::addmm", "aten::gelu")], (
        "operators of a graph cost nothing more"
    )
    assert torch.neuron.get_dynamo_metrics() == {"graphs": 1, "recompilations": 0}  # type: ignore[attr-defined]


def test_a_new_shape_recompiles(dev: torch.device, recorder: Any) -> None:
    double = torch.compile(lambda x: x * 2 + 1, backend="neuron", dynamic=False)
    for size in (2, 3, 2, 4, 3):
        assert double(torch.ones(size, device=dev)).tolist() == [3.0] * size
    assert counts(recorder) == (3, 2)
    double(torch.ones(2, device=dev, dtype=torch.bfloat16))
    assert counts(recorder) == (4, 3)


def test_the_backward_pass_belongs_to_the_graph(dev: torch.device, recorder: Any) -> None:
    layer = nn.Linear(4, 4).to(dev)
    x = torch.ones(2, 4, device=dev)
    torch.compile(layer, backend="neuron")(x).tanh().sum().backward()
    compiled = {op for op, _ in recorder.compiles}
    assert "aten::tanh_backward" in compiled, "outside the graph"
    assert "aten::mm" not in compiled and recorder.ops["aten::mm"] == 1
    assert layer.weight.grad is not None and layer.weight.grad.shape == (4, 4)


def test_graph_breaks(dev: torch.device, recorder: Any) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    assert torch.compile(broken, backend="neuron")(torch.ones(2, device=dev)).tolist() == [3, 3]
    assert counts(recorder) == (2, 0)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, backend="neuron", fullgraph=True)(torch.ones(2, device=dev))


def test_dynamic_shapes_are_refused(dev: torch.device) -> None:
    with pytest.raises(Exception, match="static shapes"):
        torch.compile(lambda x: x * 2, backend="neuron", dynamic=True)(torch.ones(3, device=dev))
    torch._dynamo.reset()
    # Without dynamic=False Dynamo makes the second shape dynamic by itself.
    double = torch.compile(lambda x: x * 2, backend="neuron")
    double(torch.ones(3, device=dev))
    with pytest.raises(Exception, match="static shapes"):
        double(torch.ones(4, device=dev))


def test_modes_and_options(dev: torch.device) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.compile(lambda x: x + 1, backend="neuron", mode="max-autotune")(torch.ones(1, device=dev)).item() == 2
    assert any("ignores mode" in str(w.message) for w in caught)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="model_name"):
        torch.compile(lambda x: x + 1, backend="neuron", options={"triton": True})(torch.ones(1, device=dev))
    torch._dynamo.reset()
    assert torch.compile(lambda x: x + 1, backend="neuron", options={"model_name": "m"})(torch.ones(1, device=dev)).item() == 2


def test_attention_inside_a_graph(dev: torch.device, recorder: Any) -> None:
    q = torch.randn(1, 2, 512, 16)
    right = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    attend = torch.compile(lambda x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True), backend="neuron")
    assert torch.equal(attend(q.to(dev)).cpu(), right)
    assert [path for path, *_ in recorder.attention] == ["NKI flash"] and counts(recorder) == (1, 0)


def test_portable_compile_takes_the_backend(dev: torch.device, recorder: Any) -> None:
    layer = pt.compile(nn.Linear(2, 2).to(dev))
    layer(torch.ones(1, 2, device=dev))
    layer(torch.ones(2, 2, device=dev))
    assert counts(recorder) == (2, 1)


def test_training_compiled_equals_eager(dev: torch.device, recorder: Any) -> None:
    def run(wrap: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dev)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        forward = wrap(model)
        losses = []
        for _ in range(5):
            opt.zero_grad()
            loss = forward(torch.linspace(-1, 1, 12, device=dev).view(3, 4)).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        return losses

    assert run(lambda m: torch.compile(m, backend="neuron", dynamic=False)) == run(lambda m: m)
    assert counts(recorder) == (1, 0)
