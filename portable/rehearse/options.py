"""What `portable rehearse` was asked for, checked before anything is loaded or run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from portable.errors import ConfigurationError
from portable.rehearse.result import SEVERITIES, Severity

_UNITS = {
    "": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
FAIL_ON: tuple[Severity, ...] = ("blocker", "wrong", "major")


@dataclass(frozen=True)
class Options:
    """One rehearsal.

    Attributes:
        backend, generation, memory, devices: for what; memory in bytes. None leaves the choice to the backend.
        target, arguments, module: the program.
        steps: stop it after this many optimizer steps.
        json, markdown: files to write.
        strict: stop at the first refusal, as the device would.
        fail_on: exit status 3 if there is a finding as bad as this or worse.
    """

    backend: str
    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    generation: str | None = None
    memory: int | None = None
    devices: int | None = None
    steps: int | None = None
    json: Path | None = None
    markdown: Path | None = None
    strict: bool = False
    fail_on: Severity | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigurationError: one of them cannot be.
        """
        for name, value, unit in (("--steps", self.steps, "optimizer steps"), ("--devices", self.devices, "devices")):
            if value is not None and value < 1:
                raise ConfigurationError(
                    f"{name} {value} was given, but a rehearsal needs at least 1. Give a number of {unit}."
                )
        if self.fail_on is not None and self.fail_on not in FAIL_ON:
            raise ConfigurationError(f"--fail-on {self.fail_on!r} was given; choose {', '.join(FAIL_ON)}.")

    def fails(self, worst: Severity | None) -> bool:
        """Whether findings of this severity are to fail the rehearsal."""
        if self.fail_on is None or worst is None:
            return False
        return SEVERITIES.index(worst) <= SEVERITIES.index(self.fail_on)


def memory(text: str) -> int:
    """Bytes of memory: a number, alone or with a unit ("24GiB").

    Raises:
        ConfigurationError: it is something else, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match and match[2].lower() in _UNITS else 0
    if size < 1:
        raise ConfigurationError(
            f"--memory {text!r} was given, which is no size of memory. Give bytes, or a number with a unit: 512MiB, 24GiB."
        )
    return size
