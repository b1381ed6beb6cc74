"""Dynamo, TorchInductor, export and TorchScript under pt.cuda_compat."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import portable as pt
from portable.compat.engine import cuda_compat


@pytest.fixture
def mode() -> Iterator[cuda_compat]:
    torch._dynamo.reset()
    with pt.cuda_compat("cpu") as active:
        yield active


def on(device: object) -> nn.Module:
    """A module whose forward names devices in every way; ``device`` is what it was written for."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            with torch.no_grad():
                self.linear.weight.copy_(torch.eye(4))
                self.linear.bias.zero_()

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            count = index.shape[1]
            position = torch.arange(count, device=index.device)
            mask = torch.ones(count, device=device) + torch.zeros_like(position, device=device)
            scale = torch.full((count,), 2.0, device=index.device).to(device)
            moved = index.to(device).to(device=device, dtype=torch.float32)
            if index.is_cuda:
                moved = moved + 1000
            extra = torch.tensor([1.0], device=device) + torch.as_tensor(0.5, device=device)
            with torch.autocast(torch.device(device).type, enabled=False):
                return self.linear(moved) * scale + position + mask + extra + index.new_zeros(count, device=device)

    return Net()


INPUT = torch.arange(8).reshape(2, 4)
EXPECTED = on("cpu")(INPUT).detach()


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
@pytest.mark.parametrize("primed", [False, True], ids=["first", "primed"])
def test_one_graph_without_breaks(device: str, primed: bool) -> None:
    torch._dynamo.reset()
    if primed:  # Dynamo has made its tables before the mode is entered
        torch.compile(lambda x: torch.zeros(2, device=x.device) + x.to("cpu"), backend="eager")(torch.ones(2))
        torch._dynamo.reset()
    with pt.cuda_compat("cpu") as mode:
        net = on(device).cuda()
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(INPUT.cuda()), EXPECTED)
        traced = {entry.construct: entry.count for entry in mode.recorder.entries()}
        compiled(INPUT)
        assert {entry.construct: entry.count for entry in mode.recorder.entries()} == traced  # nothing runs again


@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler, and there is none here")
def test_inductor(mode: cuda_compat) -> None:
    compiled = torch.compile(on("cuda"), mode="max-autotune-no-cudagraphs", fullgraph=True)
    assert torch.allclose(compiled(INPUT.cuda()), EXPECTED)
    assert ("redirected", "torch.compile", "inductor") in {(e.kind, e.construct, e.detail) for e in mode.recorder.entries()}


def test_modes_that_mean_cuda_graphs_are_left_out_and_reported(mode: cuda_compat) -> None:
    compiled = torch.compile(lambda x: x + 1, mode="reduce-overhead")
    assert callable(compiled)
    torch.compile(lambda x: x, options={"triton.cudagraphs": True, "max_autotune": False})
    torch.compile(lambda x: x, backend="cudagraphs")
    changed = {entry.construct: entry.detail for entry in mode.recorder.entries() if entry.kind == "changed"}
    assert set(changed) == {"torch.compile(mode=)", "torch.compile(options=)", "torch.compile(backend='cudagraphs')"}
    assert "CUDA graphs" in changed["torch.compile(mode=)"]


def test_decorator_and_module_method(mode: cuda_compat) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2, device="cuda")

    assert add(torch.ones(2)).tolist() == [2.0, 2.0]
    net = on("cuda")
    net.compile(backend="eager", fullgraph=True)
    assert torch.equal(net(INPUT), EXPECTED)


