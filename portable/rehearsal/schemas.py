"""What an operator's schema tells: which arguments it writes, whether it makes views."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten


def overload(name: str) -> Any:
    """``add.Tensor`` or ``relu`` to the OpOverload of ATen.

    Raises:
        AttributeError: there is none (operators of TorchScript).
    """
    packet, _, rest = name.partition(".")
    return getattr(getattr(_aten, packet), rest or "default")


def mutates(operator: Any) -> bool:
    """Whether the operator writes one of its arguments."""
    return bool(operator._schema.is_mutable)


def makes_view(operator: Any) -> bool:
    """Whether an answer shares memory with an argument."""
    return any(ret.alias_info is not None and not ret.alias_info.is_write for ret in operator._schema.returns)


def written(operator: Any) -> tuple[tuple[int, str], ...] | None:
    """(position, name) of the arguments that the operator writes and answers; None if it answers new tensors."""
    schema = operator._schema
    if not schema.returns and schema.is_mutable:  # foreach and fused operators answer nothing
        return None
    answered = {
        alias
        for ret in schema.returns
        if ret.alias_info is not None and ret.alias_info.is_write
        for alias in ret.alias_info.after_set
    }
    if not answered:
        return None
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and answered & set(argument.alias_info.after_set)
    )
