"""CUDA programs on another backend, without editing them: ``with pt.cuda_compat("ascend"):`` and ``portable run``.

How it works: `torch.device("cuda:0")` stays what it is; devices are translated where they are *used*. The places are the
functions and methods that take a device (found from the operators' schemas), the module ``torch.cuda``, and the classes that
take a device type. Each is replaced while the mode is on and put back at the end. Ordinary operators are not touched, so they
cost what they always cost; every thread sees the same; and no string is looked at unless it stands where a device is expected.
"""

from __future__ import annotations

from portable.compat.engine import cuda_compat

__all__ = ["cuda_compat"]
