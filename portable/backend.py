"""The base class of all backends: the baseline that any device known to PyTorch gets.

A vendor's package subclasses `Backend`, fills `spec`, and overrides only what differs from the baseline. Third parties:
docs/write-a-backend.md has a complete example.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from portable.baseline import baseline
from portable.errors import ConfigurationError, UnsupportedError
from portable.spec import Availability, BackendSpec, Generation
from portable.support import Support, bind

if TYPE_CHECKING:
    import torch

    from portable.attn.path import Path
    from portable.attn.request import Request
    from portable.rehearsal import Profile, Rehearsal
    from portable.rehearse.costs import Costs
    from portable.switches import Control


class Backend:
    """One vendor's devices.

    Attributes:
        spec: what the backend declares, as data.
        package_module: import name of the vendor's package, "" if PyTorch itself has the device.
        group_before_device: the process group must be joined before the device is first touched.
        one_device_per_process: the runtime gives each process a device of its own, numbered 0 there.
    """

    spec: BackendSpec
    package_module: str = ""
    group_before_device: bool = False
    one_device_per_process: bool = False

    def probe(self) -> Availability:
        """Whether the backend can run here.

        Must be cheap, must not raise, and should find out as much as possible before importing the vendor's package.
        The baseline asks whether the package is installed and then the vendor's module under ``torch``.
        """
        if self.package_module and importlib.util.find_spec(self.package_module) is None:
            return Availability(
                False,
                f"the package {self.package_module} is not installed",
                f"pip install {self.spec.package or self.package_module}",
            )
        self.load()
        module = self.module()
        if module is None:
            return Availability(
                False,
                f"this PyTorch has no torch.{self.spec.device_type}",
                f"install a PyTorch build for {self.spec.vendor} devices",
            )
        count = int(module.device_count()) if module.is_available() else 0
        if count == 0:
            return Availability(
                False,
                f"torch.{self.spec.device_type} finds no device",
                f"check the driver of the {self.spec.vendor} device",
            )
        return Availability(True, f"{count} device{'s' if count > 1 else ''}", device_count=count)

    def load(self) -> None:
        """Import the vendor's package, so that ``torch`` knows the device. Called when the backend is chosen."""
        if self.package_module:
            importlib.import_module(self.package_module)

    def module(self) -> Any:
        """The vendor's module under ``torch`` (``torch.cuda``), None if there is none."""
        import torch

        return getattr(torch, self.spec.device_type, None)

    @cached_property
    def support(self) -> Mapping[str, Support]:
        """Function of the catalogue to how this backend supports it."""
        return {**baseline(), **self.support_changes()}

    def support_changes(self) -> Mapping[str, Support]:
        """Cells of the support table that differ from the baseline."""
        return {}

    def bind(self) -> dict[str, Any]:
        """The table with every cell turned into what a call reaches."""
        module = self.module()
        return {name: bind(self.spec.name, name, cell, module) for name, cell in self.support.items()}

    def generation(self, index: int = 0) -> Generation | None:
        """Generation of one device, None if it is not in the table. The device must be available."""
        return None

    def find_generation(self, name: str) -> Generation:
        """A generation by what people write for it, on the command line say; no device need be here.

        Raises:
            ConfigurationError: the table has none of this name.
        """
        wanted = name.strip().lower()
        for generation in self.spec.generations.values():
            if wanted in (generation.name.lower(), generation.title.lower()):
                return generation
        known = ", ".join(self.spec.generations) or "none"
        raise ConfigurationError(
            f"generation {name!r} was asked for, but the {self.spec.name} backend knows {known}. Use one of these."
        )

    def precision_controls(self) -> Sequence[Control]:
        """The switches that a precision level turns on this backend (see `portable.switches`)."""
        from portable.fp32_settings import common

        return common()

    def grad_scaler(self, enabled: bool, **kwargs: Any) -> torch.amp.GradScaler:
        """What scales losses on this backend: ``torch.amp.GradScaler``, or the vendor's where that would miss an overflow."""
        from portable.scaling import GradScaler

        return GradScaler(self.spec.device_type, enabled=enabled, **kwargs)

    def claim_device(self, local_rank: int) -> torch.device:
        """Make the device of this process current and return it; ``local_rank`` is the process's number on this machine."""
        import torch

        kind = self.spec.device_type
        if kind == "cpu":
            return torch.device(kind)
        index = 0 if self.one_device_per_process else local_rank
        self.bind()["set_device"](index)
        return torch.device(kind, index)

    def device_name(self, index: int = 0) -> str:
        """What people call the device."""
        generation = self.generation(index)
        return generation.title if generation else f"{self.spec.vendor} {self.spec.device_type}:{index}"

    def total_memory(self, index: int = 0) -> int | None:
        """Bytes of memory of one device; the declared figure if the vendor's module does not tell."""
        try:
            return int(self.module().get_device_properties(index).total_memory)
        except (AttributeError, RuntimeError):
            generation = self.generation(index)
            return generation.memory if generation else None

    def versions(self) -> Mapping[str, str]:
        """Versions that a result depends on, beyond PyTorch's: driver, toolkit, vendor package."""
        return {}

    def compile_problem(self) -> str | None:
        """Why torch.compile cannot work here, None if it can."""
        requires = self.spec.compile.requires
        if requires and importlib.util.find_spec(requires) is None:
            return f"the compile backend {self.spec.compile.backend!r} needs the package {requires}, which is not installed"
        return None

    @contextlib.contextmanager
    def fallbacks(self) -> Iterator[Counter[str]]:
        """Count the operators that fall back to the CPU inside the block.

        The baseline listens for the warning declared in ``spec.fallback.warning``; other warnings pass through.
        """
        import torch

        seen: Counter[str] = Counter()
        pattern = re.compile(self.spec.fallback.warning) if self.spec.fallback.warning else None
        if pattern is None:
            yield seen
            return
        original = warnings.showwarning

        def listen(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            match = pattern.search(str(message))
            if match:
                seen[match["op"]] += 1
            else:
                original(message, category, *args, **kwargs)

        # PyTorch announces a fallback by TORCH_WARN_ONCE: without this, the first operator of the process and no other.
        always = torch.is_warn_always_enabled()
        with warnings.catch_warnings():
            torch.set_warn_always(True)
            # Only the announcements: the user's filters keep their say about every other warning.
            warnings.filterwarnings("always", message=f"(?s:.*)(?:{pattern.pattern})")
            warnings.showwarning = listen
            try:
                yield seen
            finally:
                torch.set_warn_always(always)

    def emulate(self, generation: str | None = None, devices: int = 1, memory: int | None = None) -> Rehearsal:
        """Give this process devices of this backend without the hardware, before anything else loads the vendor's package.

        Afterwards `probe` finds them, and says in ``execution`` that they are no hardware. There is no way back.

        Args:
            generation: which generation to be, by its name in ``spec.generations``; None for the one most people have.
            devices: how many.
            memory: bytes of memory of each, None for what the generation has.

        Raises:
            ConfigurationError: no such generation, or the process has a device of another kind already.
            UnsupportedError: the backend cannot be emulated.
        """
        raise UnsupportedError(
            self.spec.name,
            "emulation",
            "its package brings no emulated device",
            "portable rehearse --backend neuron or ascend",
        )

    def profiles(self) -> Mapping[str, Profile]:
        """What `emulate` follows, by generation, with the defaults: for the documents, the same on every machine."""
        return {}

    @property
    def costs(self) -> Costs | None:
        """What the findings of a rehearsal cost on these devices, in words; None for words that hold for any device."""
        return None

    def attention_paths(self, request: Request) -> Sequence[Path]:
        """Ways of computing attention on a device of the request's generation, the best first (see `portable.attn.path`)."""
        from portable.attn import common

        return common.BLOCKWISE, common.MATH

    def profiler(self, **kwargs: Any) -> Any:
        """A profiler with the activities of this backend: ``torch.profiler.profile`` or the vendor's own."""
        from torch import profiler

        names = self.spec.profiler_activities
        kwargs.setdefault("activities", [a for a in profiler.supported_activities() if a.name in names])
        return profiler.profile(**kwargs)

    def documented(self) -> Sequence[Backend]:
        """What the generated documents describe, the same on every machine: the first in the table of functions."""
        return [self]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.spec.name!r} (device type {self.spec.device_type!r})>"
