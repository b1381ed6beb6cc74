"""Why Ascend cannot be used here, found without importing torch_npu.

Importing torch_npu fails wherever CANN's libraries are out of reach, and PyTorch imports it by itself (entry point group
``torch.backends``), so ``import torch`` may have failed already. Everything is read from package metadata, the file system,
the environment and the recorded error of that attempt.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from pathlib import Path

from portable.spec import Availability

PACKAGE = "torch-npu"
# The library that the dynamic linker misses first when CANN's environment script has not been sourced.
_MISSING = re.compile(r"(?P<library>lib\S+\.so\S*): cannot open shared object file")


@dataclass(frozen=True)
class Found:
    """What the machine shows.

    Attributes:
        version: version of the installed distribution torch-npu, None if there is none.
        torch: version of PyTorch.
        accelerator: device type of another accelerator that this PyTorch build has ("cuda"), None if it has none.
        cann: CANN's folder as the environment names it (ASCEND_HOME_PATH, ASCEND_TOOLKIT_HOME), None if not set.
        devices: the driver's device files.
        visible: ASCEND_RT_VISIBLE_DEVICES, None if it is not set.
        load_error: what loading torch_npu raised, "" if nothing or not tried.
    """

    version: str | None
    torch: str
    accelerator: str | None
    cann: str | None
    devices: tuple[str, ...]
    visible: str | None
    load_error: str = ""


def look() -> Found:
    """Read everything from this machine."""
    import torch

    from portable._loading import autoload_errors

    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = None
    accelerator = torch.accelerator.current_accelerator(check_available=False)
    return Found(
        version,
        torch.__version__,
        accelerator.type if accelerator and accelerator.type != "npu" else None,
        os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME"),
        tuple(sorted(map(str, Path("/dev").glob("davinci[0-9]*")))),
        os.environ.get("ASCEND_RT_VISIBLE_DEVICES"),
        str(autoload_errors.get("torch_npu", "")),
    )


def _release(version: str) -> str:
    """The first three components: torch-npu 2.13.0.post1 goes with torch 2.13.0 (torch-npu's own requirement)."""
    return ".".join(re.findall(r"\d+", version.split("+")[0])[:3])


def diagnose(found: Found) -> Availability | None:
    """The first obstacle, or None if only loading the package can tell more."""

    def no(reason: str, next_step: str) -> Availability:
        return Availability(False, reason, next_step)

    if found.version is None:
        return no(
            f"the package {PACKAGE} is not installed",
            f"pip install {PACKAGE}=={_release(found.torch)} (torch's own release), and CANN and the driver from Huawei",
        )
    if _release(found.version) != _release(found.torch):
        return no(
            f"{PACKAGE} {found.version} needs torch {_release(found.version)}, but torch {found.torch} is installed",
            f"pip install torch=={_release(found.version)}, or {PACKAGE}=={_release(found.torch)}",
        )
    if found.accelerator:
        return no(
            f"this PyTorch is a {found.accelerator} build, and torch_npu refuses to load beside another accelerator",
            "install PyTorch's CPU build, which is what torch_npu extends",
        )
    library = _MISSING.search(found.load_error)
    if library:
        return no(
            f"{PACKAGE} {found.version} is installed, but {library['library']} was not found: CANN's libraries are not on the "
            "linker's path",
            "source set_env.sh of the CANN toolkit in this shell (and set_env.sh of NNAL for libatb.so), then start again",
        )
    if found.load_error:
        return no(f"{PACKAGE} {found.version} did not load: {found.load_error}", "check that CANN and driver versions fit")
    if not found.devices:
        return no("no /dev/davinci* device: the NPU driver is not loaded", "install the driver and check with npu-smi info")
    if found.visible == "":
        return no("ASCEND_RT_VISIBLE_DEVICES is set but empty, which hides every device", "unset it, or list ordinals in it")
    return None
