"""Importing torch so that a broken vendor package cannot take everything down.

PyTorch loads the device packages that announce themselves (entry points of the group ``torch.backends``) while it is
imported, and lets the import of torch itself fail when one of them fails (torch/__init__.py, ``_import_device_backends``):
with torch_npu installed but CANN's libraries out of reach, ``import torch`` raises. When `portable` is what imports torch
first, it loads those packages itself, one by one, and keeps each error for `portable info`. When the user's program has
imported torch before, PyTorch's own message has already been seen, and nothing is left to do here.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # PyTorch's own variable: "0" turns the loading off

autoload_errors: dict[str, BaseException] = {}
"""Entry-point name of each device package whose loading failed, with what it raised."""


def ensure_torch() -> None:
    """Import torch if nobody has yet; record, instead of raising, what device packages raise."""
    if "torch" in sys.modules:
        return
    asked = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "0"
    try:
        import torch  # noqa: F401
    finally:
        if asked is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = asked
    if (asked or "1") == "1":  # the test that torch._is_device_backend_autoload_enabled makes
        for entry in importlib.metadata.entry_points(group="torch.backends"):
            try:
                entry.load()()
            except (Exception, SystemExit) as error:
                autoload_errors[entry.name] = error
