"""`pt.optimizer_options`: which of PyTorch's optimizer implementations to ask for."""

from __future__ import annotations

from typing import Any

import torch

from portable.errors import ConfigurationError
from portable.selection import active
from portable.spec import OptimizerSpec

DEFAULT = OptimizerSpec({}, "PyTorch's own default: the for-each implementation where the device has it, else a loop")


def explain_optimizer(name: str) -> OptimizerSpec:
    """The options for an optimizer class and why.

    Args:
        name: name of a class in torch.optim ("AdamW").

    Raises:
        ConfigurationError: torch.optim has no such class.
    """
    known = sorted(key for key, value in vars(torch.optim).items() if _is_optimizer(value))
    if name not in known:
        raise ConfigurationError(
            f"optimizer {name!r} was asked for, but torch.optim has {', '.join(known)}. Use one of these names "
            "(they are case-sensitive), or pass no options to an optimizer of your own."
        )
    return active().spec.optimizers.get(name, DEFAULT)


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def optimizer_options(name: str) -> dict[str, Any]:
    """Constructor options (``fused``, ``foreach``) that are correct and not slower on the active backend.

    Use as ``torch.optim.AdamW(parameters, **pt.optimizer_options("AdamW"))``.

    Args:
        name: name of a class in torch.optim.

    Raises:
        ConfigurationError: torch.optim has no such class.
    """
    return dict(explain_optimizer(name).options)
