"""A PyTorch device of the PrivateUse1 kind, written in Python, for any `Profile`.

Its tensors are plain `torch.Tensor` objects whose device is the profile's and whose bytes lie in CPU memory
(`portable.rehearsal.handles`). Views, autograd, parameters, Dynamo and serialization are PyTorch's own. Each other operator is
run by the CPU on the same bytes, under the profile's rules, and observed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from portable.rehearsal import kernels
from portable.rehearsal.generator import Randomness
from portable.rehearsal.handles import lowered, raised
from portable.rehearsal.memory import Memory
from portable.rehearsal.numerics import Numerics
from portable.rehearsal.observing import Observer
from portable.rehearsal.profile import Profile
from portable.rehearsal.recorder import Recorder

_CPU = torch.device("cpu")
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten = torch.ops.aten
_Tensor = torch.Tensor
# PyTorch's composite kernels of these work by metadata, or make a tensor and fill it through other operators.
_COMPOSITE = frozenset(
    {
        "_unsafe_view", "lift", "lift_fresh", "detach", "detach_", "t_", "transpose_", "squeeze_", "unsqueeze_", "resize_as_", "set",
        "resize", "resize_as", "is_pinned", "_pin_memory", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
        "randn_like", "randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "is_same_size", "is_coalesced", "sparse_dim",
        "dense_dim", "_has_same_storage_numel", "_new_zeros_with_same_feature_meta", "_assert_tensor_metadata", "_lazy_clone",
        "_functional_assert_scalar", "_functional_sym_constrain_range", "_functional_sym_constrain_range_for_size",
        "convolution_overrideable", "convolution_backward_overrideable", "_to_copy",
    }
)  # fmt: skip
# Views whose kernels read nothing but metadata, so that the CPU's kernel serves a tensor of any device.
_VIEWS = ("as_strided.default", "view.default", "_reshape_alias.default", "unfold.default")
# Operators that take CPU tensors beside the device's: copies, indices, sequence lengths.
_MIXED = frozenset(
    {
        "copy",
        "index",
        "index_put",
        "_index_put_impl",
        "_unsafe_index",
        "_unsafe_index_put",
        "_pack_padded_sequence",
        "_ctc_loss",
    }
)
_UNKNOWN = object()
_KEYS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


class Device:
    """The emulated device of this process. Made by `portable.rehearsal.start`.

    Attributes:
        profile, recorder, observer: see their classes.
        memory: one `Memory` per device.
        current: ordinal of the current device.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.recorder = Recorder()
        self.observer = Observer(profile, self.recorder)
        self.numerics = Numerics(profile, self.recorder)
        self.kind = profile.device_type
        self.memory = [
            Memory(profile.memory.value, profile.rounding.value, f"{self.kind}:{index}")
            for index in range(profile.device_count.value)
        ]
        self.current = 0
        self.recorder.peak = lambda: max(memory.peak for memory in self.memory)
        self._refused = profile.refusals.value.dtypes
        # dtypes whose presence can change the arithmetic; everything else runs straight through.
        self._watched = frozenset(profile.computes_in.value)
        self._product = profile.matmul_dtype.value is not None or profile.integer_matmul_bits.value is not None
        self._written: dict[Any, Any] = {}
        self.random = Randomness(profile.random.value, profile.device_count.value)
        self._overrides: dict[Any, Callable[..., Any]] = {}
        self._index_of: Callable[[torch.Tensor], int] = (
            (lambda tensor: 0) if len(self.memory) == 1 else (lambda tensor: tensor.device.index)
        )

    # -- between the CPU and the device --------------------------------------------------------------------------------------

    def put(self, host: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """The device's tensor over a CPU tensor's memory, which from now on counts as the device's.

        Raises:
            torch.OutOfMemoryError: it does not fit.
            RuntimeError: the device has no tensors of this dtype.
        """
        if index is None:
            index = self.current
        if host.dtype in self._refused:
            raise self._no_dtype(host.dtype)
        size = host.nbytes
        if size:
            host._block = self.memory[index].block(size)  # type: ignore[attr-defined]
        return raised(host, index)

    def _no_dtype(self, dtype: torch.dtype) -> RuntimeError:
        return RuntimeError(
            f"a tensor of dtype {str(dtype)[6:]} was asked for on {self.kind}, whose devices have none. "
            "Use another dtype (complex numbers as pairs of real ones: torch.view_as_real), or keep this on the CPU."
        )

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor over the memory of one of the device's tensors; a tensor on the CPU is answered itself."""
        return tensor if tensor.is_cpu else lowered(tensor)

    # -- operators -----------------------------------------------------------------------------------------------------------

    def run(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one operator: the kernel of every operator that has no other."""
        index = -1
        dtypes: set[torch.dtype] = set()
        strangers: list[torch.Tensor] = []
        index_of, lowered = self._index_of, self.host

        def lower(value: Any) -> Any:
            nonlocal index
            if isinstance(value, _Tensor):
                dtypes.add(value.dtype)
                if value.is_cpu:
                    strangers.append(value)
                    return value
                mine = index_of(value)
                if index < 0:
                    index = mine
                elif mine != index and not operator._schema.name == "aten::copy_":
                    raise RuntimeError(
                        f"{operator._schema.name}: tensors are on {self.kind}:{index} and {self.kind}:{mine}, but all must be on "
                        "one device. Move them with .to(device)."
                    )
                return lowered(value)
            if isinstance(value, (list, tuple)):
                return type(value)(map(lower, value)) if value and not isinstance(value[0], (int, float)) else value
            if isinstance(value, torch.device):
                return _CPU
            return value

        low = [lower(value) for value in args]
        asked = kwargs.get("device")
        low_kwargs = {name: lower(value) for name, value in kwargs.items()} if kwargs else kwargs
        if low_kwargs and "generator" in low_kwargs:
            low_kwargs["generator"] = self.generator(low_kwargs["generator"], index)
        if strangers:
            self._check_strangers(operator, strangers)
        override = self._overrides.get(operator)
        written = self._written.get(operator, _UNKNOWN)
        if written is _UNKNOWN:
            written = self._written[operator] = _written(operator)
        if written is not None and kwargs:
            self._replace_empty_outs(written, kwargs, low_kwargs)
        if override is not None or not self.random.shared:
            answer = self._special(operator, override, low, low_kwargs, max(index, 0))
        elif dtypes & self._watched or self._product or low_kwargs.get("dtype") in self._watched:
            answer = self.numerics.run(operator, low, low_kwargs, dtypes)
        else:
            answer = operator(*low, **low_kwargs)
        if index < 0:
            index = self.current if asked is None or asked.index is None else asked.index
        if written is not None:
            out = self._resolve_written(written, args, kwargs, low, low_kwargs)
        elif isinstance(answer, _Tensor):
            out = answer if asked is not None and asked.type == "cpu" else self.put(answer, index)
        elif isinstance(answer, (tuple, list)):
            out = type(answer)(self.put(x, index) if isinstance(x, _Tensor) else x for x in answer)
        else:
            out = answer
        self.observer.observe(operator, args, kwargs, out)
        return out

    def _special(self, operator: Any, override: Any, args: list[Any], kwargs: dict[str, Any], index: int) -> Any:
        call = operator if override is None else partial(override, operator)
        packed = (args, kwargs) if override is None else ((args, kwargs), {})
        if not self.random.shared and torch.Tag.nondeterministic_seeded in operator.tags:
            return self.random.draw(index, call, *packed)
        return call(*packed[0], **packed[1])

    def _check_strangers(self, operator: Any, strangers: Sequence[torch.Tensor]) -> None:
        """CPU tensors among a device operator's arguments: only numbers, and where PyTorch allows them for any device."""
        if kernels.base_name(operator) in _MIXED or all(tensor.dim() == 0 for tensor in strangers):
            return
        raise RuntimeError(
            f"{operator._schema.name}: expected all tensors to be on {self.kind}, but one of shape {tuple(strangers[0].shape)} is on "
            f"the CPU. Move it with .to({self.kind!r})."
        )

    def _replace_empty_outs(self, written: Sequence[tuple[int, str]], kwargs: Mapping[str, Any], low: dict[str, Any]) -> None:
        """PyTorch sizes an empty ``out=`` tensor itself, which memory of an exchanged tensor does not allow."""
        for _, name in written:
            if isinstance(kwargs.get(name), _Tensor) and kwargs[name].numel() == 0:
                low[name] = torch.empty(0, dtype=kwargs[name].dtype)

    def _resolve_written(
        self,
        written: Sequence[tuple[int, str]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        low: Sequence[Any],
        low_kwargs: Mapping[str, Any],
    ) -> Any:
        """The operator's own arguments, which it answers; an ``out=`` that was sized gets its new memory."""
        answers = []
        for position, name in written:
            given, host = (args[position], low[position]) if position < len(args) else (kwargs[name], low_kwargs[name])
            if isinstance(given, _Tensor) and given.shape != host.shape:
                _aten.set_.source_Tensor.redispatch(_CPU_KEYS, given, self.put(host, self._index_of(given)))
            answers.append(given)
        return answers[0] if len(answers) == 1 else tuple(answers)

    def generator(self, given: torch.Generator | None, index: int) -> torch.Generator | None:
        """The CPU generator from which a random operator draws.

        Raises:
            RuntimeError: a generator of another device was passed.
        """
        if given is not None:
            raise RuntimeError(
                f"a {given.device.type} generator was passed to an operator on {self.kind}, which has no generator objects of its "
                f"own. Draw on the CPU with that generator and move the result: torch.randn(..., generator=g).to({self.kind!r})."
            )
        return None

    # -- special operators ---------------------------------------------------------------------------------------------------

    def _empty(self, operator: Any, size: Sequence[int], *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)
        index = self.current if device is None or device.index is None else device.index
        if not 0 <= index < len(self.memory):
            raise RuntimeError(
                f"{self.kind}:{index} was asked for, but this process has {len(self.memory)} {self.kind} "
                f"device{'s' if len(self.memory) > 1 else ''}. Use {self.kind}:0."
            )
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if dtype in self._refused:
            raise self._no_dtype(dtype)
        self.memory[index].check(torch.Size(size).numel() * dtype.itemsize)  # before the host's memory is taken
        out = self.put(operator(size, *args, **kwargs), index)
        if not self.recorder.paused:
            self.recorder.op(operator._schema.name)
        return out

    def _resize(self, tensor: torch.Tensor, size: Sequence[int], memory_format: Any = None, **kwargs: Any) -> torch.Tensor:
        needed = torch.Size(size).numel() * tensor.element_size()
        if needed > tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size():
            grown = torch.empty(size, dtype=tensor.dtype)
            old = self.host(tensor.detach()).flatten()
            grown.flatten()[: old.numel()].copy_(old[: grown.numel()])
            _aten.set_.source_Tensor.redispatch(_CPU_KEYS, tensor, self.put(grown, self._index_of(tensor)))
            return tensor
        return _aten.resize_.default.redispatch(_CPU_KEYS, tensor, size)

    def _to_copy(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        device = kwargs.pop("device", None)
        kwargs.pop("non_blocking", None)
        kwargs.pop("pin_memory", None)
        operator = _aten._to_copy.default
        if (device is None or device.type == self.kind) and kwargs.get("dtype") in self._refused:
            raise self._no_dtype(kwargs["dtype"])
        host = operator(self.host(tensor), **kwargs)
        if device is not None and device.type == "cpu":
            out = host
        else:
            index = tensor.device.index if device is None else self.current if device.index is None else device.index
            out = self.put(host, index)
        self.observer.observe(operator, (tensor,), kwargs, out)
        return out

    def _keeps_parameters(self, tensor: torch.Tensor, other: torch.Tensor) -> bool:
        same = tensor.device.type == other.device.type
        return same or self.profile.keeps_parameters.value

    # -- registration --------------------------------------------------------------------------------------------------------

    def override(self, operator: Any, function: Callable[[Any, list[Any], dict[str, Any]], Any]) -> None:
        """Compute an operator by ``function(operator, args, kwargs)`` on CPU tensors instead of by the CPU's kernel."""
        self._overrides[operator] = function

    def register(self) -> tuple[torch.library.Library, ...]:
        """Give PyTorch the device's kernels; they last as long as the libraries answered."""
        rest = torch.library.Library("_", "IMPL")
        rest.fallback(self.run, "PrivateUse1")
        aten = torch.library.Library("aten", "IMPL")
        for operator in _explicit():
            aten.impl(operator._name[6:], partial(self.run, operator), "PrivateUse1")
        for name in _VIEWS:
            operator = _overload(name)
            aten.impl(operator._name[6:], partial(operator.redispatch, _CPU_KEYS), "PrivateUse1")
        for name in ("set_.source_Tensor", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.default"):
            operator = _overload(name)
            aten.impl(operator._name[6:], partial(operator.redispatch, _CPU_KEYS), "PrivateUse1")
        for name in ("empty.memory_format", "empty_strided.default"):
            operator = _overload(name)
            aten.impl(operator._name[6:], partial(self._empty, operator), "PrivateUse1")
        # Or Module.to would make new parameters, and weights that two layers share would come apart.
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            aten.impl("_has_compatible_shallow_copy_type", self._keeps_parameters, key)
        aten.impl("resize_", self._resize, "PrivateUse1")
        aten.impl("_to_copy", self._to_copy, "PrivateUse1")
        return rest, aten


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def _explicit() -> list[Any]:
    """Operators which PyTorch would take apart on the device, but which a device has kernels for.

    PyTorch registers a generic kernel for them ("CompositeExplicitAutograd" in native_functions.yaml), which goes before the
    fallback for the rest.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or not any(has(name, key) for key in _KEYS):
            continue
        try:
            operator = _overload(name[6:])
        except (AttributeError, RuntimeError):
            continue  # an operator of TorchScript
        schema = operator._schema
        takes_tensor = any("Tensor" in str(argument.type) for argument in schema.arguments)
        view = any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)
        packet = name[6:].partition(".")[0]
        generated = schema.overload_name.endswith("out") and "CompositeExplicitAutograd" in _composite(name)
        if (
            takes_tensor
            and not view
            and not generated
            and packet not in _COMPOSITE
            and kernels.base_name(operator) not in _COMPOSITE
        ):
            found.append(operator)
    return found


def _composite(name: str) -> tuple[str, ...]:
    return tuple(key for key in _KEYS if torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _written(operator: Any) -> tuple[tuple[int, str], ...] | None:
    """(position, name) of the arguments that the operator writes and answers; None if it answers new tensors."""
    schema = operator._schema
    if not schema.returns and schema.is_mutable:  # foreach and fused operators answer nothing
        return None
    answered = {
        alias
        for ret in schema.returns
        if ret.alias_info is not None and ret.alias_info.is_write
        for alias in ret.alias_info.after_set
    }
    if not answered:
        return None
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and answered & set(argument.alias_info.after_set)
    )
