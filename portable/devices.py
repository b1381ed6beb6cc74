"""Devices: which there are, which is current, what they are."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch

from portable.errors import ConfigurationError, DeviceIndexError
from portable.selection import active, call
from portable.spec import Generation

DeviceLike: TypeAlias = "torch.device | int | str | None"


def device(index: DeviceLike = None) -> torch.device:
    """The device to put models and tensors on.

    Args:
        index: None for the current device of the active backend, an ordinal for another one, or a torch.device or string,
            which is checked and returned ("cuda:1"; for another backend's device call `pt.use` first).

    Returns:
        A torch.device of the active backend's type; "cpu" has no ordinal.

    Note:
        ``torch.cuda.device`` is a context manager; that is `pt.device_index` here (torch.accelerator's name for it), and
        `portable.cuda.device` under the old name.

    Raises:
        DeviceIndexError: the ordinal is outside ``range(device_count())``.
        ConfigurationError: the device belongs to another backend, or the string names no device.
    """
    kind = active().spec.device_type
    if index is None:
        return torch.device(kind) if kind == "cpu" else torch.device(kind, call("current_device")())
    if isinstance(index, int):
        return torch.device(kind) if _checked(index) == 0 and kind == "cpu" else torch.device(kind, index)
    try:
        found = torch.device(index)
    except RuntimeError as error:
        raise ConfigurationError(
            f"device {index!r} was asked for, but PyTorch does not know it ({str(error).splitlines()[0]}). "
            f"Use pt.device(), pt.device(0), or {kind!r}."
        ) from error
    if found.type not in (kind, "cpu"):
        raise ConfigurationError(
            f"device {str(index)!r} was asked for, but the active backend is {active().spec.name} (device type {kind!r}). "
            "Call pt.use() with that device's backend first, or pt.device() for the active one."
        )
    if found.type == kind and found.index is not None:
        _checked(found.index)
    return found


def _checked(index: int) -> int:
    count = device_count()
    if not 0 <= index < count:
        raise DeviceIndexError(
            f"device index {index} was asked for, but the {active().spec.name} backend has {count} "
            f"device{'' if count == 1 else 's'}. Use an index from 0 to {count - 1}, or pt.device() for the current one."
        )
    return index


def _ordinal(device: DeviceLike) -> int:
    """The ordinal that a device argument means on the active backend."""
    if isinstance(device, int):
        return _checked(device)
    if device is None:
        return int(call("current_device")())
    found = torch.device(device)
    return _checked(found.index) if found.index is not None else int(call("current_device")())


def is_available() -> bool:
    """Whether the active backend has a device that can be used. True for the CPU backend as well."""
    return bool(call("is_available")())


def is_initialized() -> bool:
    """Whether the device runtime has been started in this process."""
    return bool(call("is_initialized")())


def init() -> None:
    """Start the device runtime now instead of at first use."""
    call("init")()


def device_count() -> int:
    """Number of devices of the active backend; 1 for the CPU."""
    return int(call("device_count")())


def current_device() -> int:
    """Ordinal of the current device; 0 for the CPU."""
    return int(call("current_device")())


def set_device(device: DeviceLike) -> None:
    """Make a device current.

    Raises:
        DeviceIndexError: there is no such device.
    """
    if isinstance(device, int) and device < 0:
        return  # torch.cuda.set_device documents a negative ordinal as "do nothing"
    call("set_device")(_ordinal(device))


def device_index(device: DeviceLike) -> AbstractContextManager[Any]:
    """Context manager: another current device inside the block. ``torch.cuda.device`` under torch.accelerator's name.

    Raises:
        DeviceIndexError: there is no such device.
    """
    return call("device")(_ordinal(device))


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Context manager: the device of ``tensor`` is current inside the block."""
    return call("device_of")(tensor)


def get_device_name(device: DeviceLike = None) -> str:
    """What people call the device ("NVIDIA H200", "Ascend910B2", the CPU's model name)."""
    return active().device_name(_ordinal(device))


def get_device_properties(device: DeviceLike = None) -> Any:
    """The vendor's description of a device; it has at least ``name`` and ``total_memory`` (bytes)."""
    return call("get_device_properties")(_ordinal(device))


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """(major, minor) CUDA compute capability; (0, 0) on devices that have none. See also `generation`."""
    return call("get_device_capability")(_ordinal(device))


def get_arch_list() -> list[str]:
    """CUDA architectures that this PyTorch build has kernels for; empty on other devices."""
    return list(call("get_arch_list")())


def generation(device: DeviceLike = None) -> Generation | None:
    """What is declared of the device's generation: dtypes, memory, bandwidth, peak rates. None if it is not known."""
    return active().generation(_ordinal(device))


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Whether one device reads another's memory directly."""
    return bool(call("can_device_access_peer")(_ordinal(device), _ordinal(peer_device)))


def synchronize(device: DeviceLike = None) -> None:
    """Wait until the device has done all queued work. Returns at once on the CPU, which queues nothing."""
    call("synchronize")(device)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether bfloat16 computes on the current device.

    Args:
        including_emulation: count software emulation as support, as torch.cuda does by default.
    """
    return bool(call("is_bf16_supported")(including_emulation))


def is_tf32_supported() -> bool:
    """Whether float32 matrix products can run in TF32 on the current device."""
    return bool(call("is_tf32_supported")())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means exhausted device memory, whichever way the backend says so.

    Better than comparing message texts: PyTorch raises `OutOfMemoryError` from its device allocators, but a plain
    RuntimeError from the CPU allocator, and vendors differ.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in active().spec.out_of_memory)


def utilization(device: DeviceLike = None) -> int:
    """Percent of the last interval in which the device was busy."""
    return int(call("utilization")(_ordinal(device)))


def memory_usage(device: DeviceLike = None) -> int:
    """Percent of the last interval in which device memory was read or written."""
    return int(call("memory_usage")(_ordinal(device)))


def temperature(device: DeviceLike = None) -> int:
    """Degrees Celsius."""
    return int(call("temperature")(_ordinal(device)))


def power_draw(device: DeviceLike = None) -> int:
    """Milliwatts."""
    return int(call("power_draw")(_ordinal(device)))


def clock_rate(device: DeviceLike = None) -> int:
    """MHz of the compute clock."""
    return int(call("clock_rate")(_ordinal(device)))


def list_gpu_processes(device: DeviceLike = None) -> str:
    """The processes that use the device, as text."""
    return str(call("list_gpu_processes")(_ordinal(device)))


def ipc_collect() -> None:
    """Release memory of finished inter-process shares."""
    call("ipc_collect")()


def torch_versions() -> dict[str, str]:
    """Python's and PyTorch's versions and those that the active backend adds."""
    return {"python": sys.version.split()[0], "torch": torch.__version__, **active().versions()}
