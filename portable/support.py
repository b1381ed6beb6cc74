"""How one backend supports one function of the device API.

A backend's table maps each function name of the catalogue (`portable.catalogue`) to one of four kinds:

``native``       the vendor's module under ``torch`` has it: called directly, nothing in between;
``emulated``     `portable` or the backend computes the same result another way, as the note says;
``no-op``        calling it is harmless and does nothing here, for the stated reason;
``unsupported``  it raises `UnsupportedError` with the reason and the alternative.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from portable.errors import UnsupportedError

Kind = Literal["native", "emulated", "no-op", "unsupported"]


@dataclass(frozen=True)
class Support:
    """One cell of the support table.

    Attributes:
        kind: native, emulated, no-op or unsupported.
        path: for native: dotted name under the vendor's module ("memory.mem_get_info"), or under torch itself if it
            starts with "torch." ("torch.accelerator.synchronize").
        function: for emulated and no-op: what is called; it may also be a value that is not a function (a class).
        note: what the emulation does, or why there is nothing to do or to call.
        alternative: for unsupported: what to use instead.
        otherwise: for native: used when the installed version of the vendor's module lacks the name.
    """

    kind: Kind
    path: str = ""
    function: Any = None
    note: str = ""
    alternative: str = ""
    otherwise: Support | None = None


def native(path: str, otherwise: Support | None = None, note: str = "") -> Support:
    """The vendor's module (or torch, for a path that starts with "torch.") has the function under this dotted name."""
    return Support("native", path=path, otherwise=otherwise, note=note)


def emulated(function: Any, note: str) -> Support:
    """Another way gives the same result; the note says which."""
    return Support("emulated", function=function, note=note)


def noop(note: str, value: Any = None) -> Support:
    """There is nothing to do; the call returns ``value``."""

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return value

    return Support("no-op", function=nothing, note=note)


def unsupported(reason: str, alternative: str) -> Support:
    """The call raises `UnsupportedError`."""
    return Support("unsupported", note=reason, alternative=alternative)


def bind(backend: str, name: str, support: Support, module: Any) -> Any:
    """Turn a table cell into the object that a call reaches.

    Args:
        backend: the backend's name, for the error.
        name: the function's name in the catalogue.
        support: the cell.
        module: the vendor's module under ``torch`` (``torch.cuda``), or None if there is none.

    Returns:
        The vendor's own object for ``native`` (no wrapper, so a call costs what the direct call costs); a function that
        raises `UnsupportedError` for ``unsupported``.
    """
    if support.kind == "native":
        target = lookup(support.path, module)
        if target is not None:
            return target
        support = support.otherwise or unsupported(
            f"the installed {getattr(module, '__name__', 'vendor module')} has no {support.path}",
            "upgrade the vendor's package, or leave the call out",
        )
        return bind(backend, name, support, module)
    if support.kind == "unsupported":
        return _raiser(backend, name, support)
    return support.function


def lookup(path: str, module: Any) -> Any:
    """The object under a dotted path, None if a part of it is missing."""
    root, _, rest = path.partition(".")
    target, names = (importlib.import_module(root), rest) if root == "torch" else (module, path)
    for part in names.split("."):
        target = getattr(target, part, None)
    return target


def _raiser(backend: str, name: str, support: Support) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(backend, name, support.note, support.alternative)

    refuse.__name__ = name.rpartition(".")[2]
    refuse.portable_unsupported = True  # type: ignore[attr-defined]  # lets a caller ask without calling
    return refuse
