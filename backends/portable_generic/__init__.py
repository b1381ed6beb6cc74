"""The backend of every device that PyTorch knows and no other plugin serves: Intel XPU, Apple MPS, Intel Gaudi ..."""

from __future__ import annotations

from portable.backend import Backend
from portable.hookspecs import hookimpl


@hookimpl
def portable_backend() -> Backend:
    from portable_generic.backend import GenericBackend

    return GenericBackend()
