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

from portable.rehearsal import kernels, sources
from portable.rehearsal.generator import Randomness
from portable.rehearsal.handles import lowered, raised
from portable.rehearsal.memory import Memory
from portable.rehearsal.numerics import Numerics
from portable.rehearsal.observing import Observer
from portable.rehearsal.profile import Profile
from portable.rehearsal.recorder import Recorder
from portable.rehearsal.schemas import written

_CPU = torch.device("cpu")
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_Tensor = torch.Tensor
# Operators that take CPU tensors beside the device's: copies, indices, sequence lengths.
_MIXED = frozenset(
    {
        "copy", "index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put", "_pack_padded_sequence",
        "_ctc_loss",
    }
)  # fmt: skip
_UNKNOWN = object()


class Device:
    """The emulated device of this process. Made by `portable.rehearsal.start`.

    Attributes:
        profile, recorder, observer: see their classes.
        memory: one `Memory` per device.
        current: ordinal of the current device.
        lenient: what the real device refuses is recorded as a finding "refused" and computed anyway, instead of raised.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.recorder = Recorder()
        refuse = self.recorder.refuse
        self.observer = Observer(profile, self.recorder)
        self.numerics = Numerics(profile, self.recorder)
        self.kind = profile.device_type
        self.memory = [
            Memory(profile.memory.value, profile.rounding.value, f"{self.kind}:{index}", refuse, sources.line)
            for index in range(profile.device_count.value)
        ]
        self.current = 0
        self.recorder.peak = lambda: max(memory.peak for memory in self.memory)
        self.recorder.peak_line = lambda: max(self.memory, key=lambda memory: memory.peak).peak_line
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

    @property
    def lenient(self) -> bool:
        """Whether a refusal is recorded and computed anyway."""
        return self.recorder.lenient

    @lenient.setter
    def lenient(self, value: bool) -> None:
        self.recorder.lenient = value

    # -- between the CPU and the device --------------------------------------------------------------------------------------

    def put(self, host: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """The device's tensor over a CPU tensor's memory, which from now on counts as the device's.

        Raises:
            torch.OutOfMemoryError: it does not fit.
            RuntimeError: the device has no tensors of this dtype.
            NotImplementedError: the tensor is sparse.
        """
        if index is None:
            index = self.current_index()
        self.check_dtype(host.dtype)
        if host.layout is not torch.strided:
            raise NotImplementedError(
                f"a tensor of layout {str(host.layout)[6:]} was asked for on {self.kind}, whose devices have dense tensors "
                "only. Use dense tensors there (nn.Embedding(sparse=False)), or keep sparse ones on the CPU."
            )
        size = host.nbytes
        if size:
            host._block = self.memory[index].block(size)  # type: ignore[attr-defined]
        return raised(host, index)

    def current_index(self) -> int:
        """Ordinal of the device that this thread's new tensors go to."""
        return self.current

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse a dtype that no tensor of the device may have.

        Raises:
            RuntimeError: it is one, and the device is not lenient.
        """
        if dtype not in self._refused:
            return
        name = str(dtype)[6:]
        pairs = " (complex numbers as pairs of real ones: torch.view_as_real)" if dtype.is_complex else ""
        self.recorder.refuse(
            name,
            RuntimeError(
                f"a tensor of dtype {name} was asked for on {self.kind}, whose devices have none "
                f"({self.profile.title}). Use another dtype{pairs}, or keep this on the CPU."
            ),
        )

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor over the memory of one of the device's tensors; a tensor on the CPU is answered itself."""
        if tensor.is_cpu:
            return tensor
        low = lowered(tensor)
        # PyTorch conjugates and negates lazily, by a bit of the tensor that the exchange does not carry.
        if tensor.is_conj():
            low = torch._conj(low)
        return torch._neg_view(low) if tensor.is_neg() else low

    # -- operators -----------------------------------------------------------------------------------------------------------

    def run(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one operator: the kernel of every operator that has no other."""
        index = -1
        dtypes: set[torch.dtype] = set()
        strangers: list[torch.Tensor] = []
        index_of, lowered = self._index_of, self.host

        def leaf(value: Any) -> Any:
            nonlocal index
            if isinstance(value, _Tensor):
                dtypes.add(value.dtype)
                if value.is_cpu:
                    strangers.append(value)
                    return value
                mine = index_of(value)
                if index < 0:
                    index = mine
                elif mine != index and operator._schema.name != "aten::copy_":
                    raise RuntimeError(
                        f"{operator._schema.name}: expected all tensors to be on the same device, but found "
                        f"{self.kind}:{index} and {self.kind}:{mine}. Move them with .to(device)."
                    )
                return lowered(value)
            return _CPU if isinstance(value, torch.device) else value

        def lower(value: Any) -> Any:
            # Lists of tensors are all the nesting that operators have. (A function that refers to itself would be garbage.)
            if isinstance(value, (list, tuple)):
                return type(value)(map(leaf, value)) if value and not isinstance(value[0], (int, float)) else value
            return leaf(value)

        low = [lower(value) for value in args]
        asked = kwargs.get("device")
        low_kwargs = {name: lower(value) for name, value in kwargs.items()} if kwargs else kwargs
        if index < 0:
            index = self.current_index() if asked is None or asked.index is None else asked.index
        if low_kwargs and "generator" in low_kwargs:
            low_kwargs["generator"] = self.generator(low_kwargs["generator"], index)
        if strangers:
            self._check_strangers(operator, strangers)
        override = self._overrides.get(operator)
        targets = self._written.get(operator, _UNKNOWN)
        if targets is _UNKNOWN:
            targets = self._written[operator] = written(operator)
        if targets is not None and kwargs:
            self._replace_empty_outs(targets, kwargs, low_kwargs)
        if override is not None or not self.random.shared:
            answer = self._special(operator, override, low, low_kwargs, index)
        elif dtypes & self._watched or self._product or low_kwargs.get("dtype") in self._watched:
            answer = self.numerics.run(operator, low, low_kwargs, dtypes)
        else:
            answer = operator(*low, **low_kwargs)
        if targets is not None:
            out = self._resolve_written(targets, args, kwargs, low, low_kwargs)
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
            f"{operator._schema.name}: expected all tensors to be on {self.kind}, but one of shape "
            f"{tuple(strangers[0].shape)} is on the CPU. Move it with .to({self.kind!r})."
        )

    def _replace_empty_outs(self, targets: Sequence[tuple[int, str]], kwargs: Mapping[str, Any], low: dict[str, Any]) -> None:
        """PyTorch sizes an empty ``out=`` tensor itself, which memory of an exchanged tensor does not allow."""
        for _, name in targets:
            if isinstance(kwargs.get(name), _Tensor) and kwargs[name].numel() == 0:
                low[name] = torch.empty(0, dtype=kwargs[name].dtype)

    def _resolve_written(
        self,
        targets: Sequence[tuple[int, str]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        low: Sequence[Any],
        low_kwargs: Mapping[str, Any],
    ) -> Any:
        """The operator's own arguments, which it answers; an ``out=`` that was sized gets its new memory."""
        answers = []
        for position, name in targets:
            given, host = (args[position], low[position]) if position < len(args) else (kwargs[name], low_kwargs[name])
            if isinstance(given, _Tensor) and given.shape != host.shape:
                self._adopt(given, host)
            answers.append(given)
        return answers[0] if len(answers) == 1 else tuple(answers)

    def _adopt(self, given: torch.Tensor, host: torch.Tensor) -> None:
        """Let a tensor of the device have the shape, and where it is another the memory, of a CPU tensor."""
        moved = host.data_ptr() - given.data_ptr()
        if 0 <= moved <= given.untyped_storage().nbytes():
            # Over its own memory. Setting the storage would drop the only owner: `host` keeps the tensor, not its storage.
            given.as_strided_(host.shape, host.stride(), given.storage_offset() + moved // given.element_size())
        elif 0 < given.storage_offset() * given.element_size() + host.nbytes <= given.untyped_storage().nbytes():
            # An empty view with room behind it: PyTorch writes there, into what it is a view of (fft.fftfreq does so).
            given.as_strided_(host.shape, host.stride())
            self.host(given).copy_(host)
        else:
            torch.ops.aten.set_.source_Tensor.redispatch(_CPU_KEYS, given, self.put(host, self._index_of(given)))

    def generator(self, given: torch.Generator | None, index: int) -> torch.Generator | None:
        """The CPU generator from which a random operator draws.

        Raises:
            RuntimeError: a generator of another device was passed.
        """
        if given is not None:
            self.recorder.refuse(
                "generator=",
                RuntimeError(
                    f"a {given.device.type} generator was passed to an operator on {self.kind}, which has no generator objects "
                    "of its own. Draw on the CPU with that generator and move the result: "
                    f"torch.randn(..., generator=g).to({self.kind!r})."
                ),
            )
        return given

    def override(self, operator: Any, function: Callable[[Any, list[Any], dict[str, Any]], Any]) -> None:
        """Compute an operator by ``function(operator, args, kwargs)`` on CPU tensors instead of by the CPU's kernel."""
        self._overrides[operator] = function
