"""The support table as a document: every function of the device API on every shipped backend."""

from __future__ import annotations

from itertools import groupby

from portable.backend import Backend
from portable.catalogue import FUNCTIONS, Function
from portable.plugins import SHIPPED, registry
from portable.support import Support

_MARK = {"native": "native", "emulated": "emulated", "no-op": "no-op", "unsupported": "unsupported"}

INTRODUCTION = """\
# The device API, function by function

This file is generated (`make docs`); the tests compare it with the code.

Every function that training code uses from `torch.cuda` exists under `portable` with the same name and meaning, or under a
better name besides the old one. `from portable import cuda` gives torch.cuda's names for drop-in use.

- **native**: the vendor's own function under `torch` is called, with nothing in between.
- **emulated**: the same result by another way, described in the notes.
- **no-op**: there is nothing to do on that device; the call returns.
- **unsupported**: the call raises `pt.errors.UnsupportedError`, which names the backend, the function and the alternative.

A cell with a slash is decided when the backend is loaded: the left kind if the installed version of the vendor's module has
the function, the right one otherwise. `cuda` covers NVIDIA and AMD; `generic` is the baseline for every other device that
PyTorch knows. Nothing in the columns `neuron` and `ascend` has run on such hardware: docs/backends.md says how each was
checked.
"""


def shipped_backends() -> list[Backend]:
    """The backends of this distribution, in the order of the table's columns."""
    found = registry()
    order = ["cpu", "cuda", "ascend", "neuron", "generic"]
    names = [name for name in order if f"portable_{name}" in SHIPPED]
    return [found.backends[name].documented()[0] for name in names]


def chain(cell: Support) -> list[Support]:
    """A cell and what it falls back to, in order."""
    return [cell, *(chain(cell.otherwise) if cell.otherwise else [])]


def _mark(cell: Support) -> str:
    kinds = [_MARK[part.kind] for part in chain(cell)]
    return " / ".join(kind for kind, _ in groupby(kinds))


def _notes(name: str, backends: list[Backend]) -> list[str]:
    """One line for each distinct note, with the backends that it holds for."""
    said: dict[str, list[str]] = {}
    for backend in backends:
        for part in chain(backend.support[name]):
            if part.note:
                text = f"{part.note}; instead: {part.alternative}" if part.kind == "unsupported" else part.note
                said.setdefault(f"{part.kind}: {text}", []).append(backend.spec.name)
    return [f"  - {', '.join(names)}: {text}" for text, names in said.items()]


def _row(function: Function, backends: list[Backend]) -> str:
    name = f"`pt.{function.public_name}`"
    if function.portable:
        name += f" (`{function.name}`)"
    return f"| {name} | " + " | ".join(_mark(backend.support[function.name]) for backend in backends) + " |"


def render() -> str:
    """The whole document as Markdown."""
    backends = shipped_backends()
    lines = [INTRODUCTION]
    for group, functions in groupby(FUNCTIONS, key=lambda function: function.group):
        members = list(functions)
        lines += [f"## {group}", "", "| function | " + " | ".join(b.spec.name for b in backends) + " |"]
        lines += ["| --- |" + " --- |" * len(backends)]
        lines += [_row(function, backends) for function in members]
        lines += [""]
        for function in members:
            lines += [f"- `{function.public_name}`: {function.summary}.", *_notes(function.name, backends)]
        lines += [""]
    return "\n".join(lines)
