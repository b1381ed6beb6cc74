"""Starting the rehearsal on the host runtime: kernels, counters, the stand-in for hccl."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from portable.rehearsal import Rehearsal, compiler, recurrent, sources
from portable.rehearsal.session import adopt
from portable_ascend.facts import generation_of
from portable_ascend.host_acl import attention, derivatives, hccl, hf32, kernels, special
from portable_ascend.host_acl.device import HostDevice
from portable_ascend.host_acl.profile import profile
from portable_ascend.host_acl.settings import Settings
from portable_ascend.host_acl.vendor import IN_PLACE, OPERATORS, draws


def start(settings: Settings) -> Rehearsal:
    """Let the CPU compute what torch_npu launches. torch_npu must have been loaded on the host runtime before."""
    sources.ignore(str(Path(__file__).parents[1]))
    sources.ignore(sys.modules["torch_npu"].__path__[0])
    table = kernels.VendorKernels()
    device = HostDevice(profile(settings, table))
    special.install(device)
    generation = generation_of(settings.soc.name)
    if generation is not None and "hf32" in generation.reduced:
        hf32.install(device, kernels.operators("aten"))
    libraries = (
        *kernels.register(device, _vendor(), IN_PLACE, table),
        attention.register(device),
        recurrent.register(device, more=("stft", "stft.center")),
        *hccl.register(device),
    )
    # The vendor keeps the backend that it made for the name; TorchAir would be imported, and would need CANN's graph engine.
    importlib.import_module("torch_npu.dynamo")._global_npu_backend["npu"] = compiler.Compiler(device)
    draws.source = lambda: device.random.advance(device.current_index())  # type: ignore[attr-defined]
    module = torch.npu  # type: ignore[attr-defined]
    rehearsal = Rehearsal(device.profile, device, module, "vendor-package-on-host", libraries)
    adopt(rehearsal)
    return rehearsal


def _vendor() -> Mapping[str, Callable[..., Any]]:
    return {**derivatives.OPERATORS, **OPERATORS}
