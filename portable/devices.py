"""Devices: which there are, which is current, what they are."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from numbers import Integral
from typing import Any, TypeAlias

import torch

from portable import selection
from portable.errors import ConfigurationError, DeviceIndexError
from portable.selection import active, call
from portable.spec import Generation

DeviceLike: TypeAlias = "torch.device | int | str | None"


def device(index: DeviceLike = None) -> torch.device:
    """The device to put models and tensors on.

    Args:
        index: None for the current device of the active backend, an ordinal for another one, or a torch.device or string,
            which is checked ("cuda:1"; for another backend's device call `pt.use` first). "cpu" is allowed everywhere.

    Returns:
        A torch.device of the active backend's type, always with its ordinal ("cuda" gives the current one), so that it
        equals the ``device`` of tensors that lie there; or "cpu", which has no ordinal.

    Note:
        ``torch.cuda.device`` is a context manager; that is `pt.device_index` here (torch.accelerator's name for it), and
        `portable.cuda.device` under the old name.

    Raises:
        DeviceIndexError: the ordinal is outside ``range(device_count())``.
        ConfigurationError: the device belongs to another backend, or the argument names no device.
    """
    kind = active().spec.device_type
    asked, number = (None, None) if index is None else _parse(index)
    if asked == "cpu" and kind != "cpu":
        if number:
            raise DeviceIndexError(f"device {str(index)!r} was asked for, but the CPU is one device. Use pt.device('cpu').")
        return torch.device("cpu")
    found = _own(index, asked, number)
    return torch.device(kind) if kind == "cpu" else torch.device(kind, found)


def _parse(device: Any) -> tuple[str | None, int | None]:
    """Device type and ordinal that an argument names, None for the part that it leaves out."""
    if isinstance(device, torch.device):
        return _parts(device)
    if isinstance(device, str):
        return _parse_text(device)
    if isinstance(device, Integral) and not isinstance(device, bool):
        return None, int(device)
    raise ConfigurationError(
        f"device {device!r} was asked for, which is a {type(device).__name__}. Pass an ordinal, a string such as "
        f"{active().spec.device_type!r}, a torch.device, or None for the current device."
    )


@lru_cache(maxsize=64)
def _parts(device: torch.device) -> tuple[str, int | None]:
    return device.type, device.index  # remembered, because torch makes the string anew each time


@lru_cache(maxsize=64)
def _parse_text(text: str) -> tuple[str, int | None]:
    kind, colon, number = text.partition(":")
    try:
        found = torch.device(kind if colon and number.isdecimal() else text)
    except RuntimeError as error:
        raise ConfigurationError(
            f"device {text!r} was asked for, but PyTorch does not know it ({str(error).splitlines()[0]}). "
            f"Use pt.device(), pt.device(0), or {active().spec.device_type!r}."
        ) from error
    # The ordinal is read here, because torch.device keeps 8 bits of it: "cuda:256" would become cuda:0.
    return found.type, int(number) if colon else None


def _own(device: DeviceLike, asked: str | None, number: int | None) -> int:
    """The checked ordinal on the active backend."""
    spec = active().spec
    if asked is not None and asked != spec.device_type:
        raise ConfigurationError(
            f"device {str(device)!r} was asked for, but the active backend is {spec.name} (device type "
            f"{spec.device_type!r}). Call pt.use() with that device's backend first, or pt.device() for the active one."
        )
    return int(call("current_device")()) if number is None else _checked(number)


def _checked(index: int) -> int:
    count = call("device_count")()
    if 0 <= index < count:
        return index
    raise DeviceIndexError(
        f"device index {index} was asked for, but the {active().spec.name} backend has {count} "
        f"device{'' if count == 1 else 's'}. Use an index from 0 to {count - 1}, or pt.device() for the current one."
    )


def ordinal(device: DeviceLike = None) -> int:
    """The ordinal that a device argument means on the active backend.

    Raises:
        DeviceIndexError, ConfigurationError: as `device`; "cpu" is refused where it is not the active backend.
    """
    if device is None:
        return int(call("current_device")())
    if type(device) is int:
        return _checked(device)
    if type(device) is not torch.device:
        return _own(device, *_parse(device))
    # Code passes the same few devices again and again, and taking one apart costs a microsecond and more.
    known = selection.remembered
    found = known.get(device)
    if found is None:
        found = _own(device, *_parse(device))
        if device.index is not None or device.type == "cpu":  # without an ordinal it means whichever is current
            known[device] = found
    return found


def ordinal_or_none(device: DeviceLike) -> int | None:
    """`ordinal`, but None is passed on, for functions that take it for the current device themselves."""
    return None if device is None else ordinal(device)


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
    """Make a device current; a negative ordinal changes nothing, as in torch.cuda.

    Raises:
        DeviceIndexError: there is no such device.
    """
    if not _means_nothing(device):
        call("set_device")(ordinal(device))


def device_index(device: DeviceLike) -> AbstractContextManager[Any]:
    """Context manager: another current device inside the block. ``torch.cuda.device`` under torch.accelerator's name.

    None and a negative ordinal change nothing, as in torch.cuda.

    Raises:
        DeviceIndexError: there is no such device.
    """
    return nullcontext() if device is None or _means_nothing(device) else call("device")(ordinal(device))


def _means_nothing(device: DeviceLike) -> bool:
    return isinstance(device, int) and device < 0


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Context manager: the device of ``tensor`` is current inside the block."""
    return call("device_of")(tensor)


def get_device_name(device: DeviceLike = None) -> str:
    """What people call the device ("NVIDIA H200", "Ascend910B2", the CPU's model name)."""
    return active().device_name(ordinal(device))


def get_device_properties(device: DeviceLike = None) -> Any:
    """The vendor's description of a device; it has at least ``name`` and ``total_memory`` (bytes)."""
    return call("get_device_properties")(ordinal(device))


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """(major, minor) CUDA compute capability; (0, 0) on devices that have none. See also `generation`."""
    return call("get_device_capability")(ordinal(device))


def get_arch_list() -> list[str]:
    """CUDA architectures that this PyTorch build has kernels for; empty on other devices."""
    return list(call("get_arch_list")())


def generation(device: DeviceLike = None) -> Generation | None:
    """What is declared of the device's generation: dtypes, memory, bandwidth, peak rates. None if it is not known."""
    return active().generation(ordinal(device))


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Whether one device reads another's memory directly."""
    return bool(call("can_device_access_peer")(ordinal(device), ordinal(peer_device)))


def synchronize(device: DeviceLike = None) -> None:
    """Wait until the device has done all queued work. Returns at once on the CPU, which queues nothing."""
    call("synchronize")(ordinal_or_none(device))


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
    return int(call("utilization")(ordinal(device)))


def memory_usage(device: DeviceLike = None) -> int:
    """Percent of the last interval in which device memory was read or written."""
    return int(call("memory_usage")(ordinal(device)))


def temperature(device: DeviceLike = None) -> int:
    """Degrees Celsius."""
    return int(call("temperature")(ordinal(device)))


def power_draw(device: DeviceLike = None) -> int:
    """Milliwatts."""
    return int(call("power_draw")(ordinal(device)))


def clock_rate(device: DeviceLike = None) -> int:
    """MHz of the compute clock."""
    return int(call("clock_rate")(ordinal(device)))


def list_gpu_processes(device: DeviceLike = None) -> str:
    """The processes that use the device, as text."""
    return str(call("list_gpu_processes")(ordinal(device)))


def ipc_collect() -> None:
    """Release memory of finished inter-process shares."""
    call("ipc_collect")()


def torch_versions() -> dict[str, str]:
    """Python's and PyTorch's versions and those that the active backend adds."""
    return {"python": sys.version.split()[0], "torch": torch.__version__, **active().versions()}
