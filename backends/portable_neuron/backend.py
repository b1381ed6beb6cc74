"""TorchNeuron as a backend. Checked against documentation only: no Trainium was at hand."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import portable
from portable import emulation
from portable.backend import Backend
from portable.errors import ConfigurationError
from portable.rehearse.costs import Costs
from portable.spec import Availability, Generation
from portable.support import Support, emulated, native, noop, unsupported
from portable_neuron.costs import COSTS
from portable_neuron.diagnosis import diagnose, look
from portable_neuron.emulated import UNSUPPORTED, VARIABLE, Options, emulate, emulation_asked, rehearse
from portable_neuron.facts import GENERATIONS, SPEC
from portable_neuron.surface import SURFACE

if TYPE_CHECKING:
    from portable.attn.path import Path as AttentionPath
    from portable.attn.request import Request
    from portable.rehearsal import Profile, Rehearsal
    from portable.switches import Control

_GRAPHS = unsupported("Neuron has no counterpart of CUDA graphs", "use pt.compile(model): it compiles whole graphs")
_MONITOR = unsupported("torch.neuron has no monitoring functions", "run neuron-top or neuron-monitor beside the program")


def _memory_info(device: Any = None) -> tuple[int, int]:
    """(free, total) from the device's size and what this process's allocator holds; other processes are not seen."""
    module = torch.neuron  # type: ignore[attr-defined]
    module.synchronize()  # the counters are updated asynchronously (torch: memory profiling guide)
    total = int(module.get_device_properties(device or 0).total_memory)
    return total - int(module.memory_reserved()), total


def _emulated_fallbacks() -> Counter[str]:
    """Operator to the calls that the emulated device has sent to the CPU so far."""
    from portable.rehearsal import current

    session = current()
    total: Counter[str] = Counter()
    if session is not None:
        for (name, _), count in session.recorder.fallbacks.items():
            total[name] += count
    return total


def _probe_emulated(chosen: Options) -> Availability:
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", SPEC.device_type):
        return Availability(
            False,
            f"{VARIABLE} asks for an emulated device, but this process has the device {taken!r}, and PyTorch has one slot",
            "start a process without it: one emulated device per process",
            execution="emulated",
        )
    title = GENERATIONS[chosen.generation].title
    return Availability(
        True,
        f"{chosen.devices} emulated: {title}, on this machine's CPU. Counts and rules, no times",
        device_count=chosen.devices,
        execution="emulated",
    )


class NeuronBackend(Backend):
    """AWS Trainium 2 and 3."""

    spec = SPEC
    package_module = "torch_neuronx"
    group_before_device = True  # torch: distributed guide
    one_device_per_process = True  # one process drives one logical core, whose number is forced to LOCAL_RANK

    def load(self) -> None:
        chosen = emulation_asked()
        if chosen is None:
            super().load()
        else:
            rehearse(chosen)

    def emulate(self, generation: str | None = None, devices: int = 1, memory: int | None = None) -> Rehearsal:
        return emulate(generation, devices, memory)

    @property
    def costs(self) -> Costs:
        return COSTS

    def profiles(self) -> Mapping[str, Profile]:
        from portable_neuron.profile import profile

        return {name: profile(Options(name), {}) for name in GENERATIONS if name not in UNSUPPORTED}

    def probe(self) -> Availability:
        try:
            chosen = emulation_asked()
        except ConfigurationError as error:
            return Availability(
                False, str(error).rstrip("."), f"correct {VARIABLE}, or unset it to use the hardware", execution="emulated"
            )
        if chosen is not None:
            return _probe_emulated(chosen)
        obstacle = diagnose(look())
        if obstacle:
            return obstacle
        self.load()
        module = self.module()
        if module is None:
            return Availability(False, "torch_neuronx was imported, but torch.neuron is missing", "reinstall torch-neuronx")
        # is_available() swallows the runtime's errors and device_count() raises them (drop), so the reason comes from there.
        if not module.is_available():
            try:
                module.device_count()
                why = "the runtime finds no core"
            except RuntimeError as error:
                why = str(error).splitlines()[0]
            return Availability(False, why, "check with neuron-ls that no other process holds the cores")
        count = int(module.device_count())
        return Availability(True, f"{count} logical NeuronCore{'s' if count > 1 else ''}", device_count=count)

    def precision_controls(self) -> Sequence[Control]:
        from portable_neuron.precision import controls

        return controls()

    def attention_paths(self, request: Request) -> Sequence[AttentionPath]:
        from portable_neuron.attention import PATHS

        return PATHS

    def support_changes(self) -> Mapping[str, Support]:
        return {
            **{name: native(name) for name in SURFACE},
            # Absent from the documented surface; Accelerate calls some, so a later version may have them: asked first.
            "mem_get_info": native("mem_get_info", emulated(_memory_info, "total_memory less memory_reserved of this process")),
            "get_rng_state_all": native(
                "get_rng_state_all", emulated(emulation.get_rng_state_all, "get_rng_state of each device")
            ),
            "set_rng_state_all": native(
                "set_rng_state_all", emulated(emulation.set_rng_state_all, "set_rng_state of each device")
            ),
            "ipc_collect": native("ipc_collect", noop("device memory is not shared between processes")),
            "set_per_process_memory_fraction": native(
                "set_per_process_memory_fraction",
                unsupported("a process has its logical core to itself", "choose a smaller batch"),
            ),
            "device_of": emulated(emulation.device_of, "torch.accelerator.device_index of the tensor's device"),
            "CUDAGraph": _GRAPHS,
            "graph": _GRAPHS,
            "make_graphed_callables": _GRAPHS,
            "graph_pool_handle": _GRAPHS,
            **dict.fromkeys(("utilization", "memory_usage", "temperature", "power_draw", "clock_rate"), _MONITOR),
            "list_gpu_processes": unsupported("torch.neuron does not list processes", "use neuron-ls"),
        }

    def generation(self, index: int = 0) -> Generation | None:
        # properties.name is the instance family: trn2, trn2n, trn2u, trn3, trn3u (drop; TorchTitan reads it too).
        family = str(self.module().get_device_properties(index).name).lower()
        return next((found for name, found in GENERATIONS.items() if family.startswith(name)), None)

    def device_name(self, index: int = 0) -> str:
        name = super().device_name(index)
        return f"{name}, emulated on the CPU" if emulation_asked() else name

    def versions(self) -> Mapping[str, str]:
        chosen = emulation_asked()
        if chosen is not None:
            return {"emulation": f"portable {portable.__version__}, rules of {chosen.generation} (docs/emulated-device.md)"}
        found = {}
        for name in ("torch-neuronx", "neuronx-cc", "nki"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(name)
        return found

    @contextlib.contextmanager
    def fallbacks(self) -> Iterator[Counter[str]]:
        """Count through the package's own tracking (drop: clear_op_tracking, get_fallback_ops), which names operators only."""
        if emulation_asked() is not None:
            before = _emulated_fallbacks()
            counted: Counter[str] = Counter()
            try:
                yield counted
            finally:
                counted.update(_emulated_fallbacks() - before)
            return
        import torch_neuronx

        seen: Counter[str] = Counter()
        torch_neuronx.clear_op_tracking()
        try:
            yield seen
        finally:
            seen.update(str(name) for name in torch_neuronx.get_fallback_ops())
