"""TorchScript: device constants inside compiled graphs.

A scripted function holds the devices of its source as constants of the type Device, and strings as constants of the type str,
so the devices can be told apart and translated without touching a string. They are translated in the graph, right after
compiling or loading and before the first run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.jit import _recursive

from portable.compat.patching import Patches
from portable.compat.target import SOURCE, Target

_CONSTANT = "prim::Constant"


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Replace torch.jit.script and torch.jit.load."""
    # PyTorch compiles each function and each module's code once. What it compiles while the mode is on is kept apart from what
    # it compiled before and will compile afterwards, whose devices stay.
    patches.set(_recursive, "concrete_type_store", _recursive.ConcreteTypeStore())
    for cache in ("_jit_caching_layer", "_jit_function_overload_caching"):
        patches.set(torch.jit._state, cache, WeakKeyDictionary())
    unit: Any = torch.jit._state._python_cu
    functions = unit.get_functions
    known = len(functions())

    script = torch.jit.script

    @functools.wraps(script)
    def new_script(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
        nonlocal known
        made = script(obj, optimize, _frames_up + 1, *args, **kwargs)
        compiled = functions()
        _translate((function.graph for function in compiled[known:]), target())
        known = len(compiled)
        _translate(_methods(made), target())
        return made

    patches.set(torch.jit, "script", new_script)
    load = torch.jit.load

    @functools.wraps(load)
    def new_load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        here = target()
        # Without a place, the tensors of a file that was saved on a GPU would go back there.
        where = here.device(SOURCE if map_location is None else map_location, "torch.jit.load")
        made = load(f, where, *args, **kwargs)
        _translate(_methods(made), here)
        return made

    patches.set(torch.jit, "load", new_load)


def _methods(made: Any) -> Iterable[Any]:
    """The graphs of a module's methods, its submodules' included."""
    if isinstance(made, torch.jit.ScriptModule):
        for module in made.modules():
            compiled: Any = module._c
            for name in compiled._method_names():
                yield compiled._get_method(name).graph


def _translate(graphs: Iterable[Any], here: Target) -> None:
    for graph in graphs:
        for node in graph.findAllNodes(_CONSTANT, True):
            if node.output().type().kind() == "DeviceObjType" and node.hasAttribute("value"):
                device = node.s("value")
                if here.is_source(device):
                    node.s_("value", str(here.device(device, "TorchScript device constant")))
        for node in graph.findAllNodes("aten::cuda", True):
            _as_to(graph, node, str(here.device(SOURCE, "TorchScript Tensor.cuda")))
        graph.lint()


def _as_to(graph: Any, node: Any, device: str) -> None:
    """Replace ``aten::cuda(x)`` by ``aten::to(x, device, dtype=None, non_blocking=False, copy=False)``."""

    def constant(kind: Any, set_value: Callable[[Any], Any]) -> Any:
        made = graph.create(_CONSTANT, 1)
        set_value(made)
        made.output().setType(kind)
        made.insertBefore(node)
        return made.output()

    where = constant(torch._C.DeviceObjType.get(), lambda made: made.s_("value", device))
    nothing = constant(torch._C.NoneType.get(), lambda made: None)
    no = constant(torch._C.BoolType.get(), lambda made: made.i_("value", 0))
    to = graph.create("aten::to", [next(iter(node.inputs())), where, nothing, no, no], 1)
    to.output().setType(node.output().type())
    to.insertBefore(node)
    node.output().replaceAllUsesWith(to.output())
    node.destroy()
