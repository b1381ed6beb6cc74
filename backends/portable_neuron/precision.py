"""The compiler's casts of float32 matrix products. The native stack has none by default."""

from __future__ import annotations

import shlex

from portable.errors import ConfigurationError
from portable.fp32_settings import common
from portable.switches import Control, Environment

VARIABLE = "NEURON_CC_FLAGS"
_TYPES = ("bf16", "fp16", "tf32", "fp8_e4m3")


def auto_cast(text: str) -> str | None:
    """Type that neuronx-cc casts float32 matrix products to under these flags ("bf16" ...), None if it does not.

    Raises:
        ConfigurationError: a type that has no place in this table.
    """
    words = shlex.split(text.replace("=", " "))
    given = {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--")}
    if given.get("--auto-cast", "none") == "none":
        return None
    kind = given.get("--auto-cast-type", "bf16")  # the compiler's default
    if kind not in _TYPES:
        raise ConfigurationError(
            f"{VARIABLE} asks for --auto-cast-type {kind}, which is not known here: use one of {', '.join(_TYPES)}"
        )
    return kind


_FLAGS = Environment(
    VARIABLE,
    "the compiler's matrix products",
    "AWS Neuron documentation, neuronx-cc API reference, --auto-cast (default none); drop: eager operators compile with "
    "--auto-cast=none",
    auto_cast,
    f"Take --auto-cast out of {VARIABLE} and start again: kernels that are compiled keep their types.",
)


def controls() -> tuple[Control, ...]:
    """What a precision level turns on Trainium."""
    return (*common(), _FLAGS)
