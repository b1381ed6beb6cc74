"""The CPU as a backend."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from portable.backend import Backend
from portable.spec import Availability, Generation
from portable.support import Support
from portable_cpu import host, table
from portable_cpu.facts import GENERATIONS, SPEC

if TYPE_CHECKING:
    from portable.attn.path import Path as AttentionPath
    from portable.attn.request import Request
    from portable.switches import Control

# First match wins: capability of torch.cpu.get_capabilities to the generation it means.
_BY_CAPABILITY = (
    ("amx_bf16", "amx"),
    ("avx512_bf16", "avx512_bf16"),
    ("avx512_f", "avx512"),
    ("avx2", "avx2"),
    ("bf16", "arm_bf16"),
)

_COMPILERS = {"darwin": "clang++", "win32": "cl"}


class CpuBackend(Backend):
    """PyTorch's own CPU device. Always available."""

    spec = SPEC

    def probe(self) -> Availability:
        return Availability(True, f"{host.cpu_name()}, {host.usable_cores()} cores", device_count=1)

    def module(self) -> Any:
        return torch.cpu

    def support_changes(self) -> Mapping[str, Support]:
        return table.TABLE

    @cached_property
    def _generation(self) -> Generation:
        capabilities = host.capabilities()
        name = next((name for key, name in _BY_CAPABILITY if capabilities.get(key)), "baseline")
        return GENERATIONS[name]

    def generation(self, index: int = 0) -> Generation:
        return self._generation

    def device_name(self, index: int = 0) -> str:
        return host.cpu_name()

    def total_memory(self, index: int = 0) -> int:
        return host.machine_memory()[1]

    def precision_controls(self) -> Sequence[Control]:
        from portable_cpu.precision import controls

        return controls()

    def attention_paths(self, request: Request) -> Sequence[AttentionPath]:
        from portable_cpu.attention import PATHS

        return PATHS

    def compile_problem(self) -> str | None:
        """TorchInductor needs a C++ compiler and Python's header files (torch/_inductor/cpp_builder.py).

        It calls the one that CXX names, else exactly one that depends on the system (torch/_inductor/config.py, ``cpp.cxx``).
        """
        compiler = os.environ.get("CXX") or _COMPILERS.get(sys.platform, "g++")
        if not shutil.which(compiler):
            return f"no C++ compiler was found (looked for {compiler!r}); install one, or set CXX to the path of yours"
        header = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if not header.exists():
            return f"Python's header files are missing ({header.name} is not installed); install the python3-dev package"
        return None
