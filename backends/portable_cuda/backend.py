"""torch.cuda as a backend. Everything is native; what this module adds is the probe and the generation."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from portable.backend import Backend
from portable.catalogue import FUNCTIONS
from portable.spec import Availability, Generation
from portable.support import Support, native
from portable_cuda.facts import CAPABILITIES, SPEC, product_of

_DRIVER = Path("/proc/driver/nvidia/version")
_AMD_DRIVER = Path("/dev/kfd")
# PyTorch's own switch: ask the driver's management library instead of starting CUDA, so that a later fork still works
# (torch.cuda.is_available documentation).
_GENTLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


if TYPE_CHECKING:
    from portable.attn.path import Path as AttentionPath
    from portable.attn.request import Request
    from portable.switches import Control


class CudaBackend(Backend):
    """NVIDIA GPUs, and AMD GPUs through a ROCm build of PyTorch."""

    spec = SPEC

    def probe(self) -> Availability:
        if not (torch.version.cuda or torch.version.hip):
            return Availability(
                False,
                f"this PyTorch ({torch.__version__}) was built without CUDA and ROCm",
                "install a CUDA or ROCm build (see the selector on pytorch.org, 'Get Started')",
            )
        count, said = _count_devices()
        if count:
            return Availability(True, f"{count} device{'s' if count > 1 else ''}", device_count=count)
        hidden = next((key for key in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if os.environ.get(key, "0") == ""), None)
        if hidden:
            return Availability(False, f"{hidden} is empty and hides every device", f"unset {hidden} or list ordinals in it")
        if said:
            return Availability(False, said, "update the driver, or install a PyTorch build for the driver's CUDA version")
        if torch.version.hip:
            found = "no device" if _AMD_DRIVER.exists() else f"no driver ({_AMD_DRIVER} is missing)"
            return Availability(False, f"a ROCm build, but {found}", "install the amdgpu driver and check rocminfo")
        found = "a driver but no device" if _DRIVER.exists() else "no NVIDIA driver"
        return Availability(False, f"a CUDA {torch.version.cuda} build, but {found} on this machine", "check nvidia-smi")

    def precision_controls(self) -> Sequence[Control]:
        from portable_cuda.precision import controls

        return controls()

    def attention_paths(self, request: Request) -> Sequence[AttentionPath]:
        from portable_cuda.attention import PATHS

        return PATHS

    def support_changes(self) -> Mapping[str, Support]:
        return {function.name: native(function.name) for function in FUNCTIONS}

    def find_generation(self, name: str) -> Generation:
        """Also by compute capability ("8.0") and by what the driver calls a product ("NVIDIA H200")."""
        found = CAPABILITIES.get(f"sm_{name.strip().replace('.', '')}") or product_of(name.strip())
        return found or super().find_generation(name)

    def generation(self, index: int = 0) -> Generation | None:
        return product_of(torch.cuda.get_device_name(index)) or CAPABILITIES.get(_architecture(index))

    def device_name(self, index: int = 0) -> str:
        return torch.cuda.get_device_name(index)

    def versions(self) -> Mapping[str, str]:
        found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "cuDNN": _cudnn(), "driver": _driver()}
        return {name: version for name, version in found.items() if version}


def _count_devices() -> tuple[int, str]:
    """(number of usable devices, what torch.cuda complained about)."""
    asked = os.environ.get(_GENTLE)
    os.environ[_GENTLE] = "1"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    finally:
        if asked is None:
            del os.environ[_GENTLE]
        else:
            os.environ[_GENTLE] = asked
    return count, str(caught[-1].message).splitlines()[0] if caught and not count else ""


def _architecture(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def _cudnn() -> str | None:
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return str(version) if version else None


def _driver() -> str | None:
    """The kernel module's version, from the first line of /proc/driver/nvidia/version."""
    try:
        words = _DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
