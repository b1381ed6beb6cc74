"""The CPU backend: the baseline of every machine, with real values where a CPU has them."""

from __future__ import annotations

from portable.backend import Backend
from portable.hookspecs import hookimpl


@hookimpl
def portable_backend() -> Backend:
    from portable_cpu.backend import CpuBackend

    return CpuBackend()
