"""The switch for the emulated Trainium: the environment variable PORTABLE_NEURON_EMULATED. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from portable.errors import ConfigurationError
from portable_neuron.facts import GENERATIONS

if TYPE_CHECKING:
    from portable.rehearsal import Rehearsal

VARIABLE = "PORTABLE_NEURON_EMULATED"
DEFAULT = "trn2"
UNSUPPORTED = ("trn1",)  # by the native package
_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Options:
    """What the variable PORTABLE_NEURON_EMULATED asks for."""

    generation: str = DEFAULT
    memory: int | None = None
    devices: int = 1


def options(text: str) -> Options | None:
    """Read ``1``, ``trn3``, ``trn2,memory=512MiB``; None for ``0`` or nothing.

    Raises:
        ConfigurationError: it says something else.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or words == ["0"]:
        return None
    generation, memory, devices = DEFAULT, None, 1
    for word in words:
        name, _, value = word.partition("=")
        number = value.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        unit = _UNITS.get(value[len(number) :].lower())
        if not value and word == "1":
            continue
        if not value and word in GENERATIONS and word not in UNSUPPORTED:
            generation = word
        elif name == "memory" and number.isdigit() and unit and int(number):
            memory = int(number) * unit
        elif name == "devices" and value.isdigit() and int(value):
            devices = int(value)
        else:
            raise ConfigurationError(
                f"{VARIABLE}={text!r} holds {word!r}. Write 1, a generation (trn2, trn3; the native package does not support "
                "trn1), and memory=512MiB, separated by commas. A process has one device: start several with torchrun."
            )
    return Options(generation, memory, devices)


def emulation_asked() -> Options | None:
    """What the environment asks for; None for the hardware.

    Raises:
        ConfigurationError: the variable holds something else.
    """
    return options(os.environ.get(VARIABLE, ""))


def emulate(generation: str | None = None, devices: int = 1, memory: int | None = None) -> Rehearsal:
    """See `portable.backend.Backend.emulate`. The variable is set too, so that processes started by this one follow."""
    text = ",".join([generation or DEFAULT, f"devices={devices}", *([] if memory is None else [f"memory={memory}"])])
    chosen = options(text)
    assert chosen is not None
    session = rehearse(chosen)
    os.environ[VARIABLE] = text
    return session


def rehearse(chosen: Options) -> Rehearsal:
    """Start the emulated device of this process, or answer the one that runs already.

    Raises:
        ConfigurationError: the process has another device in PyTorch's one slot.
    """
    from portable.rehearsal import sources, start
    from portable_neuron.package import stand_in
    from portable_neuron.profile import profile

    sources.ignore(str(Path(__file__).parent))
    session = start(profile(chosen))
    stand_in(session)
    return session
