"""Leaving pt.cuda_compat: every attribute is the same object again, and nothing in PyTorch remembers a replacement."""

from __future__ import annotations

import functools
import gc
import multiprocessing.spawn
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import portable as pt
from portable.compat import engine

pytestmark = pytest.mark.usefixtures("on_cpu")


def snapshot() -> dict[tuple[str, ...], int]:
    """The identity of every attribute of every loaded module of PyTorch, and of every class in them."""
    found: dict[tuple[str, ...], int] = {}
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torch"}
    modules["multiprocessing.spawn"] = multiprocessing.spawn
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            found[name, key] = id(value)
            if isinstance(value, type):
                for inner, attribute in list(vars(value).items()):
                    found[name, key, inner] = id(attribute)
    return found


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """What the mode imports by itself is loaded, so that snapshots compare."""
    with pt.cuda_compat("cpu"):
        pass


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
    with torch.device("cuda"):
        torch.zeros(1)


def replacements() -> list[Any]:
    return [vars(owner)[name] for owner, name in engine._patches.owners()]


def test_every_attribute_is_the_same_object_again() -> None:
    work_before = snapshot()
    with pt.cuda_compat("cpu"):
        inside = snapshot()
    changed = {key for key in inside if work_before.get(key) != inside[key]}
    assert len(changed) > 250
    assert snapshot() == work_before


def test_nothing_in_pytorch_remembers_a_replacement() -> None:
    torch._dynamo.reset()
    with pt.cuda_compat("cpu"):
        made = replacements()
        work()
    gc.collect()
    identities = {id(item) for item in made}
    assert list(remembered(identities)) == []


def remembered(identities: set[int]) -> Iterator[str]:
    """Where in PyTorch's modules, classes, closures and caches one of these objects is held."""

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
        if name.split(".")[0] != "torch":
            continue
        for key, value in list(vars(module).items()):
            if key != "__builtins__" and holds(value):
                yield f"{name}.{key}"
            if isinstance(value, type):
                yield from (f"{name}.{key}.{inner}" for inner, item in list(vars(value).items()) if holds(item, 3))
            if isinstance(value, FunctionType):
                cells = [cell.cell_contents for cell in value.__closure__ or () if cell != type(cell)()]
                if any(holds(cell, 3) for cell in cells):
                    yield f"closure of {name}.{key}"


def test_compiling_and_scripting_go_on_afterwards() -> None:
    with pt.cuda_compat("cpu"):
        work()

    def step(x: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_available():
            x = x + 1
        return torch.zeros_like(x) + torch.arange(2, device=x.device)

    expected = step(torch.ones(2))
    assert torch.equal(torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2)), expected)
    assert torch.equal(torch.jit.script(lambda_free)(3), torch.zeros(3))
    with torch.device("meta"):
        assert torch.zeros(1).device.type == "meta"


def lambda_free(n: int) -> torch.Tensor:
    return torch.zeros(n, device="cpu")


def test_what_is_compiled_inside_is_traced_anew_outside() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device, on which the function runs outside as well")

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2, device="cuda")

    with pt.cuda_compat("cpu"):
        compiled = torch.compile(step, backend="eager")
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(Exception, match=r"(?i)cuda"):
        compiled(torch.ones(2))
    with pt.cuda_compat("cpu"):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_nested_and_again() -> None:
    before = snapshot()
    mode = pt.cuda_compat("cpu")
    with mode:
        inner = pt.cuda_compat("cpu")
        with inner, mode:
            assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.ones(1, device="cuda").device.type == "cpu"
        assert id(torch.zeros) != before["torch", "zeros"]
    assert snapshot() == before
    with mode:
        torch.ones(1, device="cuda")
    assert snapshot() == before
    assert {entry.construct: entry.count for entry in mode.recorder.entries()} == {"torch.ones": 2, "torch.zeros": 1}
    assert inner.recorder.entries() == []


