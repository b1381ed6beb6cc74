"""What the host runtime is asked to be: arguments of `enable`, or the variable PORTABLE_ASCEND_HOST."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from portable.errors import ConfigurationError
from portable_ascend.host_acl import soc as socs

VARIABLE = "PORTABLE_ASCEND_HOST"
MAX_DEVICES = 64  # HOST_MAX_DEVICES in runtime/host.h
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_OFF = ("", "0", "off", "false", "no")
_ON = ("1", "on", "true", "yes")
_FORM = f"{VARIABLE}=1, or {VARIABLE}=910B2,devices=2,hbm=64GiB,path=FOLDER (each part may be left out)"


@dataclass(frozen=True)
class Settings:
    """The devices of the host runtime.

    Attributes:
        soc: the SoC that every device claims to be.
        devices: how many there are.
        hbm: bytes of memory of each.
        path: folder that holds the unpacked torch_npu, None to find it as any other package.
    """

    soc: socs.Soc
    devices: int
    hbm: int
    path: Path | None = None

    def as_text(self) -> str:
        """The same as a value of PORTABLE_ASCEND_HOST."""
        path = [] if self.path is None else [f"path={self.path}"]
        return ",".join([self.soc.name, f"devices={self.devices}", f"hbm={self.hbm}", *path])


def make_settings(
    soc: str | None = None, devices: int | None = None, hbm: int | str | None = None, path: str | Path | None = None
) -> Settings:
    """Check and complete the arguments.

    Args:
        soc: name of the SoC, by default "Ascend910B2".
        devices: 1 to 64; by default as many as ASCEND_RT_VISIBLE_DEVICES names, or one for each process that torchrun
            starts on this machine (LOCAL_WORLD_SIZE), or 1.
        hbm: bytes of memory per device, as a number or with a unit ("512MiB"); by default what the SoC has.
        path: folder with the unpacked torch_npu.

    Raises:
        ConfigurationError: an argument makes no device.
    """
    chip = socs.soc(soc or socs.DEFAULT)
    count = _visible() if devices is None else devices
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_DEVICES:
        raise ConfigurationError(f"the host ACL runtime was asked for {count!r} devices. It can have 1 to {MAX_DEVICES}.")
    size = chip.hbm if hbm is None else _bytes(hbm)
    folder = None if path is None else Path(path).expanduser().resolve()
    if folder is not None and not (folder / "torch_npu").is_dir():
        raise ConfigurationError(
            f"the host ACL runtime was told to take torch_npu from {folder}, which has no folder torch_npu. "
            f"Unpack it there: pip install --no-deps --target {folder} torch-npu==(torch's release)."
        )
    return Settings(chip, count, size, folder)


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings | None:
    """What PORTABLE_ASCEND_HOST asks for, None if it is not set or off.

    Raises:
        ConfigurationError: it cannot be read, or makes no device.
    """
    text = environment.get(VARIABLE, "").strip()
    if text.lower() in _OFF:
        return None
    soc: str | None = None
    named: dict[str, str] = {}
    for number, part in enumerate(part.strip() for part in text.split(",")):
        key, equals, value = part.partition("=")
        if not equals and number == 0:
            soc = None if part.lower() in _ON else part
        elif equals and key.strip() in ("soc", "devices", "hbm", "path") and value:
            named[key.strip()] = value.strip()
        else:
            raise ConfigurationError(f"{VARIABLE}={text!r} has the part {part!r}, which says nothing. Write {_FORM}.")
    devices = named.get("devices")
    if devices is not None and not devices.isdecimal():
        raise ConfigurationError(f"{VARIABLE}={text!r} asks for {devices!r} devices, not a number. Write {_FORM}.")
    return make_settings(named.get("soc", soc), None if devices is None else int(devices), named.get("hbm"), named.get("path"))


def _visible() -> int:
    listed = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if listed is not None:
        return len([part for part in listed.split(",") if part.strip()])
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(processes), MAX_DEVICES) if processes.isdecimal() and int(processes) else 1


def _bytes(size: int | str) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(size).lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0 or isinstance(size, (bool, int)):
        raise ConfigurationError(
            f"the host ACL runtime was asked for {size!r} of memory per device. Give bytes, or a number with a unit "
            "such as 512MiB or 64GiB."
        )
    return int(float(match[1]) * _UNITS[match[2]])
