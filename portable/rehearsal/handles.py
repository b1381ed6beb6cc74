"""Two tensors over the same bytes: one on the emulated device, one on the CPU.

PyTorch exchanges tensors with other libraries as DLPack structures (github.com/dmlc/dlpack, dlpack.h), which name the device
next to the pointer. A structure exported from a CPU tensor and imported with the device type "extension" gives a plain
`torch.Tensor` of the PrivateUse1 device over the CPU's memory, and the other way round. Each import holds the exported tensor,
so the memory lives as long as either does.
"""

from __future__ import annotations

import ctypes

import torch

_CPU, _EXTENSION = 1, 12  # DLDeviceType: kDLCPU, kDLExtDev (PyTorch maps the latter to PrivateUse1)
_DEVICE = ctypes.sizeof(ctypes.c_void_p)  # DLTensor: void* data; DLDevice {int32 type; int32 index}; ...
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_int32 = ctypes.c_int32
_to = torch._C._to_dlpack  # type: ignore[attr-defined]
_from = torch._C._from_dlpack  # type: ignore[attr-defined]


def raised(host: torch.Tensor, index: int) -> torch.Tensor:
    """The device's tensor over the memory of a CPU tensor, with its shape and strides."""
    capsule = _to(host)
    address = _pointer(capsule, b"dltensor") + _DEVICE
    _int32.from_address(address).value = _EXTENSION
    if index:
        _int32.from_address(address + 4).value = index
    return _from(capsule)


def lowered(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor over the memory of a tensor of the device, with its shape and strides."""
    capsule = _to(tensor)
    address = _pointer(capsule, b"dltensor") + _DEVICE
    _int32.from_address(address).value = _CPU
    _int32.from_address(address + 4).value = 0
    return _from(capsule)
