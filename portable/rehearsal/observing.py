"""What one operator call means: counted from its arguments alone, so that any device's calls can be fed in.

The emulated device calls `Observer.observe` for each operator that reaches it; for another device `watch` is a
TorchDispatchMode that does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from portable.rehearsal.kernels import base_name
from portable.rehearsal.profile import AttentionCall, Profile
from portable.rehearsal.recorder import Recorder

# Operators whose result or size the host must know before it can go on, so it waits for the device: each answers a Python
# value, or a tensor whose size depends on the data.
SYNCS: Mapping[str, str] = {
    "_local_scalar_dense": "item",
    "equal": "equal",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "repeat_interleave": "repeat_interleave",
    "allclose": "allclose",
    "is_nonzero": "item",
    "_linalg_check_errors": "error check of torch.linalg",
}
_MASKED = {"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"}
_MOVES = {"copy", "_to_copy"}
# Allocation and metadata: no kernel runs.
_FREE = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "resize",
    "set",
    "detach",
    "lift_fresh",
    "lift",
    "record_stream",
}
_ATTENTION = {"_scaled_dot_product_fused_attention_overrideable", "scaled_dot_product_attention"}


@dataclass(frozen=True)
class Plan:
    """What is known of an operator before any call."""

    name: str
    compiles: bool
    sync: str
    fallback: bool
    masked: bool
    moves: bool
    attention: bool


class Observer:
    """Turns operator calls into counts."""

    def __init__(self, profile: Profile, recorder: Recorder) -> None:
        self.profile = profile
        self.recorder = recorder
        self._plans: dict[Any, Plan] = {}
        self.in_graph: Callable[[], bool] = lambda: False  # whether the call belongs to a compiled graph

    def plan(self, operator: Any) -> Plan:
        """What is known of an operator (an OpOverload)."""
        found = self._plans.get(operator)
        if found is None:
            found = self._plans[operator] = self._plan(operator)
        return found

    def _plan(self, operator: Any) -> Plan:
        base = base_name(operator)
        view = any(ret.alias_info is not None and not ret.alias_info.is_write for ret in operator._schema.returns)
        free = view or base in _FREE
        sync = SYNCS.get(base, "")
        if base == "repeat_interleave" and "output_size" not in str(operator._schema):
            sync = ""
        attention = base.removesuffix("_backward") in _ATTENTION  # has a path of its own on every device (`AttentionRule`)
        kernel = free or attention or base in _MOVES or base in SYNCS or self.profile.kernels.value.has(operator)
        return Plan(
            operator._schema.name,
            compiles=self.profile.compile_per_shape.value
            and kernel
            and not free
            and sync not in ("item", "error check of torch.linalg"),
            sync=sync,
            fallback=not kernel,
            masked=base in _MASKED,
            moves=base in _MOVES,
            attention=base in _ATTENTION and operator._schema.name.startswith("aten::"),
        )

    def observe(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any = None) -> None:
        """Count one call.

        Args:
            operator: the OpOverload.
            args: positional arguments, tensors of the device among them; only their metadata are read.
            kwargs: keyword arguments.
            out: what the operator answered.
        """
        recorder = self.recorder
        if recorder.paused:
            return
        plan = self._plans.get(operator) or self.plan(operator)
        recorder.op(plan.name)
        if plan.fallback:
            recorder.fallback(plan.name)
        if plan.moves and self._crosses(args, kwargs, out):
            return
        if plan.sync:
            if plan.sync != "repeat_interleave" or kwargs.get("output_size") is None:
                recorder.sync(plan.sync)
        elif plan.masked and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
            recorder.sync("boolean indexing")
        if plan.compiles and not self.in_graph():
            key = (operator, *map(_static, args))
            recorder.signature(plan.name, (key, *map(_static, kwargs.values())) if kwargs else key)

    def _crosses(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:
        """Record a copy between host and device; whether it was one."""
        source, target = (args[1], args[0]) if len(args) > 1 and isinstance(args[1], torch.Tensor) else (args[0], out)
        if not isinstance(target, torch.Tensor) or source.device.type == target.device.type:
            return False
        size = source.numel() * source.element_size()
        if target.device.type == "cpu":
            self.recorder.copy("to the CPU", size)
            self.recorder.sync("copy to the CPU")
        else:
            self.recorder.copy("to the device", size)
        return True

    def attention(self, call: AttentionCall) -> str:
        """Count one call of scaled_dot_product_attention; the name of the path that the real device takes."""
        rule = self.profile.attention.value
        reasons = tuple(rule.why_not(call))
        path = rule.plain if reasons else rule.fused
        if not self.recorder.paused:
            shapes = f"q {tuple(call.query)}, k {tuple(call.key)}, v {tuple(call.value)}"
            self.recorder.attention_call(path, reasons, shapes)
            for hazard in rule.hazards(call):
                self.recorder.finding("attention", "scaled_dot_product_attention", hazard)
        return path

    def watch(self) -> TorchDispatchMode:
        """A mode that feeds every operator call on the profile's device type inside its block to `observe`."""
        return _Watch(self)


class _Watch(TorchDispatchMode):
    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = self.observer.profile.device_type
        if any(t.device.type == kind for t in _tensors((*args, *kwargs.values(), out))):
            if self.observer.plan(func).attention:
                self.observer.attention(attention_call(*args, **kwargs))
            self.observer.observe(func, args, kwargs, out)
        return out


def attention_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *args: Any,
    **kwargs: Any,
) -> AttentionCall:
    """The metadata of a call, from the arguments of scaled_dot_product_attention or its overrideable kernel."""
    mask = kwargs.get("attn_mask", kwargs.get("attn_bias", mask))
    return AttentionCall(
        query.shape,
        key.shape,
        value.shape,
        (query.dtype, key.dtype, value.dtype),
        None if mask is None else mask.dtype,
        float(kwargs.get("dropout_p", dropout)),
        bool(kwargs.get("is_causal", causal)),
    )


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _static(value: Any) -> Hashable:
    """The part of an argument that a compiled kernel is specialised on. A Python float is passed at run time."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, float):
        return float
    if isinstance(value, (list, tuple)):
        return tuple(map(_static, value))
    return value if isinstance(value, Hashable) else None
