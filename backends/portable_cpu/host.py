"""What the operating system tells about this process and this machine.

On Linux everything comes from /proc and the control group. Elsewhere the standard library's ``resource`` module gives the
high-water mark, which then also stands for the current value.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _fields(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, separator, value in pairs if separator}


def _kibibytes(text: str) -> int:
    return int(text.split()[0]) * 1024


def _high_water_mark() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux (getrusage manual pages)


def resident() -> int:
    """Bytes of this process in memory now."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE
    except OSError:
        return _high_water_mark()


def peak_resident() -> int:
    """The most bytes this process had in memory since the start or `reset_peak`."""
    found = _fields(_STATUS).get("VmHWM")
    return max(_kibibytes(found), resident()) if found else max(_high_water_mark(), resident())


def reset_peak() -> bool:
    """Start the peak anew; False where the system does not allow it.

    Writing 5 to clear_refs resets VmHWM to the current resident set (Linux: Documentation/filesystems/proc.rst).
    """
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _control_groups() -> Iterator[Path]:
    """Folders of the control group that contains the process and of those above it (cgroups(7))."""
    for line in _CGROUP.read_text().splitlines() if _CGROUP.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            root, path = (_CGROUPS / "memory" if controllers else _CGROUPS), path.strip("/")
            yield from (root / part for part in (path, *map(str, Path(path).parents)))
    yield from (_CGROUPS, _CGROUPS / "memory")  # a container may see only its own, mounted as the root


def _group_memory(total: int) -> list[tuple[int, int]]:
    """(free, limit) of each control group that limits the process to less than ``total``.

    Page cache of the group counts as free, because the kernel gives it up on demand.
    """
    found = []
    for folder in dict.fromkeys(_control_groups()):
        for limit_file, used_file in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            try:
                limit = int((folder / limit_file).read_text())
                if limit < total:
                    used = int((folder / used_file).read_text())
                    lines = (line.partition(" ") for line in (folder / "memory.stat").read_text().splitlines())
                    stat = {key: value for key, _, value in lines}
                    cache = int(stat.get("total_inactive_file") or stat.get("inactive_file", "0"))
                    found.append((max(0, min(limit, limit - used + cache)), limit))
            except (OSError, ValueError):  # absent, or "max"
                continue
    return found


def machine_memory() -> tuple[int, int]:
    """(free, total) bytes that this process can count on: the machine's, or its control group's if that is less."""
    memory = _fields(_MEMINFO)
    if "MemAvailable" in memory:
        free, total = _kibibytes(memory["MemAvailable"]), _kibibytes(memory["MemTotal"])
    else:
        total = _PAGE * os.sysconf("SC_PHYS_PAGES")
        free = total - resident()
    for group_free, limit in _group_memory(total):
        free, total = min(free, group_free), min(total, limit)
    return free, total


@cache
def cpu_name() -> str:
    """The processor's model name."""
    for key in ("model name", "Model", "Hardware"):
        found = _fields(Path("/proc/cpuinfo")).get(key)
        if found:
            return found
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_percent() -> int:
    """One-minute load average as a percentage of the cores, at most 100."""
    if not hasattr(os, "getloadavg"):
        return 0
    return min(100, round(100 * os.getloadavg()[0] / (os.cpu_count() or 1)))


def capabilities() -> Mapping[str, Any]:
    """Instruction sets that PyTorch detected ("avx2", "amx_bf16" ...) to whether the processor has them."""
    import torch

    return torch.cpu.get_capabilities()
