"""torch_npu as a backend. Checked against the vendor's wheel, on the host runtime too: no Ascend device was at hand."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

import portable
from portable import emulation
from portable.backend import Backend
from portable.errors import ConfigurationError
from portable.rehearse.costs import Costs
from portable.spec import Availability, Generation
from portable.support import Support, emulated, native, unsupported
from portable_ascend import host_acl
from portable_ascend.costs import COSTS
from portable_ascend.diagnosis import Found, diagnose, look
from portable_ascend.facts import SPEC, generation_of
from portable_ascend.surface import SURFACE

if TYPE_CHECKING:
    from portable.attn.path import Path as AttentionPath
    from portable.attn.request import Request
    from portable.rehearsal import Profile, Rehearsal
    from portable.switches import Control

_MONITOR = unsupported("torch.npu has only utilization()", "run npu-smi info beside the program")


class AscendBackend(Backend):
    """Huawei Ascend 910 and 950 series."""

    spec = SPEC
    package_module = "torch_npu"

    def load(self) -> None:
        asked = host_acl.from_environment()
        if asked is None:
            super().load()
        else:
            host_acl.start(asked)

    def emulate(self, generation: str | None = None, devices: int = 1, memory: int | None = None) -> Rehearsal:
        return host_acl.emulate(generation, devices, memory)

    def probe(self) -> Availability:
        try:
            asked = host_acl.from_environment()
            if asked is not None:
                return _on_host(asked)
        except ConfigurationError as error:
            step = f"correct {host_acl.VARIABLE}, or unset it to use the hardware"
            return Availability(False, str(error).rstrip("."), step, execution="vendor-package-on-host")
        obstacle = diagnose(look())
        if obstacle:
            return obstacle
        try:
            self.load()
        except (ImportError, OSError, RuntimeError) as error:
            retried = diagnose(_with_error(str(error)))
            return retried or Availability(False, f"torch_npu did not load: {error}", "check CANN and the driver")
        module = self.module()
        count = int(module.device_count()) if module.is_available() else 0
        if count == 0:
            return Availability(False, "torch_npu finds no device", "check with npu-smi info that a device is healthy and free")
        return Availability(True, f"{count} device{'s' if count > 1 else ''}", device_count=count)

    def profiles(self) -> Mapping[str, Profile]:
        from portable_ascend.host_acl.kernels import VendorKernels
        from portable_ascend.host_acl.profile import profile
        from portable_ascend.host_acl.settings import make_settings

        return {name: profile(make_settings(name, devices=1), VendorKernels()) for name in SPEC.generations}

    @property
    def costs(self) -> Costs:
        return COSTS

    def precision_controls(self) -> Sequence[Control]:
        from portable_ascend.precision import controls

        return controls()

    def grad_scaler(self, enabled: bool, **kwargs: Any) -> torch.amp.GradScaler:
        """torch_npu's own on the first series, where an overflow gives the largest number instead of inf.

        It reads the device's overflow flag, and gives the processes of a group one answer: a saturated gradient is finite, so
        that without it the others would take the step (wheel: npu/amp/grad_scaler.py, npu/utils.py).
        """
        module = self.module()
        if not enabled or module.utils.is_support_inf_nan():
            return super().grad_scaler(enabled, **kwargs)
        from portable_ascend.scaling import GradScaler

        return GradScaler(enabled=True, **kwargs)

    def attention_paths(self, request: Request) -> Sequence[AttentionPath]:
        from portable_ascend.attention import PATHS

        return PATHS

    def support_changes(self) -> Mapping[str, Support]:
        return {
            **{name: native(name) for name in SURFACE},
            "CUDAGraph": native("NPUGraph"),
            # torch.npu.get_device_capability answers only what TORCH_NPU_DEVICE_CAPABILITY was set to, and None otherwise.
            "get_device_capability": emulated(emulation.constant((0, 0)), "(0, 0): the device has no CUDA compute capability"),
            "is_tf32_supported": emulated(
                emulation.constant(False), "False: Ascend's counterpart is HF32 (torch.npu.matmul.allow_hf32)"
            ),
            **dict.fromkeys(("memory_usage", "temperature", "power_draw", "clock_rate"), _MONITOR),
            "list_gpu_processes": unsupported("torch.npu does not list processes", "run npu-smi info"),
        }

    def find_generation(self, name: str) -> Generation:
        """Also without "Ascend" ("910B2"), and by the SoC's name ("Ascend910_9391")."""
        wanted = name.strip()
        known = {short.lower(): short for short in SPEC.generations}
        short = known.get(f"ascend{wanted.lower()}")
        found = SPEC.generations[short] if short else None
        return found or (generation_of(wanted) if wanted not in SPEC.generations else None) or super().find_generation(name)

    def generation(self, index: int = 0) -> Generation | None:
        return generation_of(self.module().get_device_name(index))

    def device_name(self, index: int = 0) -> str:
        name = str(self.module().get_device_name(index))
        return f"{name}, torch_npu on the host's CPU" if host_acl.active() else name

    def versions(self) -> Mapping[str, str]:
        if host_acl.active():
            return {
                "torch-npu": importlib.metadata.version("torch-npu"),
                "host runtime": f"portable {portable.__version__} (docs/host-acl.md), no CANN",
            }
        found = {"torch-npu": importlib.metadata.version("torch-npu")}
        cann = getattr(getattr(torch, "npu", None), "utils", None)
        if cann is not None and hasattr(cann, "get_cann_version"):
            found["CANN"] = str(cann.get_cann_version())
        return found

    def profiler(self, **kwargs: Any) -> Any:
        """torch_npu.profiler: torch.profiler does not see the device (torch_npu documentation, "Ascend PyTorch Profiler").

        On the host runtime there is no device to see, and torch.profiler shows the kernels of the CPU.
        """
        if host_acl.active():
            from torch import profiler

            kwargs["activities"] = [profiler.ProfilerActivity.CPU]  # those asked for may be torch_npu's own
            kwargs.pop("experimental_config", None)  # torch_npu's: what CANN is to collect
            return super().profiler(**kwargs)
        import torch_npu

        activity = torch_npu.profiler.ProfilerActivity
        kwargs.setdefault("activities", [activity.CPU, activity.NPU])
        return torch_npu.profiler.profile(**kwargs)


def _on_host(asked: host_acl.Settings) -> Availability:
    host_acl.start(asked)
    plural = "s" if asked.devices > 1 else ""
    return Availability(
        True,
        f"{asked.devices} device{plural}: torch_npu as {asked.soc.name} on this machine's CPU. Counts and rules, no times",
        device_count=asked.devices,
        execution="vendor-package-on-host",
    )


def _with_error(error: str) -> Found:
    return replace(look(), load_error=error)
