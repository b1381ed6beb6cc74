"""torch.compile on the emulated device: Dynamo's graphs, run operator by operator, counted as the compiler would see them.

A graph costs one compilation however many operators it has. Its backward pass belongs to it: PyTorch numbers the nodes of the
autograd graph in the order of the forward pass, so an operator of the backward pass can be told to come from the graph.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import importlib.abc
import importlib.util
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from portable.errors import ConfigurationError
from portable.rehearsal import sources
from portable.rehearsal.device import Device

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')


class _ByLine(torch.fx.Interpreter):
    """Runs a graph node by node, so that what an operator does is told of the line that it was traced from."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self._lines = {node: _line(node) for node in graph.graph.nodes}

    def run_node(self, n: torch.fx.Node) -> Any:
        before = sources.graph.line
        sources.graph.line = self._lines[n] or before
        try:
            return super().run_node(n)
        finally:
            sources.graph.line = before


def _line(node: torch.fx.Node) -> str:
    frames = [m for m in _FRAME.finditer(node.meta.get("stack_trace") or "") if not sources.is_internal(m["file"])]
    return sources.named(frames[-1]["file"], int(frames[-1]["line"])) if frames else ""


class Compiler:
    """The Dynamo backend of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rule = device.profile.compile.value
        self._depth = threading.local()
        self._lock = threading.Lock()
        self._starts: list[int] = []  # of the graphs' runs: autograd sequence numbers, ascending, each with its end in _ends
        self._ends: list[int] = []
        self._names: dict[int, str] = {}  # Dynamo's number of a code object to its place
        device.observer.in_graph = self.in_graph

    def in_graph(self) -> bool:
        """Whether this thread runs an operator of a graph, or of the backward pass of one."""
        if getattr(self._depth, "value", 0):
            return True
        if not self._starts:
            return False
        node = torch._C._current_autograd_node()
        if node is None:
            return False
        number = node._sequence_nr()
        place = bisect.bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._ends[place]

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self._depth.value = getattr(self._depth, "value", 0) + 1
        start = torch._C._autograd._get_sequence_nr()
        try:
            yield
        finally:
            self._depth.value -= 1
            end = torch._C._autograd._get_sequence_nr()
            if end > start:
                with self._lock:
                    self._remember(start, end)

    def _remember(self, start: int, end: int) -> None:
        # Threads have counters of their own, so a later run may have smaller numbers.
        place = bisect.bisect_right(self._starts, start)
        self._starts.insert(place, start)
        self._ends.insert(place, end)
        if len(self._starts) > 100_000:  # graphs of long ago
            del self._starts[:50_000], self._ends[:50_000]

    def __call__(
        self, graph: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None, **kwargs: Any
    ) -> Callable[..., Any]:
        """Take a graph from Dynamo.

        Raises:
            ConfigurationError: an input has a dynamic shape, or an option is not known.
        """
        options = options or {}
        unknown = sorted(set(options) - set(self._rule.options))
        if unknown:
            raise ConfigurationError(
                f"torch.compile(backend={self._rule.backend!r}) was given the options {unknown}, but knows only "
                f"{', '.join(self._rule.options) or 'none'}. Leave them out."
            )
        if kwargs.get("mode") not in (None, "default") and self._rule.ignored_modes:
            warnings.warn(f"backend {self._rule.backend!r} ignores mode={kwargs['mode']!r}", stacklevel=2)
        if not self._rule.dynamic:
            self._refuse_dynamic(graph)
        context = torch._guards.CompileContext.current_compile_id()
        name, again = self._name(graph, context)
        self._device.recorder.graph(name, first=not again)
        interpreter = _ByLine(graph)

        def compiled(*args: Any) -> Any:
            with self._running():
                return copy.copy(interpreter).run(*args)  # a run's values are attributes: each has its own

        return compiled

    def _name(self, graph: torch.fx.GraphModule, context: Any) -> tuple[str, bool]:
        """The function's place, and whether the same code had a graph before (Dynamo numbers the graphs of one code object)."""
        place = "function"
        for node in graph.graph.nodes:
            found = _FRAME.search(node.meta.get("stack_trace") or "")
            if found:
                place = f"{found['name']} ({found['file']}:{found['line']})"
                break
            modules = list((node.meta.get("nn_module_stack") or {}).values())
            if modules:
                place = f"{modules[0][0]} ({getattr(modules[0][1], '__qualname__', modules[0][1])})"
                break
        if context is None:
            return place, False
        # A recompilation may begin at another operator: the first name that the code object got stays.
        place = self._names.setdefault(context.frame_id, place)
        return place, context.frame_compile_id > 0

    def _refuse_dynamic(self, graph: torch.fx.GraphModule) -> None:
        for node in graph.graph.nodes:
            if node.op != "placeholder":
                continue
            value = node.meta.get("example_value")
            dynamic = isinstance(value, torch.SymInt) or (
                isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
            )
            if dynamic:
                shape = getattr(value, "shape", value)
                self._device.recorder.refuse(
                    "torch.compile",
                    ConfigurationError(
                        f"torch.compile(backend={self._rule.backend!r}) met the dynamic shape {shape} of {node.name!r}: the "
                        "compiler needs static shapes. Pass dynamic=False, and pad or bucket inputs whose size changes."
                    ),
                )


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls a function when a module has been imported: importing Dynamo takes seconds, which few programs need to spend."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then(module: Any) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec


def register(device: Device) -> Compiler:
    """Give Dynamo the device's backend, now or when Dynamo is imported."""
    made = Compiler(device)

    def introduce() -> None:
        from torch._dynamo import register_backend, trace_rules

        register_backend(made, name=device.profile.compile.value.backend)
        trace_rules.add(__package__)  # the device's own kernels are not to be traced

    if "torch._dynamo" in sys.modules:
        introduce()
    else:
        sys.meta_path.insert(0, _WhenImported("torch._dynamo", introduce))
    return made