def test_an_exception_inside() -> None:
    before = snapshot()
    with pytest.raises(ZeroDivisionError), pt.cuda_compat("cpu"):
        raise ZeroDivisionError
    assert snapshot() == before


def test_an_exception_while_entering(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @staticmethod
        def install(patches: Any, target: Any) -> None:
            raise RuntimeError("broken")

    before = snapshot()
    monkeypatch.setattr(engine, "_AREAS", (*engine._AREAS, Broken))
    with pytest.raises(RuntimeError, match="broken"):
        pt.cuda_compat("cpu").__enter__()
    assert snapshot() == before
    with pytest.raises(IndexError):
        engine.current()


def test_blocks_of_several_threads_need_not_nest() -> None:
    before = snapshot()
    entered, leave = threading.Event(), threading.Event()
    found: list[str] = []

    def other() -> None:
        with pt.cuda_compat("cpu"):
            entered.set()
            leave.wait(20)
            found.append(torch.zeros(1, device="cuda").device.type)

    thread = threading.Thread(target=other)
    with pt.cuda_compat("cpu"):
        thread.start()
        assert entered.wait(20)
    leave.set()  # the first block has been left, the second one goes on
    thread.join()
    assert found == ["cpu"]
    assert snapshot() == before


def test_running_threads_see_the_mode_at_once() -> None:
    go, results = threading.Event(), []

    def loop() -> None:
        go.wait(20)
        results.append(torch.ones(1).cuda().device.type)

    thread = threading.Thread(target=loop)
    thread.start()
    with pt.cuda_compat("cpu"):
        go.set()
        thread.join()
    assert results == ["cpu"]


def test_the_backend_chosen_before_is_active_again(plugged: Callable[..., None]) -> None:
    import fakes

    plugged(fakes.Fake(fakes.spec(process_group="gloo")))
    with pt.use("fake"):
        with pt.cuda_compat("cpu"):
            assert pt.selection.active_name == "cpu"
        assert pt.selection.active_name == "fake"


def test_on_cuda_nothing_is_replaced(plugged: Callable[..., None]) -> None:
    import fakes

    plugged(fakes.Fake(fakes.spec("cuda", "cuda")))
    before = snapshot()
    with pt.cuda_compat("cuda") as mode:
        assert snapshot() == before
        assert not mode.replaces


class Labelled(torch.Tensor):
    """A subclass that compares functions by identity, as torchvision's do."""

    KEPT = (torch.Tensor.to, torch.Tensor.new_zeros)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func in cls.KEPT else result


def test_a_tensor_subclass_from_before_recognises_the_functions() -> None:
    tensor = torch.zeros(2).as_subclass(Labelled)
    with pt.cuda_compat("cpu"):
        assert type(tensor.to("cuda")) is Labelled
        assert type(tensor.cuda()) is Labelled  # a move like any other
        assert type(tensor.new_zeros(2, device="cuda")) is Labelled
        assert type(torch.zeros_like(tensor, device="cuda")) is torch.Tensor


def test_a_tensor_subclass_imported_inside_recognises_them_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "labelled_inside.py").write_text(
        "import torch\n"
        "class Inside(torch.Tensor):\n"
        "    @classmethod\n"
        "    def __torch_function__(cls, func, types, args=(), kwargs=None):\n"
        "        with torch._C.DisableTorchFunctionSubclass():\n"
        "            result = func(*args, **(kwargs or {}))\n"
        "        return result.as_subclass(cls) if func in (torch.Tensor.to, torch.zeros_like) else result\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pt.cuda_compat("cpu"):
        from labelled_inside import Inside  # type: ignore[import-not-found]

        tensor = torch.zeros(2).as_subclass(Inside)
        assert type(tensor.to("cuda")) is Inside
        assert type(torch.zeros_like(tensor, device="cuda")) is Inside
        assert type(tensor.new_zeros(2, device="cuda")) is torch.Tensor
