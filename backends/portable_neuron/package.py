"""A stand-in for the module `torch_neuronx` beside the emulated device, for programs that import it.

It has torch.neuron's functions and the package's tracking of operators (pre-release sources: ``drop`` in
`portable_neuron.facts`); NKI kernels and the profiler are not in it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections import Counter
from types import ModuleType

from portable.rehearsal import Rehearsal

NAME = "torch_neuronx"


class _Tracking:
    """Operators since the last `clear`."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._recorder = rehearsal.recorder
        self.clear()

    def _fallbacks(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for (name, _), count in self._recorder.fallbacks.items():
            total[name] += count
        return total

    def clear(self) -> None:
        """Forget what ran."""
        self._executed_before, self._fallbacks_before = self._recorder.ops, self._fallbacks()

    def fallbacks(self) -> list[str]:
        """Operators that the CPU ran."""
        return sorted(self._fallbacks() - self._fallbacks_before)

    def executed(self) -> list[str]:
        """Operators that the device ran."""
        return sorted((self._recorder.ops - self._executed_before).keys() - set(self.fallbacks()))


def stand_in(rehearsal: Rehearsal) -> ModuleType | None:
    """Make ``import torch_neuronx`` work; None if a package of that name is installed (it is left alone)."""
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        return None
    made = ModuleType(NAME, f"Emulated by portable: {rehearsal.profile.title}. Not the vendor's package.")
    made.__spec__ = importlib.machinery.ModuleSpec(NAME, None, origin="emulated by portable")
    tracking = _Tracking(rehearsal)
    functions = {name: getattr(rehearsal.module, name) for name in rehearsal.profile.surface.value}
    functions |= {
        "clear_op_tracking": tracking.clear,
        "get_fallback_ops": tracking.fallbacks,
        "get_executed_ops": tracking.executed,
    }
    for name, function in functions.items():
        setattr(made, name, function)
    sys.modules[NAME] = made
    return made
