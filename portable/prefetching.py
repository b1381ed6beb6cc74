"""`pt.prefetch`: batches on the device, copied while the previous batch is being computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_map

from portable.devices import DeviceLike
from portable.devices import device as checked_device
from portable.selection import active, call

Batch = TypeVar("Batch")


class prefetch(Generic[Batch]):
    """Iterate over a loader's batches with their tensors on the device.

    Where the backend gains by it (`BackendSpec.pin_memory`), batches go through pinned host memory, are copied with
    ``non_blocking=True`` on a stream of their own, and the next one is under way while the caller works on the present one.
    Elsewhere each batch is moved when it is its turn. Order and values are the loader's.

    Args:
        loader: any iterable of batches: tensors in tuples, lists, dicts, named tuples and what else torch.utils._pytree
            knows. Other objects with a ``to`` method (Hugging Face's BatchEncoding, PackedSequence) are moved by it, without
            overlap; everything else passes through. May be iterated again for each epoch if the loader can.
        device: where to, as in `pt.device`; the current device of the active backend by default.

    ``len(prefetch(loader))`` is ``len(loader)``. An exception of the loader comes out at the batch where it was raised.

    Raises:
        ConfigurationError, DeviceIndexError: there is no such device.
    """

    def __init__(self, loader: Iterable[Batch], device: DeviceLike = None) -> None:
        self.loader = loader
        self.device = None if device is None else checked_device(device)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        device = self.device or checked_device()
        overlapped = device.type != "cpu" and active().spec.pin_memory.value
        return _overlapped(self.loader, device) if overlapped else _plain(self.loader, device)


def _moves_itself(leaf: Any) -> bool:
    return callable(getattr(type(leaf), "to", None))


def _plain(loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    for batch in loader:
        yield tree_map(lambda leaf: leaf.to(device) if _moves_itself(leaf) else leaf, batch, is_leaf=_moves_itself)


def _overlapped(loader: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    side = call("Stream")(device=device)

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        host = leaf if leaf.device.type != "cpu" or leaf.is_pinned() else leaf.pin_memory()
        return host.to(device, non_blocking=True)

    def start(batch: Batch) -> Batch:
        with call("stream")(side):
            return tree_map(copy, batch, is_leaf=_moves_itself)

    def arrive(leaf: Any, stream: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf.to(device) if _moves_itself(leaf) else leaf
        if leaf.device == device:
            # Its memory belongs to the side stream; without this the allocator could hand it out again too early.
            leaf.record_stream(stream)
        return leaf

    def finish(batch: Batch) -> Batch:
        stream = call("current_stream")(device)
        stream.wait_stream(side)
        return tree_map(lambda leaf: arrive(leaf, stream), batch, is_leaf=_moves_itself)

    batches = iter(loader)
    waiting: list[Batch] = []
    while True:
        # The present batch is waited for before the next copy is queued, so that it does not wait for that copy too.
        ready = [finish(waiting.pop())] if waiting else []
        try:
            waiting.append(start(next(batches)))
        except StopIteration:
            yield from ready
            return
        except Exception:
            yield from ready  # the caller has the batches before the broken one
            raise
        yield from ready
