"""Arithmetic of the device where it differs from the CPU's: 64-bit labels over 32-bit values, integer matrix products.

`Numerics.run` computes one operator on CPU tensors as the profile says. Where the answer differs from what the operator
promises, it is a finding: the real device would give the same wrong number without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from portable.rehearsal.kernels import base_name
from portable.rehearsal.profile import Profile
from portable.rehearsal.recorder import Recorder
from portable.rehearsal.schemas import mutates

MATMULS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "_int_mm", "matmul", "linear"})
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "_convolution"})
# Operators that move or make values without arithmetic: 64-bit values come through whole.
_EXACT = frozenset(
    {
        "copy", "_to_copy", "clone", "fill", "zero", "empty", "empty_strided", "_local_scalar_dense", "set", "resize", "arange",
        "randint", "random", "randperm", "equal", "_foreach_copy",
    }
)  # fmt: skip
# int64 operators that do arithmetic; the others take their int64 arguments as indices or only move them.
_INTEGER_ARITHMETIC = frozenset({"sum", "prod", "cumsum", "cumprod", "mean", "dot", "max", "min", "amax", "amin", "nansum"})
_LIMITS = torch.iinfo(torch.int32)


class Numerics:
    """Computes operators on CPU tensors the way the device does."""

    def __init__(self, profile: Profile, recorder: Recorder) -> None:
        self._recorder = recorder
        self._computes_in = dict(profile.computes_in.value)
        self._tuple_label = dict(profile.tuple_label.value)
        self._refused_out = profile.refusals.value.out
        self._bits = profile.integer_matmul_bits.value
        self._matmul_dtype = profile.matmul_dtype.value
        self._special: dict[Any, bool] = {}
        self._float = {label for label in self._computes_in if label.is_floating_point}
        self._integer = set(self._computes_in) - self._float

    def run(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtypes: set[torch.dtype]) -> Any:
        """The operator's answer on the device.

        Args:
            operator: the OpOverload.
            args, kwargs: its arguments, as CPU tensors.
            dtypes: dtypes of all tensors among them.
        """
        base = base_name(operator)
        if base not in _EXACT:
            asked = kwargs.get("dtype")
            if self._float and (self._float & dtypes or asked in self._float):
                return self._narrow_floats(operator, args, kwargs, dtypes)
            if base in MATMULS and self._bits and dtypes and not any(d.is_floating_point or d.is_complex for d in dtypes):
                return self._integer_product(operator, args, kwargs)
            if self._matmul_dtype and torch.float32 in dtypes and (base in MATMULS or base in _CONVOLUTIONS):
                args, kwargs = tree_map_only(torch.Tensor, self._rounded, (tuple(args), dict(kwargs)))
            arithmetic = base in _INTEGER_ARITHMETIC or torch.Tag.pointwise in operator.tags
            if (
                arithmetic
                and self._integer
                and (self._integer & dtypes or asked in self._integer or base in _INTEGER_ARITHMETIC)
            ):
                return self._narrow_integers(operator, args, kwargs)
        return operator(*args, **kwargs)

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._matmul_dtype).float() if tensor.dtype == torch.float32 else tensor

    def _narrow_floats(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtypes: set[torch.dtype]) -> Any:
        """Compute in the narrower type; the label stays, except where several outputs come back."""
        name = operator._schema.name
        out = [leaf for key, leaf in kwargs.items() if key in {a.name for a in operator._schema.arguments if a.is_out}]
        inputs = {t.dtype for t in tree_leaves(tuple(args)) if isinstance(t, torch.Tensor)}  # lists of tensors too
        for tensor in out:
            if isinstance(tensor, torch.Tensor) and tensor.dtype in self._refused_out and tensor.dtype not in inputs:
                self._recorder.refuse(
                    name,
                    TypeError(
                        f"{name}: the output tensor has dtype {str(tensor.dtype)[6:]}, which the device does not support for "
                        "out= unless an input has it. Pass a float32 tensor as out=, or leave out= away."
                    ),
                )
        narrowed: list[tuple[torch.Tensor, torch.Tensor]] = []

        def narrow(tensor: torch.Tensor) -> torch.Tensor:
            target = self._computes_in.get(tensor.dtype)
            # A tensor without dimensions is a scalar to the device and keeps its precision (unless it is written to).
            if target is None or not target.is_floating_point or (tensor.dim() == 0 and not mutates(operator)):
                return tensor
            small = tensor.to(target)
            narrowed.append((tensor, small))
            error = (small.double() - tensor).abs()
            worst = (
                float((error / tensor.abs().clamp_min(torch.finfo(tensor.dtype).tiny)).nan_to_num(0.0).max())
                if error.numel()
                else 0
            )
            if worst and torch.isfinite(tensor).any():
                self._recorder.finding(
                    "float64 computed in float32",
                    name,
                    f"inputs need more than float32: relative error {worst:.1e}; use float32, or compute this on the CPU",
                    worst,
                )
            return small

        wide_args, wide_kwargs = args, kwargs
        args, kwargs = tree_map_only(torch.Tensor, narrow, (tuple(args), dict(kwargs)))
        asked = kwargs.get("dtype")
        if asked in self._float:
            kwargs = {**kwargs, "dtype": self._computes_in[asked]}
        answer = operator(*args, **kwargs)
        if not mutates(operator) and torch.Tag.nondeterministic_seeded not in operator.tags:
            self._compare(name, operator(*wide_args, **wide_kwargs), answer)
        back = {id(small): wide for wide, small in narrowed}
        if mutates(operator):
            for wide, small in narrowed:
                if small.shape != wide.shape:  # an empty out= that the operator sized
                    wide.resize_(small.shape)
                if not torch.equal(small, wide.to(small.dtype)):
                    wide.copy_(small)
        # Numbers (tensors without dimensions) do not lift the answer to float64 beside a float32 tensor.
        label = next((wide.dtype for wide, _ in narrowed), asked if asked in self._float else None)
        several = isinstance(answer, (tuple, list)) and not name.startswith("aten::_foreach")

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in back:
                return back[id(tensor)]
            if label is None or tensor.dtype != self._computes_in[label]:
                return tensor
            return tensor.to(self._tuple_label.get(label, label) if several else label)

        return tree_map_only(torch.Tensor, widen, answer)

    def _compare(self, name: str, exact: Any, answer: Any) -> None:
        """A finding if the answer in float32 is not the one in float64."""
        for wide, small in zip(tree_leaves(exact), tree_leaves(answer), strict=True):
            if not (
                isinstance(wide, torch.Tensor) and wide.dtype in self._float and wide.numel() and wide.shape == small.shape
            ):
                continue
            scale = wide.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(torch.finfo(wide.dtype).tiny)
            worst = float(((small.to(wide.dtype) - wide).abs() / scale).nan_to_num(0.0, 0.0, 0.0).max())
            if worst:
                self._recorder.finding(
                    "float64 computed in float32",
                    name,
                    f"results need more than float32: off by {worst:.1e} of the largest; compute this on the CPU",
                    worst,
                )

    def _integer_product(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Integer matrix product through float32, whose mantissa of 24 bits is all that the device has."""
        floats = tree_map_only(torch.Tensor, lambda t: t.float(), tuple(args))  # before the operator writes to one of them
        factors: dict[str, Any] = {name: int(value) for name, value in kwargs.items() if name in ("beta", "alpha")}
        if "out" in kwargs:
            factors["out"] = torch.empty(0)
        exact = operator(*args, **kwargs)
        if operator.overloadpacket is torch.ops.aten._int_mm:
            operator = getattr(torch.ops.aten.mm, operator._overloadname)
        through = operator(*floats, **factors).to(torch.int64).to(exact.dtype)
        if not torch.equal(exact, through):
            worst = float((exact.double() - through.double()).abs().max())
            self._recorder.finding(
                "integer matrix product through float32",
                operator._schema.name,
                f"exact to {self._bits} bits only: off by up to {worst:.0f}; multiply on the CPU, or keep results below 2^24",
                worst,
            )
        return exact.copy_(through) if mutates(operator) else through

    def _narrow_integers(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """int64 arithmetic in 32 bits: what lies beyond wraps around."""
        wrapped = False

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal wrapped
            if tensor.dtype not in self._integer or not tensor.numel():
                return tensor
            low, high = torch.aminmax(tensor)
            if low >= _LIMITS.min and high <= _LIMITS.max:
                return tensor
            wrapped = True
            return tensor.to(torch.int32).to(tensor.dtype)

        narrow_args, narrow_kwargs = args, kwargs
        if not mutates(operator):
            narrow_args, narrow_kwargs = tree_map_only(torch.Tensor, wrap, (tuple(args), dict(kwargs)))
        answer = operator(*narrow_args, **narrow_kwargs)
        result = tree_map_only(torch.Tensor, wrap, answer)
        if not wrapped:
            return answer
        self._recorder.finding(
            "int64 computed in int32",
            operator._schema.name,
            "values beyond 2^31 wrapped around; keep them within 32 bits, or compute this on the CPU",
            1.0,
        )
        if mutates(operator) and isinstance(answer, torch.Tensor):
            return answer.copy_(result)
        return result
