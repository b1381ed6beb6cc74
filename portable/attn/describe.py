"""From arguments to a request: what the choice of a path depends on."""

from __future__ import annotations

import torch

from portable import plugins
from portable.attn.canonical import Canonical
from portable.attn.path import Arguments
from portable.attn.request import MaskTraits, Request
from portable.backend import Backend
from portable.errors import ConfigurationError
from portable.selection import active


def traits(mask: Canonical, grad: bool = False) -> MaskTraits:
    """What a path may ask of a mask."""
    bias = mask.slopes is not None or mask.additive is not None
    shift = mask.keys - mask.queries
    window = (mask.low, mask.high) if mask.only_band and mask.banded else None
    return MaskTraits(
        mask.kind,
        mask.trivial,
        mask.causal,
        mask.only_band and mask.high == shift and mask.low <= 1 - mask.queries,
        mask.only_band,
        window,
        not bias,
        bias,
        mask.additive is not None and mask.additive.requires_grad and grad,
        (mask.dense is not None or mask.additive is not None)
        and sum(t is not None for t in mask.tensors) == 1
        and not mask.banded,
        all(t is None or t.dim() < 3 or t.shape[-3] == 1 for t in (mask.dense, mask.additive)) and mask.slopes is None,
        _may_be_empty(mask),
    )


def _may_be_empty(mask: Canonical) -> bool:
    if all(t is None for t in (mask.lengths, mask.ids, mask.prefix, mask.dense, mask.additive)):
        return mask.high < 0 or mask.queries - 1 + mask.low >= mask.keys or mask.low > mask.high
    return True


def request_for(a: Arguments, dims: int, backend: Backend) -> Request:
    """The request that arguments make of a backend.

    Args:
        dims: dimensions of the inputs as they were given.
    """
    query, key, value = a.query, a.key, a.value
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    learned = torch.is_grad_enabled() and a.mask.additive is not None and a.mask.additive.requires_grad
    return Request(
        query.device.type,
        query.shape[2],
        key.shape[2],
        query.shape[3],
        value.shape[3],
        str(query.dtype)[6:],
        query.shape[0],
        query.shape[1],
        key.shape[1],
        generation_of(backend, query.device),
        dims,
        traits(a.mask, learned),
        a.dropout,
        grad or learned,
        all(t.stride(-1) == 1 for t in (query, key, value)),
        torch.are_deterministic_algorithms_enabled(),
        a.lse,
        torch.compiler.is_compiling(),
        off=switched_off(),
    )


def switched_off() -> tuple[bool, bool, bool]:
    """Whether ``torch.nn.attention.sdpa_kernel`` or its like has switched off PyTorch's flash, efficient and cuDNN kernels.

    Dynamo cannot trace the question: a compiled call is planned with all of them on.
    """
    if torch.compiler.is_compiling():
        return False, False, False
    return (
        not torch.backends.cuda.flash_sdp_enabled(),
        not torch.backends.cuda.mem_efficient_sdp_enabled(),
        not torch.backends.cuda.cudnn_sdp_enabled(),
    )


def backend_of(device: torch.device) -> Backend:
    """The backend that serves tensors on a device: the one in use, or else the first that has the device.

    Raises:
        ConfigurationError: none has.
    """
    if torch.compiler.is_compiling():
        _known_before(device.type, device.index or 0)
    return _serving(device)


def _serving(device: torch.device) -> Backend:
    chosen = active()
    if chosen.spec.device_type == device.type:
        return chosen
    for backend in plugins.registry().backends.values():
        if backend.spec.device_type == device.type and backend.spec.name != "generic":
            return backend
    raise ConfigurationError(f"attention was given tensors on {device}, a device that no backend here has.")


def generation_of(backend: Backend, device: torch.device) -> str:
    """Name of a device's generation, "" if it is not known."""
    key = (backend.spec.name, device.index or 0)
    if key not in _generations:
        found = backend.generation(device.index or 0)
        _generations[key] = found.name if found else ""
    return _generations[key]


_generations: dict[tuple[str, int], str] = {}


def _known_before(device_type: str, index: int) -> None:
    """The first call of a process may be a compiled one, and Dynamo cannot trace how backends are found and devices asked."""
    device = torch.device(device_type, index)
    generation_of(_serving(device), device)


# All that torch.compiler.assume_constant_result does, which would load Dynamo: it is run while a call is traced.
_known_before._dynamo_marked_constant = True  # type: ignore[attr-defined]
