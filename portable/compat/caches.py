"""What PyTorch remembers of the functions it finds under its own names.

These are tables that it makes once, when they are first needed. One made while the mode is on holds the replacements, and would
go on doing so afterwards; tests/test_cuda_compat_restore.py searches PyTorch for any that are missing here.
"""

from __future__ import annotations

import sys
from typing import Any

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


def clear() -> None:
    """Empty the caches of modules that are loaded."""
    for module, name in _CACHED:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if hasattr(found, "cache_clear"):
            found.cache_clear()


def restore(originals: dict[int, Any]) -> None:
    """Put the originals into tables that hold replacements.

    Args:
        originals: id of each replacement to what it stood for.
    """
    clear()
    for module, name, attribute in _TUPLES:
        owner = getattr(sys.modules.get(module), name, None)
        held = getattr(owner, attribute, None)
        if isinstance(held, tuple) and any(id(item) in originals for item in held):
            setattr(owner, attribute, tuple(originals.get(id(item), item) for item in held))
