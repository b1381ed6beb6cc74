"""`pt.compile`: torch.compile with the backend and options that fit the accelerator, or eager mode with the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

import torch

from portable.backend import Backend
from portable.selection import active

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("portable")
Compiled = TypeVar("Compiled", bound=Callable[..., Any])


class Arguments(TypedDict, total=False):
    """The arguments of torch.compile beside the model."""

    fullgraph: bool | None
    dynamic: bool | None
    mode: str | None
    options: Mapping[str, Any] | None
    backend: str | None
    disable: bool | None


@dataclass(frozen=True)
class CompileChoice:
    """What `compile` will do.

    Attributes:
        backend: Dynamo backend, None for eager mode.
        kwargs: arguments of torch.compile.
        dropped: argument that was asked for to the reason why it is not passed on.
        reason: why this backend, or why eager.
    """

    backend: str | None
    kwargs: Mapping[str, Any]
    reason: str
    dropped: Mapping[str, str] = field(default_factory=dict)


def explain_compile(on: Backend | None = None, **asked: Any) -> CompileChoice:
    """What `compile` would do with these arguments, and why.

    Args:
        on: the backend of `portable` that it is for; the active one by default.
        asked: arguments of torch.compile: ``fullgraph``, ``dynamic``, ``mode``, ``options``, ``backend``, ``disable``.

    Raises:
        TypeError: torch.compile has no such argument.
    """
    unknown = sorted(set(asked) - set(Arguments.__annotations__))
    if unknown:
        raise TypeError(f"torch.compile has no argument {', '.join(unknown)}; it takes {', '.join(Arguments.__annotations__)}")
    chosen = on or active()
    spec = chosen.spec.compile
    asked = {key: value for key, value in asked.items() if value is not None}
    explicit = asked.pop("backend", None)
    dropped = {}
    for key, value in list(asked.items()):
        reason = spec.forbidden.get(f"{key}={value}") or spec.forbidden.get(key)
        if reason and not (key in spec.kwargs and spec.kwargs[key] == value):
            dropped[key] = reason
            del asked[key]
    kwargs = {**asked, **{key: value for key, value in spec.kwargs.items() if key not in asked}}
    if explicit is not None:
        return CompileChoice(explicit, kwargs, "the backend was given by the caller", dropped)
    problem = spec.reason if spec.backend is None else chosen.compile_problem()
    if problem:
        return CompileChoice(None, {}, problem, dropped)
    return CompileChoice(spec.backend, kwargs, spec.reason, dropped)


@overload
def compile(model: Compiled, **asked: Unpack[Arguments]) -> Compiled: ...
@overload
def compile(model: None = None, **asked: Unpack[Arguments]) -> Callable[[Compiled], Compiled]: ...
def compile(
    model: Callable[..., Any] | None = None,
    *,
    fullgraph: bool | None = None,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str | None = None,
    disable: bool | None = None,
) -> Callable[..., Any]:
    """Compile a module or function for the active backend; also as a decorator, ``@pt.compile`` or ``@pt.compile(...)``.

    Arguments that the backend forbids are left out, and where compilation cannot work at all (no C++ compiler for the CPU, a
    compiler package that is missing) the model is returned as it is; each of these is logged once as a warning with the
    reason. `explain_compile` tells beforehand.

    Args:
        model: an nn.Module or a function.
        fullgraph, dynamic, mode, options, disable: as in torch.compile.
        backend: a Dynamo backend of your own choice instead of the declared one.

    Returns:
        The compiled callable, or ``model`` itself; without a model a decorator.
    """
    if model is None:
        asked = {"fullgraph": fullgraph, "dynamic": dynamic, "mode": mode, "options": options}
        return partial(compile, **asked, backend=backend, disable=disable)
    choice = explain_compile(fullgraph=fullgraph, dynamic=dynamic, mode=mode, options=options, backend=backend, disable=disable)
    name = active().spec.name
    for key, reason in choice.dropped.items():
        _warn_once(f"pt.compile: {key} is not passed on to the {name} backend: {reason}")
    if choice.backend is None:
        _warn_once(f"pt.compile: the model runs in eager mode on the {name} backend: {choice.reason}")
        return model
    return torch.compile(model, backend=choice.backend, **choice.kwargs)


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        log.warning(message)
