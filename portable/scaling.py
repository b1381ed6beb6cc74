"""The loss scaler that `pt.GradScaler` makes: PyTorch's, with one error of the fused SGD kept out.

PyTorch 2.13, torch/optim/sgd.py, ``_fused_sgd``: the first step of fused SGD with momentum allocates the momentum buffers
without filling them and leaves that to the kernel. If the scaler has found an overflow the kernel does nothing, the buffers
stay what the memory held, and the next step takes them for momentum: weights of 1e24 or NaN. A first step that overflows is the
rule in float16, where the scale starts at 65,536. (The unfused implementations are not called at all for such a step.)
"""

from __future__ import annotations

from typing import Any

import torch


class SkippedFirstStep(torch.amp.GradScaler):
    """A scaler that takes back the buffers of a first step which was skipped.

    It waits for the device in such steps only: when all have been taken once, `step` costs a loop over the parameter groups.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """See ``torch.amp.GradScaler.step``."""
        fresh = _without_momentum(optimizer) if self.is_enabled() else []
        result = super().step(optimizer, *args, **kwargs)
        if fresh and self._overflowed(optimizer):
            for parameter in fresh:
                optimizer.state[parameter].pop("momentum_buffer", None)
        return result

    def _overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(bool(value.item()) for value in found.values())


class GradScaler(SkippedFirstStep):
    """``torch.amp.GradScaler`` as `pt.GradScaler` makes it."""


def _without_momentum(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters of a fused SGD that are about to get their momentum buffer."""
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    fresh: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        if not group.get("fused") or not group.get("momentum"):
            continue
        for parameter in group["params"]:
            if optimizer.state.get(parameter, {}).get("momentum_buffer") is not None:
                break  # PyTorch takes a group's first step for all of its parameters at once
            if parameter.grad is not None:
                fresh.append(parameter)
    return fresh
