"""Seeds of the vendor's operators that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

source: Callable[[], tuple[int, int]] | None = None
"""Answers (seed, offset) and advances the device's generator; set by the host runtime. None draws from the CPU's generator."""


def draw() -> tuple[int, int]:
    """A seed and an offset for one call."""
    if source is not None:
        return source()
    return int(torch.randint(2**31 - 1, (1,))), 0


def generator(seed: int, offset: int, part: int = 0) -> torch.Generator:
    """A generator that is a function of these, so that a backward pass can draw again what the forward pass drew.

    Args:
        seed, offset: see `draw`.
        part: which part of one call draws; other parts, and the calls behind this one, draw other numbers.
    """
    from portable_ascend.host_acl.device import mixed

    state = mixed(seed, offset)
    return torch.Generator().manual_seed(mixed(state, part) if part else state)
