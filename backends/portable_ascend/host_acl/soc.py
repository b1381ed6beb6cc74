"""The systems-on-chip that the host runtime can claim to be.

torch_npu decides by the SoC's name (``aclrtGetSocName``): which attention kernel runs, whether bfloat16 exists, which
operators are compiled at run time. The names are those that libtorch_npu.so of the 2.13.0 wheel compares with; core counts
and cache sizes are those of CANN's platform files as far as published, and only reach ``get_device_properties``.
"""

from __future__ import annotations

from dataclasses import dataclass

from portable.errors import ConfigurationError

_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Soc:
    """One SoC.

    Attributes:
        name: what ``aclrtGetSocName`` answers.
        hbm: bytes of device memory by default.
        cube, vector: matrix and vector cores.
        l2: bytes of the second-level cache.
    """

    name: str
    hbm: int
    cube: int
    vector: int
    l2: int


_FAMILIES = (
    # The first series: one unit does both matrix and vector work.
    (("Ascend910A", "Ascend910B", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA"), 32, 32, 32, 32),
    (("Ascend910B1", "Ascend910B2", "Ascend910B2C"), 64, 24, 48, 192),
    (("Ascend910B3",), 64, 20, 40, 192),
    (("Ascend910B4",), 32, 20, 40, 96),
    (
        (
            *("Ascend910_9391", "Ascend910_9392", "Ascend910_9381", "Ascend910_9382"),
            *("Ascend910_9372", "Ascend910_9362", "Ascend910_9363"),
        ),
        *(64, 24, 48, 192),
    ),
    # Assumed: no platform file of the 950 series is published; the counts are placeholders of the order of the 910C's.
    (("Ascend950PR_9579", "Ascend950PR_9589", "Ascend950PR_9599"), 128, 32, 64, 128),
    (("Ascend950DT_9571", "Ascend950DT_9581", "Ascend950DT_9591"), 144, 32, 64, 128),
)

SOCS = {name: Soc(name, hbm * _GIB, cube, vector, l2 * _MIB) for names, hbm, cube, vector, l2 in _FAMILIES for name in names}

# What people call them. A 910C package is two dies, each a device with an SoC name of the 910_93 family.
_ALIASES = {
    "910a": "Ascend910A",
    "910b1": "Ascend910B1",
    "910b2": "Ascend910B2",
    "910b3": "Ascend910B3",
    "910b4": "Ascend910B4",
    "910b": "Ascend910B2",
    "910c": "Ascend910_9391",
    "950": "Ascend950PR_9579",
    "950pr": "Ascend950PR_9579",
    "950dt": "Ascend950DT_9571",
}

DEFAULT = "Ascend910B2"


def soc(name: str) -> Soc:
    """The SoC of a vendor's name ("Ascend910B2") or a common one ("910B2", "910C", "Ascend910C", "950").

    "910B" is taken for what people mean by it, the 910B2; the vendor's own "Ascend910B" is a part of the first series.

    Raises:
        ConfigurationError: there is no such SoC.
    """
    if name in SOCS:
        return SOCS[name]
    short = name.strip().lower().removeprefix("ascend")
    if short in _ALIASES:
        return SOCS[_ALIASES[short]]
    found = next((known for known in SOCS if known.lower() == name.strip().lower()), None)
    if found:
        return SOCS[found]
    raise ConfigurationError(
        f"the host ACL runtime was asked to be the SoC {name!r}, which torch_npu does not know. Use one of "
        f"{', '.join(sorted({*(alias.upper() for alias in _ALIASES)}))}, or a full name: {', '.join(SOCS)}."
    )
