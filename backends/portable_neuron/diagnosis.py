"""Why Trainium cannot be used here, found without importing the vendor's package.

Importing it off the hardware may fail, sets environment variables and, on the hardware, takes a core that another process may
want; so everything is read from package metadata, the file system and the environment first.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

from portable.spec import Availability

PACKAGE = "torch-neuronx"
_WHERE = "install torch-neuronx >= 2.13 from AWS's own package index, in an environment of its own (docs/backends.md, Trainium)"


@dataclass(frozen=True)
class Found:
    """What the machine shows.

    Attributes:
        version: version of the installed distribution torch-neuronx, None if there is none.
        lite: whether libtorch-neuronx-lite is installed, which is made for one inference server only.
        torch: version of PyTorch.
        devices: the driver's device files.
        driver: whether the kernel module is loaded.
        visible_cores: NEURON_RT_VISIBLE_CORES, None if it is not set.
        load_error: what loading the package raised when PyTorch or `portable` tried, "" if nothing.
    """

    version: str | None
    lite: bool
    torch: str
    devices: tuple[str, ...]
    driver: bool
    visible_cores: str | None
    load_error: str = ""


def look() -> Found:
    """Read everything from this machine."""
    import torch

    from portable._loading import autoload_errors

    return Found(
        _version(PACKAGE),
        _version("libtorch-neuronx-lite") is not None,
        torch.__version__,
        tuple(sorted(map(str, Path("/dev").glob("neuron[0-9]*")))),
        Path("/sys/module/neuron").is_dir(),
        os.environ.get("NEURON_RT_VISIBLE_CORES"),
        str(autoload_errors.get("torch_neuronx", "")),
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _series(version: str) -> tuple[int, ...]:
    """(major, minor) of a version string."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def diagnose(found: Found) -> Availability | None:
    """The first obstacle, or None if only the runtime can tell more."""

    def no(reason: str, next_step: str) -> Availability:
        return Availability(False, reason, next_step)

    if found.version is None:
        if found.lite:
            return no("only libtorch-neuronx-lite is installed, which serves vLLM and is not TorchNeuron", _WHERE)
        return no(f"the package {PACKAGE} is not installed", _WHERE)
    if _series(found.version) < (2, 0):
        # The wheel on PyPI is a placeholder whose import raises "WRONG PACKAGE".
        return no(f"{PACKAGE} {found.version} is the placeholder from PyPI, not the real package", f"uninstall it and {_WHERE}")
    if _series(found.version) < (2, 10):
        return no(
            f"{PACKAGE} {found.version} is the older PyTorch/XLA package of the same name, which has no torch.neuron", _WHERE
        )
    if _series(found.version) != _series(found.torch):
        # torch: release notes: 2.13.3 goes with torch 2.13.0 and 2.14.3 with 2.14.0.
        return no(
            f"{PACKAGE} {found.version} is made for torch {'.'.join(map(str, _series(found.version)))}, but torch "
            f"{found.torch} is installed",
            f"install torch {'.'.join(map(str, _series(found.version)))}, or the {PACKAGE} of torch's series",
        )
    if not found.devices:
        driver = "the kernel module is loaded" if found.driver else "the kernel module is not loaded"
        return no(
            f"no /dev/neuron* device ({driver})",
            "use a Trn2 or Trn3 instance, install aws-neuronx-dkms, and check with neuron-ls",
        )
    if found.visible_cores == "":
        return no("NEURON_RT_VISIBLE_CORES is set but empty, which hides every core", "unset it, or list core numbers in it")
    if found.load_error:
        return no(f"{PACKAGE} {found.version} did not load: {found.load_error}", "check the driver with neuron-ls")
    return None
