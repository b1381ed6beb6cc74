"""Huawei Ascend through torch_npu, device type ``npu``.

Nothing here has run on an Ascend device. The tables are checked against the vendor's own wheel (its sources and the names in
its libraries) and documentation; each fact says which. See docs/backends.md.
"""

from __future__ import annotations

from portable.backend import Backend
from portable.hookspecs import hookimpl


@hookimpl
def portable_backend() -> Backend:
    from portable_ascend.backend import AscendBackend

    return AscendBackend()
