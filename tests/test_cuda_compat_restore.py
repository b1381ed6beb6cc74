"""Leaving pt.cuda_compat: every attribute is the same object again, and nothing in PyTorch remembers a replacement."""

from __future__ import annotations

import multiprocessing.spawn
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from compat_memory import remembered, replacements, work

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
    assert list(remembered(made)) == []


def test_nothing_imported_inside_remembers_one_either() -> None:
    """In a process of its own, where Dynamo, TorchInductor and the distributed packages are not loaded before."""
    script = Path(__file__).parent / "compat_memory.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "remembered: []"


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


def test_a_replacement_that_was_kept_is_the_original() -> None:
    with pt.cuda_compat("cpu"):
        zeros, full_like, autocast = torch.zeros, torch.full_like, torch.is_autocast_enabled
        to, pin = torch.Tensor.to, torch.Tensor.is_pinned
    x = torch.ones(2)
    assert zeros(2, device="cpu").tolist() == [0.0, 0.0]
    assert zeros(2, device="meta").device.type == "meta"
    assert to(x, "cpu") is x and to(x, torch.float64).dtype is torch.float64
    assert pin(x) is False
    assert full_like(x, 2.0, device="cpu").tolist() == [2.0, 2.0]
    assert autocast("cpu") is False
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda|nvidia"):
            zeros(2, device="cuda")


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
    assert engine.current() is engine._OFF


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


EARLY = """
import torch
from torch import zeros
import portable as pt

def plain():
    try:
        print(torch.zeros(1, device="cuda").device.type)
    except (AssertionError, RuntimeError) as error:  # a build without CUDA, one without a driver
        print(str(error).splitlines()[0])

plain()
with pt.cuda_compat("cpu"):
    (lambda: torch.cuda._lazy_init())()  # by hand: nothing to do
    try:
        zeros(1, device="cuda")
    except pt.UnsupportedError as error:
        print(error)
plain()
"""


def test_a_function_kept_from_before_is_named_and_spoils_nothing() -> None:
    """PyTorch remembers in C++ that CUDA has started; it must not be made to believe it."""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, inside, after = done.stdout.splitlines()
    assert "taken from torch before the mode was entered" in inside and "portable run" in inside
    assert after == before
