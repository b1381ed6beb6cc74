"""`pt.precision`: the whole precision policy of a device with its reasons, and the levels that turn its switches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, overload

from portable import levels, selection
from portable.backend import Backend
from portable.errors import ConfigurationError
from portable.levels import PrecisionLevel
from portable.policy import PrecisionPolicy, policy_of
from portable.spec import Advice, Generation
from portable.switches import FULL, Level, State, describe

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Precision:
    """What to compute in on a device, and what its switches say now.

    Attributes:
        backend: its name.
        generation: its name, None where it is not known.
        title: what people call the generation.
        parameters: dtype that parameters are kept in.
        autocast: dtype of matrix products under `pt.autocast`; "float32" where it stays off.
        reduction: dtype that gradients are summed in across processes.
        optimizer: dtype of the optimizer's state.
        scaler: whether `pt.GradScaler` scales.
        scaling: why, and what to know of it.
        level: the level that is set in this process, None if none is.
        matmul_bits: mantissa bits that float32 inputs of a matrix product may be left with as the switches stand; float32 has
            24. None where the generation is not known. Switches that cannot be read count as in a fresh process.
        conv_bits: the same of convolutions.
        switches: every switch that the levels turn here.
        source: where the table of dtypes comes from.
        assumed: what no vendor page states.
    """

    backend: str
    generation: str | None
    title: str
    parameters: Advice
    autocast: Advice
    reduction: Advice
    optimizer: Advice
    scaler: bool
    scaling: str
    level: Level | None
    matmul_bits: int | None
    conv_bits: int | None
    switches: tuple[State, ...]
    source: str
    assumed: tuple[str, ...]

    @property
    def policy(self) -> PrecisionPolicy:
        """The part that `pt.precision_policy` answers."""
        dtype = None if self.autocast.dtype == "float32" else self.autocast.dtype
        return PrecisionPolicy(dtype, self.scaler, self.autocast.reason)

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, for JSON."""
        return {"schema": "portable.precision/1", **asdict(self)}

    def table(self) -> Table:
        """For people."""
        from portable.precision_view import table

        return table(self)

    def __str__(self) -> str:
        from portable.precision_view import text

        return text(self)


@overload
def precision(
    level: None = None, *, backend: str | Backend | None = None, generation: str | None = None, index: int = 0
) -> Precision: ...
@overload
def precision(level: Level) -> PrecisionLevel: ...
def precision(
    level: Level | None = None,
    *,
    backend: str | Backend | None = None,
    generation: str | None = None,
    index: int = 0,
) -> Precision | PrecisionLevel:
    """Without a level: the precision policy of a device, each part with its reason. With one: what sets the level.

    ``with pt.precision("strict"):`` rounds no float32 input and sums nothing in 16 bits while the block runs; ``"default"`` is
    what PyTorch and the vendor ship with, ``"fast"`` allows float32 products 11 mantissa bits (TF32, HF32). Afterwards every
    switch is what it was. Also a decorator; ``pt.precision("strict").keep()`` and the variable ``PORTABLE_PRECISION`` set it
    for the process. The switches are the process's, not the thread's. Autocast is no switch of this kind: it stays as it is.

    Args:
        level: "strict", "default", "fast".
        backend: name or alias of the backend to describe; the active one by default. It need not be available.
        generation: name of a generation in its table ("trn2", "910B2", "7.5"); by default that of the device here.
        index: ordinal of the device here.

    Raises:
        ConfigurationError: an unknown level or generation; a generation is needed because there is no device of the backend
            here; on entering a level, a variable that was read when the process started rules it out.
        BackendNotFound: no plugin provides the backend.
    """
    if level is not None:
        found = levels.checked(level, "pt.precision")
        if backend is not None or generation is not None or index:
            raise ConfigurationError(
                f"pt.precision({level!r}, ...) was called with a backend, generation or index. A level is set on the active "
                "backend (pt.use chooses it); leave the level out to describe another one."
            )
        return PrecisionLevel(found)
    chosen = _backend(backend)
    return described(chosen, _generation(chosen, generation, index))


def _backend(asked: str | Backend | None) -> Backend:
    if isinstance(asked, Backend):
        return asked
    return selection.active() if asked is None else selection.find(asked, " by pt.precision")


def _generation(backend: Backend, asked: str | None, index: int) -> Generation | None:
    if asked is not None:
        if not isinstance(asked, str):
            raise ConfigurationError(
                f"generation {asked!r} was asked for, which is a {type(asked).__name__}, not a name. Use one of "
                f"{', '.join(backend.spec.generations) or 'none: this backend has no table'}, as a string."
            )
        return backend.find_generation(asked)
    here = selection.availability(backend)
    if not here.available:
        raise ConfigurationError(
            f"the precision of the {backend.spec.name} backend was asked for, but no such device is here ({here.reason}). "
            f"Name a generation: {', '.join(backend.spec.generations) or 'none is declared'}."
        )
    if not isinstance(index, int) or not 0 <= index < here.device_count:
        raise ConfigurationError(
            f"the precision of {backend.spec.name} device {index!r} was asked for; there are {here.device_count} "
            f"(0 to {here.device_count - 1})."
        )
    backend.load()
    return backend.generation(index)


def described(backend: Backend, generation: Generation | None) -> Precision:
    """The policy of a generation; None for one that is not known."""
    spec = backend.spec
    policy, advice = policy_of(spec, generation), spec.precision
    switches = tuple(state for control in backend.precision_controls() for state in control.states(generation))
    scaling = "float16's smallest normal number is 6e-5: smaller gradients vanish unless the loss is scaled up"
    if policy.autocast is None:
        scaling = "float32 throughout: nothing to scale"
    elif not policy.scaler:
        scaling = f"{policy.autocast} has float32's range of exponents"
    named = generation.name if generation else None
    return Precision(
        spec.name,
        named,
        generation.title if generation else f"unknown {spec.vendor} device",
        advice.parameters,
        Advice(policy.autocast or "float32", policy.reason),
        advice.reduction,
        advice.optimizer,
        policy.scaler,
        "; ".join([scaling, *(text for name, text in advice.scaling.items() if not name or name == named)]),
        levels.in_force(),
        _least(switches, "matrix products", generation),
        _least(switches, "convolutions", generation),
        switches,
        generation.source if generation else "",
        generation.assumed if generation else (),
    )


def operation_bits(backend: Backend, generation: Generation, level: Level) -> tuple[int, int]:
    """Mantissa bits of (matrix products, convolutions) that a level allows on a generation, from the declarations alone."""
    settings = [setting for control in backend.precision_controls() for setting in control.documented()]

    def least(governs: str) -> int:
        allowed = [setting.formats[level] for setting in settings if governs in setting.governs and setting.formats]
        return min(describe(format_, generation)[0] or FULL for format_ in (None, *allowed))

    return least("matrix products"), least("convolutions")


def _least(switches: Sequence[State], governs: str, generation: Generation | None) -> int | None:
    """The fewest mantissa bits that the switches of an operation leave."""
    found = [state for state in switches if governs in state.governs or state.fixed]
    if any(state.bits is None for state in found):
        return None
    return min((state.bits or 0 for state in found), default=describe(None, generation)[0] or FULL)
