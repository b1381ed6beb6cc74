"""What PyTorch remembers of the functions it finds under its own names.

These are tables that it makes once, when they are first needed. One made while the mode is on would hold the replacements, and
go on doing so afterwards. They are therefore made before anything is replaced: Dynamo then traces through the replacements down
to the originals, which it knows. tests/test_cuda_compat_restore.py searches PyTorch for tables that are missing here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from portable.compat.patching import Patches
from portable.compat.target import Target

# Module and dotted name of functions with a cache that is simply made anew.
_CACHED = (
    ("torch.overrides", "get_ignored_functions"),
    ("torch.overrides", "get_testing_overrides"),
    ("torch.overrides", "_get_overridable_functions"),
    ("torch.overrides", "get_overridable_functions"),
    ("torch.utils._device", "_device_constructors"),
    ("torch._dynamo.trace_rules", "get_torch_obj_rule_map"),
    ("torch._dynamo.trace_rules", "get_tensor_method"),
    ("torch._dynamo.variables.torch", "get_overridable_functions"),
    ("torch._dynamo.variables.torch", "TorchInGraphFunctionVariable._get_handlers"),
)

# Module, class and attribute of tuples of functions that are made when their module is imported.
_TUPLES = (
    ("torch._inductor.codecache", "FxGraphHashDetails", "LIKE_FACTORY_TARGETS"),
    ("torch._functorch._aot_autograd.autograd_cache", "FxGraphHashDetails", "LIKE_FACTORY_TARGETS"),
)

# Module and name of tables keyed by functions, made when the module is imported.
_TABLES = (("torch._inductor.lowering", "lowerings"),)

_primed: list[tuple[Any, Any]] = []


def prime() -> None:
    """Make the tables, from the originals. Dynamo is loaded for it, as the first optimizer of a program does anyway."""
    importlib.import_module("torch._dynamo")
    _primed.clear()
    _primed.extend((function, function()) for function in _cached())


def _cached() -> Iterator[Any]:
    for module, name in _CACHED:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if hasattr(found, "cache_clear"):
            yield found


def install(patches: Patches, target: Callable[[], Target]) -> None:
    """Keep replacements out of tables that modules make when they are imported."""
    for module, *_ in (*_TUPLES, *_TABLES):
        patches.when_imported(module, lambda: _replace(patches.originals()))


def restore(originals: dict[int, Any]) -> None:
    """At the end: drop tables that were made meanwhile (torch._dynamo.reset() clears some).

    Args:
        originals: id of each replacement to what it stood for.
    """
    primed = dict(_primed)
    for function in _cached():
        if function not in primed or function() is not primed[function]:
            function.cache_clear()
    _primed.clear()
    _replace(originals)


def _replace(originals: dict[int, Any]) -> None:
    for module, name, attribute in _TUPLES:
        owner = getattr(sys.modules.get(module), name, None)
        held = getattr(owner, attribute, None)
        if isinstance(held, tuple) and any(id(item) in originals for item in held):
            setattr(owner, attribute, tuple(originals.get(id(item), item) for item in held))
    for module, name in _TABLES:
        table = getattr(sys.modules.get(module), name, {})
        for key in [key for key in table if id(key) in originals]:
            table[originals[id(key)]] = table.pop(key)
