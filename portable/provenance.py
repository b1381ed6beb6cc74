"""What the numbers of this process come from, for everything that reports numbers.

``hardware``, or a stand-in that must not be taken for it: ``vendor-package-on-host`` (the vendor's own package above a stand-in
for its driver) or ``emulated`` (see portable.rehearsal).
"""

from __future__ import annotations

from portable.backend import Backend
from portable.selection import active, availability
from portable.spec import Execution

NOTICE = "emulated on CPU: shapes, dtypes, paths and counts are meaningful; times are not"


def execution(backend: Backend | None = None) -> Execution:
    """ "hardware", "vendor-package-on-host" or "emulated".

    Args:
        backend: the active backend by default.
    """
    return availability(backend or active()).execution


def notice(backend: Backend | None = None) -> str:
    """What a report of a stand-in's numbers must say; empty on hardware."""
    found = execution(backend)
    return "" if found == "hardware" else f"{found}; {NOTICE}"
