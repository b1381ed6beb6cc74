"""Which dtypes a backend and generation should compute in, and whether float16's loss scaling is needed."""

from __future__ import annotations

from dataclasses import dataclass

from portable.backend import Backend
from portable.selection import active
from portable.spec import BackendSpec, Generation


@dataclass(frozen=True)
class PrecisionPolicy:
    """What `pt.autocast` and `pt.GradScaler` follow.

    Attributes:
        autocast: dtype that matrix products run in under autocast ("bfloat16"); None: autocast stays off.
        scaler: whether gradients need loss scaling (float16's smallest normal number is 6e-5, so small gradients vanish;
            bfloat16 has float32's exponent range: Micikevicius et al., Mixed Precision Training, ICLR 2018).
        reason: why.
    """

    autocast: str | None
    scaler: bool
    reason: str


def precision_policy(backend: Backend | None = None, index: int = 0) -> PrecisionPolicy:
    """The precision policy of a device: the part of `pt.precision` that autocast and the scaler follow.

    Args:
        backend: the active backend by default.
        index: ordinal of the device.
    """
    backend = backend or active()
    return policy_of(backend.spec, backend.generation(index))


def policy_of(spec: BackendSpec, generation: Generation | None) -> PrecisionPolicy:
    """The policy of a generation, None for one that is not known; the device need not be here."""
    if generation is None:
        return PrecisionPolicy(None, False, f"the generation of this {spec.name} device is not known: float32 is safe")
    best = generation.autocast[0] if generation.autocast else None
    known = spec.precision.reasons.get(generation.name)
    if known is not None:
        return PrecisionPolicy(best, best == "float16", known)
    title = generation.title
    if best is None:
        return PrecisionPolicy(None, False, f"{title} multiplies no 16-bit type faster than float32")
    if best == "float16":
        return PrecisionPolicy(best, True, f"{title} has no bfloat16 matrix units: float16, with loss scaling")
    return PrecisionPolicy(best, False, f"{title} multiplies {best} natively; its range needs no loss scaling")
