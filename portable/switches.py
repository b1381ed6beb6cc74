"""Switches that let matrix units compute with less than the tensors hold, and the levels that set them.

A *level* names a state of all switches of a backend:

``strict``   no float32 input is rounded, no 16-bit product is summed in 16 bits
``default``  what PyTorch and the vendor's package ship with
``fast``     float32 products may be rounded to 11 mantissa bits or more (TF32, HF32), never to bfloat16's 8

A backend lists its controls in `portable.backend.Backend.precision_controls`; `portable.levels` turns them and takes them back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from portable.errors import ConfigurationError
from portable.spec import Generation

Level = Literal["strict", "default", "fast"]
LEVELS: tuple[Level, ...] = get_args(Level)
MEANING: Mapping[Level, str] = {
    "strict": "no float32 input is rounded, no 16-bit product is summed in 16 bits",
    "default": "what PyTorch and the vendor's package ship with",
    "fast": "float32 products may be rounded to 11 mantissa bits or more, never to bfloat16's 8",
}
Ask = Callable[[], Generation | None]
"""Answers the generation of the device, None if it is not known. Asking may start the device."""
FULL = 24
"""Mantissa bits of float32, the implicit one counted (IEEE 754)."""


@dataclass(frozen=True)
class State:
    """One switch as it stands.

    Attributes:
        name: how it is written in code, or the name of the environment variable.
        governs: "matrix products", "convolutions", "recurrent layers", "16-bit sums" ...
        value: its value now, as text; None where it cannot be read, as the vendor's package is not loaded.
        default: its value in a fresh process.
        bits: mantissa bits that float32 inputs keep on this generation under ``value``; None if it is not about float32
            inputs, or the generation is not known. Where ``value`` cannot be read it is for the default.
        meaning: what the value does here, in words.
        source: where that is stated.
        fixed: it is read when the process starts, and cannot be turned later.
    """

    name: str
    governs: str
    value: str | None
    default: str
    bits: int | None
    meaning: str
    source: str
    fixed: bool = False


@dataclass(frozen=True)
class Setting:
    """One switch as the documents show it, the same on every machine.

    Attributes:
        name, governs, default, source: as in `State`.
        at: level to the value that it has there, if it had its default before.
        formats: level to the format that this value lets float32 inputs be rounded to; empty for a switch of something else.
    """

    name: str
    governs: str
    default: str
    at: Mapping[Level, str]
    formats: Mapping[Level, str | None]
    source: str


class Control:
    """Something that a level turns: one switch or several that hang together.

    Attributes:
        key: its name, unique on a backend.
    """

    key: str

    def states(self, generation: Generation | None) -> Sequence[State]:
        """Its switches as they stand, on devices of this generation."""
        raise NotImplementedError

    def documented(self) -> Sequence[Setting]:
        """Its switches for the documents."""
        return ()

    def obstacle(self, level: Level, ask: Ask) -> str | None:
        """Why the level cannot be had in this process, None if it can."""
        return None

    def remains(self, ask: Ask) -> str | None:
        """What stays imprecise under "strict" because the hardware has nothing better, None if nothing does."""
        return None

    def apply(self, level: Level, ask: Ask) -> Any:
        """Turn the switches to a level; answers what `restore` needs to take it back."""
        raise NotImplementedError

    def restore(self, saved: Any) -> None:
        """Give every switch the value that it had before `apply`."""
        raise NotImplementedError

    def merge(self, below: Any, above: Any) -> Any:
        """What restores the state before ``below`` when only the later ``above`` is still to be taken back."""
        return below


def describe(format_: str | None, generation: Generation | None) -> tuple[int | None, str]:
    """(mantissa bits that remain of a float32 input, in words) when a switch allows rounding to a format.

    Args:
        format_: "tf32", "bf16" ...; None if no rounding is allowed.
    """
    if generation is not None and "float32" not in generation.matmul and generation.reduced:
        forced, bits = next(iter(generation.reduced.items()))
        return bits, f"{generation.name} multiplies no float32: inputs become {forced}, whatever the switch says"
    if format_ is None:
        return FULL, "float32 inputs stay whole"
    if generation is None:
        return None, f"float32 inputs may be rounded to {format_}, if the device has that format"
    if format_ not in generation.reduced:
        return FULL, f"allows {format_}, which {generation.name} does not have: float32 inputs stay whole"
    return generation.reduced[format_], f"float32 inputs may be rounded to {format_}"


@dataclass(frozen=True)
class Flag(Control):
    """One switch with a getter and a setter.

    Attributes:
        key: as in `State.name`.
        governs, source: as in `State`.
        start: its value in a fresh process.
        get: its value; None where it cannot be read.
        set: sets it.
        levels: level to what it becomes: a function of the value before, which answers that value itself where it will do.
        formats: text of a value to the format that it lets float32 inputs be rounded to; None for a switch of something else.
        words: text of a value to what it does, for a switch of something else.
        applies: whether the device's generation has what it turns.
    """

    key: str
    governs: str
    start: Any
    source: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    levels: Mapping[Level, Callable[[Any], Any]]
    formats: Mapping[str, str | None] | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    text: Callable[[Any], str] = str
    applies: Callable[[Ask], bool] = lambda ask: True

    def states(self, generation: Generation | None) -> Sequence[State]:
        now = self.get()
        value = None if now is None else self.text(now)
        default = self.text(self.start)
        shown = default if value is None else value
        bits, meaning = describe(self.formats.get(shown), generation) if self.formats else (None, self.words[shown])
        if value is None:
            meaning += " (in a fresh process: this one has not loaded the vendor's package)"
        return (State(self.key, self.governs, value, default, bits, meaning, self.source),)

    def documented(self) -> Sequence[Setting]:
        at = {level: self.text(change(self.start)) for level, change in self.levels.items()}
        formats = {} if self.formats is None else {level: self.formats.get(value) for level, value in at.items()}
        return (Setting(self.key, self.governs, self.text(self.start), at, formats, self.source),)

    def apply(self, level: Level, ask: Ask) -> Any:
        now = self.get()
        wanted = None if now is None else self.levels[level](now)
        if wanted != now and self.applies(ask):
            self.set(wanted)
        return now

    def restore(self, saved: Any) -> None:
        if saved is not None and self.get() != saved:
            self.set(saved)


def to(value: Any) -> Callable[[Any], Any]:
    """Whatever it was, it becomes this."""
    return lambda before: value


@dataclass(frozen=True)
class Environment(Control):
    """A variable that a library reads when it starts.

    Attributes:
        key: its name.
        governs, source: as in `State`.
        format_of: its text to the format that float32 inputs may be rounded to, None for none.
        next_step: how to be rid of it.
    """

    key: str
    governs: str
    source: str
    format_of: Callable[[str], str | None]
    next_step: str

    def _allowed(self) -> str | None:
        text = os.environ.get(self.key, "")
        return self.format_of(text) if text else None

    def states(self, generation: Generation | None) -> Sequence[State]:
        try:
            bits, meaning = describe(self._allowed(), generation)
        except ConfigurationError as error:
            bits, meaning = None, str(error)
        return (
            State(
                self.key, self.governs, os.environ.get(self.key) or "not set", "not set", bits, meaning, self.source, fixed=True
            ),
        )

    def documented(self) -> Sequence[Setting]:
        unset = "not set"
        return (Setting(self.key, self.governs, unset, dict.fromkeys(LEVELS, unset), {}, self.source),)

    def obstacle(self, level: Level, ask: Ask) -> str | None:
        format_ = self._allowed() if level == "strict" else None
        if format_ is None or describe(format_, ask())[0] == FULL:
            return None
        return (
            f"{self.key}={os.environ[self.key]!r} lets {self.governs} round float32 inputs to {format_}, was read when the "
            f"process started, and cannot be turned now. {self.next_step}"
        )

    def apply(self, level: Level, ask: Ask) -> Any:
        return None

    def restore(self, saved: Any) -> None:
        pass
