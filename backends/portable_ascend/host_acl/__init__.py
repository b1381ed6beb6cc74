"""The real torch_npu on a machine without an NPU.

A small host-side ACL runtime (``runtime/``, C) takes the place of CANN's libraries under the vendor's own wheel, and kernels
registered with PyTorch's dispatcher compute on the CPU. What this shows: that the vendor's package, its operator schemas, its
autograd and autocast rules, its allocator and its choice of kernels work as our backend expects. What it cannot show: the
numbers and the speed of an Ascend device. See docs/host-acl.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import io
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from portable.errors import ConfigurationError
from portable_ascend.host_acl import build
from portable_ascend.host_acl.settings import VARIABLE, Settings, from_environment, make_settings

if TYPE_CHECKING:
    from portable.rehearsal import Rehearsal

__all__ = ["VARIABLE", "HostRuntime", "Settings", "active", "emulate", "enable", "from_environment", "start"]


_DEVICE = "npu"


@dataclass(frozen=True)
class HostRuntime:
    """The host runtime of this process."""

    settings: Settings
    library: ctypes.CDLL
    folder: Path

    def used(self, device: int = 0) -> int:
        """Bytes that the vendor's allocator holds of a device's memory."""
        return int(self.library.host_acl_used(device))


_active: HostRuntime | None = None
_rehearsal: Rehearsal | None = None


def active() -> HostRuntime | None:
    """The host runtime of this process, None if it was not switched on."""
    return _active


def enable(
    soc: str | None = None,
    devices: int | None = None,
    hbm: int | str | None = None,
    path: str | Path | None = None,
) -> HostRuntime:
    """Load torch_npu on the host runtime, and let the CPU compute what it launches.

    Must come before anything imports torch_npu; PyTorch may be loaded already. PORTABLE_ASCEND_HOST is set, so that
    `portable.use("ascend")` and processes started by this one follow.

    Args:
        soc: "910A", "910B2", "910C", "950", or a full SoC name; by default "Ascend910B2".
        devices: number of devices, by default 1.
        hbm: memory of each device in bytes or with a unit ("512MiB"), by default the SoC's.
        path: folder with torch_npu, as ``pip install --no-deps --target FOLDER torch-npu`` unpacks it; by default it is
            found as any installed package.

    Returns:
        The runtime; a second call with the same arguments returns it again.

    Raises:
        ConfigurationError: no C compiler, torch_npu missing or not of torch's release, an unknown SoC, torch_npu loaded
            already, or the runtime active with other settings.
    """
    asked = make_settings(soc, devices, hbm, path)
    start(asked)
    os.environ[VARIABLE] = asked.as_text()
    assert _active is not None
    return _active


def start(asked: Settings) -> Rehearsal:
    """Load torch_npu on the host runtime and let the CPU compute what it launches; answers what runs already if it is the same.

    Raises:
        ConfigurationError: see `enable`.
    """
    global _rehearsal
    _start(asked)
    if _rehearsal is None:
        from portable_ascend.host_acl import session

        _rehearsal = session.start(asked)
    return _rehearsal


def emulate(generation: str | None = None, devices: int = 1, memory: int | None = None) -> Rehearsal:
    """See `portable.backend.Backend.emulate`. The variable is set too, so that processes started by this one follow.

    torch_npu is taken from where it is installed, or from where the variable says, or from a folder ``.vendor`` here.
    """
    told = from_environment()
    path = told.path if told is not None else None
    if path is None and importlib.util.find_spec("torch_npu") is None and Path(".vendor", "torch_npu").is_dir():
        path = Path(".vendor")
    asked = make_settings(generation, devices, memory, path)
    rehearsal = start(asked)
    os.environ[VARIABLE] = asked.as_text()
    return rehearsal


def _start(asked: Settings) -> HostRuntime:
    import torch

    global _active
    if _active is not None:
        if _active.settings == asked:
            return _active
        raise ConfigurationError(
            f"the host ACL runtime is active as {_active.settings}, and was asked to be {asked}. One process has one: start "
            "another process for the other."
        )
    if "torch_npu" in sys.modules:
        raise ConfigurationError(
            "the host ACL runtime must be enabled before torch_npu is imported, but torch_npu is loaded already. Set "
            f"{VARIABLE} and import portable first, or call portable_ascend.host_acl.enable() at the start of the program."
        )
    kind = torch._C._get_privateuse1_backend_name()
    if kind != "privateuseone" and kind != _DEVICE:
        raise ConfigurationError(
            f"the host ACL runtime was asked for, but this process has the device {kind!r} already, and PyTorch has one "
            "slot for devices from outside. Start another process for the other."
        )
    package = _find(asked)
    folder = build.build(package / "include" / "third_party" / "acl" / "inc")
    library = build.load(folder)
    chip = asked.soc
    if library.host_acl_configure(chip.name.encode(), asked.devices, asked.hbm, chip.cube, chip.vector, chip.l2):
        raise ConfigurationError(f"the host ACL runtime refused the settings {asked}.")
    _import(package)
    _active = HostRuntime(asked, library, folder)
    return _active


def _find(asked: Settings) -> Path:
    """Folder of the package torch_npu, after a check that it fits torch."""
    import torch

    if asked.path is not None and str(asked.path) not in sys.path:
        sys.path.append(str(asked.path))
        importlib.invalidate_caches()
    spec = importlib.util.find_spec("torch_npu")
    release = ".".join(re.findall(r"\d+", torch.__version__.split("+")[0])[:3])
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            f"the host ACL runtime runs the vendor's torch_npu, which is not installed. pip install --no-deps --target "
            f".vendor torch-npu=={release}, and name the folder: {VARIABLE}=1,path=.vendor (or enable(path=...))."
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    text = (package / "version.py").read_text() if (package / "version.py").is_file() else ""
    found = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
    version = found[1] if found else "unknown"
    if ".".join(re.findall(r"\d+", version.split("+")[0])[:3]) != release:
        raise ConfigurationError(
            f"torch_npu {version} in {package} does not fit torch {torch.__version__}: each release of torch_npu is built for "
            f"the same release of torch. Install torch-npu=={release}, or torch of torch_npu's release."
        )
    return package


def _import(package: Path) -> None:
    # Work must be done where it is submitted: the vendor's queue would do its copies on a second thread, after host kernels
    # that read what they bring.
    os.environ["TASK_QUEUE_ENABLE"] = "0"
    # A spawned process would import torch_npu with torch, before anything could give it the host runtime, and fail.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    printed = io.StringIO()
    try:
        # torch_npu prints that ASCEND_HOME_PATH is not set, which is as it should be here.
        with contextlib.redirect_stdout(printed):
            importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigurationError(
            f"torch_npu in {package} did not load on the host ACL runtime: {error}. If a module is missing, install what "
            "torch_npu itself needs: pip install numpy pyyaml."
        ) from error
    rest = "\n".join(line for line in printed.getvalue().splitlines() if "ASCEND_HOME_PATH" not in line)
    if rest:
        print(rest)
