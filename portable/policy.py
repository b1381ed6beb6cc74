"""Which dtypes a backend and generation should compute in, and whether float16's loss scaling is needed."""

from __future__ import annotations

from dataclasses import dataclass

from portable.backend import Backend
from portable.selection import active


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
    """The precision policy of a device.

    Args:
        backend: the active backend by default.
        index: ordinal of the device.
    """
    backend = backend or active()
    generation = backend.generation(index)
    if generation is None:
        return PrecisionPolicy(None, False, f"the generation of this {backend.spec.name} device is not known: float32 is safe")
    if not generation.autocast:
        return PrecisionPolicy(None, False, f"{generation.title} multiplies no 16-bit type faster than float32")
    best = generation.autocast[0]
    if best == "float16":
        return PrecisionPolicy(best, True, f"{generation.title} has float16 but not bfloat16 matrix units: loss scaling needed")
    return PrecisionPolicy(best, False, f"{generation.title} multiplies {best} natively; its range needs no loss scaling")
