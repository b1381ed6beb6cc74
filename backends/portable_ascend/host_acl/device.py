"""Operators on the tensors of torch_npu, computed by the CPU.

The memory of an NPU tensor is memory of this process (``runtime/memory.c``), so the CPU's kernels work on it in place. Results
are allocated by the vendor's own caching allocator: its statistics and its out-of-memory error are then the vendor's too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from portable.rehearsal import sources
from portable.rehearsal.device import Device
from portable.rehearsal.handles import lowered
from portable.rehearsal.profile import Profile
from portable_ascend import host_acl

_MASK = 2**64 - 1
# These take the lengths of packed sequences as tensors of the CPU, beside the device's.
_LENGTHS_ON_THE_CPU = frozenset({"npu::npu_fusion_attention_v3", "npu::npu_fusion_attention_grad_v3"})
_to_copy = torch.ops.aten._to_copy.default


class HostDevice(Device):
    """The NPUs of this process. Made by `portable_ascend.host_acl.session.start`, after torch_npu was loaded."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self.random = GeneratorState()  # type: ignore[assignment]
        self._npu: Any = torch.npu  # type: ignore[attr-defined]
        self.recorder.peak = lambda: max(self._npu.max_memory_allocated(i) for i in range(self._npu.device_count()))
        runtime = host_acl.active()
        assert runtime is not None
        self._held = runtime.used
        self._most = 0
        self._most_line = ""
        self.recorder.peak_line = lambda: self._most_line

    def run(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        out = super().run(operator, *args, **kwargs)
        # The vendor's allocator knows no lines: what it took from the device last, it took for about this one.
        held = self._held(self.current_index())
        if held > self._most:
            self._most, self._most_line = held, sources.line()
        return out

    @property
    def soc(self) -> str:
        """Name of the SoC ("Ascend910B2")."""
        return self.profile.family.value

    def current_index(self) -> int:
        return int(self._npu.current_device())

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cpu:
            return tensor
        low = lowered(tensor)
        # PyTorch conjugates and negates lazily, by a bit of the tensor that the exchange does not carry.
        if tensor.is_conj():
            low = low.conj()
        return torch._neg_view(low) if tensor.is_neg() else low

    def put(self, host: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """An NPU tensor with the values of a CPU tensor.

        Raises:
            torch.OutOfMemoryError: it does not fit.
            RuntimeError: the SoC has no arithmetic for this dtype, and the device is not lenient.
        """
        self.check_dtype(host.dtype)
        if host.layout != torch.strided:
            raise NotImplementedError(
                f"a tensor of layout {str(host.layout)[6:]} was asked for on {self.kind}; the host ACL runtime has dense ones "
                "only. Keep sparse tensors on the CPU."
            )
        host = host.resolve_conj().resolve_neg()
        strides = host.stride()
        if host.numel() > 1 and 0 in strides:  # a broadcast result: its elements share memory, and cannot be written one by one
            host = host.contiguous()
            strides = host.stride()
        where = torch.device(self.kind, self.current_index() if index is None or index < 0 else index)
        out = torch.empty_strided(host.shape, strides, dtype=host.dtype, device=where)
        if host.numel():
            lowered(out).copy_(host)
        return out

    def _check_strangers(self, operator: Any, strangers: Sequence[torch.Tensor]) -> None:
        if operator._schema.name not in _LENGTHS_ON_THE_CPU:
            super()._check_strangers(operator, strangers)

    def _replace_empty_outs(self, targets: Sequence[tuple[int, str]], kwargs: Mapping[str, Any], low: dict[str, Any]) -> None:
        for _, name in targets:
            if name in low:
                low[name] = tree_map_only(torch.Tensor, _resizable, low[name])

    def _resolve_written(
        self,
        written: Sequence[tuple[int, str]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        low: Sequence[Any],
        low_kwargs: Mapping[str, Any],
    ) -> Any:
        answers = []
        for position, name in written:
            given, host = (args[position], low[position]) if position < len(args) else (kwargs[name], low_kwargs[name])
            for mine, theirs in zip(_tensors(given), _tensors(host), strict=True):
                if mine.shape != theirs.shape:
                    mine.resize_(theirs.shape)  # the vendor's, which takes the memory from its own allocator
                elif mine.stride() == theirs.stride():
                    continue
                # Some kernels of the CPU (matmul.out) lay a strided out= anew in its own memory.
                values = theirs.clone()
                self.host(mine).copy_(values)
            answers.append(given)
        return answers[0] if len(answers) == 1 else tuple(answers)

    def to_copy(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """aten::_to_copy: another dtype, memory format or device."""
        device = kwargs.pop("device", None)
        kwargs.pop("non_blocking", None)
        kwargs.pop("pin_memory", None)
        host = _to_copy(self.host(tensor), **kwargs)
        if device is not None and device.type == "cpu":
            out = host
        else:
            index = tensor.device.index if device is None else device.index
            out = self.put(host, index)
        self.observer.observe(_to_copy, (tensor,), kwargs, out)
        return out

    def generator(self, given: torch.Generator | None, index: int) -> torch.Generator | None:
        if given is not None and given.device.type != self.kind:
            raise RuntimeError(
                f"a generator of {given.device.type} was passed to an operator on {self.kind}. "
                f"Make one for the device: torch.Generator(device={self.kind!r})."
            )
        self.random.use(given)  # type: ignore[attr-defined]
        return None


def _resizable(tensor: torch.Tensor) -> torch.Tensor:
    """PyTorch sizes an empty ``out=`` tensor itself, which memory of an exchanged tensor does not allow."""
    return tensor if tensor.numel() else torch.empty(0, dtype=tensor.dtype)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class GeneratorState:
    """The vendor's generators (seed and offset of a counter-based generator) drive the CPU's for one operator at a time.

    The numbers are a function of seed and offset, as on the device, and the offset grows with each draw; which numbers they
    are is the CPU generator's matter, since the device's algorithm cannot be had here.
    """

    shared = False

    def __init__(self) -> None:
        self._given = threading.local()
        self._lock = threading.RLock()

    def use(self, generator: torch.Generator | None) -> None:
        """Take the next draw of this thread from a generator other than the device's default one."""
        self._given.generator = generator

    def advance(self, index: int) -> tuple[int, int]:
        """Seed and offset of a device's generator as they were; the offset grows."""
        generator = getattr(self._given, "generator", None)
        self._given.generator = None
        if generator is None:
            generator = torch.npu.default_generators[index]  # type: ignore[attr-defined]
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # the device's generator makes four numbers per step; offsets are multiples of it
        return generator.initial_seed(), offset

    def next_seed(self, index: int) -> int:
        """A seed for the CPU's generator."""
        return mixed(*self.advance(index))

    def draw(self, index: int, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Call a function that draws from the CPU's default generator."""
        with self._lock:
            outside = torch.default_generator.get_state()
            torch.default_generator.manual_seed(self.next_seed(index))
            try:
                return function(*args, **kwargs)
            finally:
                torch.default_generator.set_state(outside)


def mixed(seed: int, offset: int) -> int:
    """One 63-bit number for a seed and an offset: the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (seed + (offset + 1) * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1
