"""NVIDIA and AMD GPUs: torch.cuda (AMD's ROCm builds of PyTorch use the same names)."""

from __future__ import annotations

from portable.backend import Backend
from portable.hookspecs import hookimpl


@hookimpl
def portable_backend() -> Backend:
    from portable_cuda.backend import CudaBackend

    return CudaBackend()
