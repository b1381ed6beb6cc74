"""Tensors that are made from other tensors, kept until those change, within a bound on memory."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

BYTES = 256 * 2**20
ENTRIES = 256

_entries: OrderedDict[tuple[Any, ...], tuple[tuple[tuple[Any, int], ...], Any, int]] = OrderedDict()
_lock = threading.Lock()
_total = 0


def kept(key: tuple[Any, ...], owners: Sequence[Tensor], build: Callable[[], T]) -> T:
    """What ``build`` makes, made once for a key and for owners that have not changed since.

    Args:
        key: what is made, and for which sizes and device.
        owners: the tensors it is made from, told apart by identity and version; none of them is kept alive.
        build: makes a tensor, or None, or anything with an ``nbytes``.

    Nothing is kept under torch.compile, while another mode watches PyTorch's operators (fake tensors are no numbers), and for
    owners whose changes cannot be seen: those that require a gradient and those made in inference mode.
    """
    if watched() or any(_changing(owner) for owner in owners):
        return build()
    full, roots = (*key, *map(_identity, owners)), tuple(map(_root, owners))
    found = _entries.get(full)
    if found is not None and all(r() is t and v == t._version for t, (r, v) in zip(roots, found[0], strict=True)):
        return found[1]  # type: ignore[no-any-return]
    # A tensor of inference mode could not be used in training later.
    with torch.inference_mode(False), torch.no_grad():
        made = build()
    _keep(full, tuple((weakref.ref(root), root._version) for root in roots), made)
    return made


def watched() -> bool:
    """Whether tensors may be no numbers: torch.compile traces, another mode sees operators, or functorch transforms them."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
    )


def _root(owner: Tensor) -> Tensor:
    """The tensor itself, or what it is a view of: views are made anew at each call, and change with their base."""
    base = owner._base if owner._is_view() else None
    return owner if base is None else base


def _identity(owner: Tensor) -> Any:
    root = _root(owner)
    return id(owner) if root is owner else (id(root), owner.storage_offset(), owner.shape, owner.stride(), owner.dtype)


def _changing(owner: Tensor) -> bool:
    return owner.is_inference() or (owner.requires_grad and torch.is_grad_enabled())


def _keep(full: tuple[Any, ...], owners: tuple[tuple[Any, int], ...], made: Any) -> None:
    global _total
    size = int(getattr(made, "nbytes", 0))
    with _lock:
        before = _entries.pop(full, None)
        _total -= before[2] if before else 0
        _entries[full] = (owners, made, size)
        _total += size
        # What was made longest ago goes first; what is too large for the bound alone is not kept at all.
        while _entries and (_total > BYTES or len(_entries) > ENTRIES):
            _, (_, _, freed) = _entries.popitem(last=False)
            _total -= freed


def held() -> int:
    """Bytes that are kept."""
    return _total


def forget() -> None:
    """Keep nothing."""
    global _total
    with _lock:
        _entries.clear()
        _total = 0