def test_questions_to_torch_cuda_do_not_break_the_graph(mode: cuda_compat) -> None:
    def ask(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0:
            torch.cuda.synchronize()
            return x + 1
        return x

    assert torch.compile(ask, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 1.0


def test_export(mode: cuda_compat) -> None:
    program = torch.export.export(on("cuda"), (INPUT,))
    assert torch.equal(program.module()(INPUT), EXPECTED)
    devices = {node.kwargs["device"] for node in program.graph.nodes if "device" in node.kwargs}
    assert {str(device) for device in devices} == {"cpu"}


# --- TorchScript ------------------------------------------------------------------------------------------------------------


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, word: str) -> torch.Tensor:
        if word == "cuda":  # a string that is no device
            x = x + 1
        return self.inner(x.to("cuda")) + torch.zeros(2, device=torch.device("cuda:0")) + helper(2)


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cuda() * torch.full([2], 3.0, device="cuda")


def helper(n: int) -> torch.Tensor:
    return torch.ones(n, device="cuda")


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        return torch.zeros(n, device=x.device) + torch.as_tensor(x).to(torch.float64) + torch.rand_like(x) * 0


def operations(scripted: torch.jit.ScriptModule) -> list[str]:
    """A graph's nodes without the places in the source and the numbers of names."""
    return [re.sub(r"%[\w.]+", "%", str(node).split("#")[0].strip()) for node in scripted.inlined_graph.nodes()]


def test_a_plain_function_gives_the_same_graph() -> None:
    outside = operations(torch.jit.script(Plain()))
    with pt.cuda_compat("cpu"):
        assert operations(torch.jit.script(Plain())) == outside
    x = torch.ones(2)
    traced = operations(torch.jit.trace(Plain(), x))
    with pt.cuda_compat("cpu"):
        assert operations(torch.jit.trace(Plain(), x)) == traced
    assert len(outside) > 8 and len(traced) > 8


def test_device_constants_are_translated_and_strings_are_not(mode: cuda_compat) -> None:
    scripted = torch.jit.script(Scripted())
    assert scripted(torch.ones(2), "cuda").tolist() == [7.0, 7.0]
    assert scripted(torch.ones(2), "cpu").tolist() == [4.0, 4.0]
    assert "cuda" in scripted.code  # the word
    kinds = {entry.construct for entry in mode.recorder.entries()}
    assert kinds == {"TorchScript device constant", "TorchScript Tensor.cuda"}


def test_a_traced_function(mode: cuda_compat) -> None:
    traced = torch.jit.trace(lambda x: x.to("cuda") + torch.ones(2, device="cuda"), torch.ones(2))
    assert traced(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert not any("cuda" in line for line in operations(traced))


def test_a_file_made_for_cuda_is_loaded() -> None:
    saved = io.BytesIO()
    torch.jit.save(torch.jit.script(Scripted()), saved)
    with pt.cuda_compat("cpu"):
        for where in (None, "cuda", torch.device("cuda:0"), "cpu"):
            saved.seek(0)
            loaded = torch.jit.load(saved, map_location=where)
            if where != "cpu":
                # The helper is a function of the file's own, whose graph is reached only where it is inlined.
                assert loaded.inner(torch.ones(2)).tolist() == [3.0, 3.0]


def test_what_was_compiled_outside_keeps_its_devices() -> None:
    function, module = torch.jit.script(helper), torch.jit.script(Inner())
    code = function.code, module.code
    with pt.cuda_compat("cpu"):
        assert torch.jit.script(helper)(2).tolist() == [1.0, 1.0]
        assert torch.jit.script(Inner())(torch.ones(2)).tolist() == [3.0, 3.0]
    assert (function.code, module.code) == code
    assert (torch.jit.script(helper).code, torch.jit.script(Inner()).code) == code


def test_script_takes_names_from_where_it_is_called(mode: cuda_compat) -> None:
    @torch.jit.script
    class Pair:  # classes take the names in their source from the frame of the caller
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x + torch.ones(2, device="cuda")

    assert Pair(torch.ones(2)).x.tolist() == [2.0, 2.0]

    def generator(g: torch.Generator, device: torch.device) -> torch.Tensor:
        return torch.rand([2], generator=g, device=device)

    expected = torch.rand(2, generator=torch.Generator().manual_seed(1))
    found = torch.jit.script(generator)(torch.Generator("cuda").manual_seed(1), torch.device("cpu"))
    assert torch.equal(found, expected)
