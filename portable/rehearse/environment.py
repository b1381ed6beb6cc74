"""Machine, versions and command of a rehearsal."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

import torch

import portable
from portable.backend import Backend
from portable.rehearse.result import Environment


def environment(backend: Backend, command: list[str]) -> Environment:
    """What a result depends on.

    Args:
        backend: whose versions are taken too.
        command: the words of the command line.
    """
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        processor = names[0] if names else processor
    versions = {"torch": str(torch.__version__), "portable": portable.__version__, **backend.versions()}
    return Environment(shlex.join(command), platform.python_version(), platform.platform(), processor, versions)


def command_line() -> list[str]:
    """The command as typed, without the path of the interpreter."""
    return ["portable", *sys.argv[1:]]
