"""Which path serves a call: the first of the backend's, in its order of preference, that can."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from portable.attn.path import Fit, Path
from portable.attn.request import Request
from portable.backend import Backend
from portable.errors import ConfigurationError


def fits(request: Request, paths: Sequence[Path]) -> list[Fit]:
    """What each path makes of a request, in the order of preference."""
    return [path.fit(request) for path in paths]


def choose(request: Request, backend: Backend, wanted: str | None = None) -> Fit:
    """The path that serves a request.

    Args:
        request: the call.
        backend: whose paths.
        wanted: name of the path that must be taken.

    Raises:
        ConfigurationError: the path wanted does not exist or cannot serve the request, or none can.
    """
    # Dynamo cannot look into a cache; what it traces is kept in its own.
    find = _find if torch.compiler.is_compiling() else _remembered
    return find(request, backend, wanted)


def _find(request: Request, backend: Backend, wanted: str | None) -> Fit:
    paths = backend.attention_paths(request)
    if wanted is not None:
        path = next((path for path in paths if path.name == wanted), None)
        if path is None:
            raise ConfigurationError(
                f"attention path {wanted!r} was asked for, but the {backend.spec.name} backend has "
                f"{', '.join(path.name for path in paths)}. Choose one of these, or leave path out."
            )
        found = path.fit(request)
        if found.refused or path.call is None:
            why = "; ".join(found.refused) or "its package is not installed"
            raise ConfigurationError(
                f"attention path {wanted!r} was asked for and cannot serve {request.words()}: {why}. Leave path out to let "
                "portable choose, or change the request."
            )
        return found
    for path in paths:
        found = path.fit(request)
        if not found.refused and path.call is not None:
            return found
    raise ConfigurationError(
        f"no attention path of the {backend.spec.name} backend serves {request.words()}: "
        + "; ".join(f"{path.name}: {', '.join(path.why_not(request))}" for path in paths)
    )


_remembered = lru_cache(maxsize=4096)(_find)


def forget() -> None:
    """Choose anew from now on: for tests, and after installing a plugin."""
    from portable.attn import api

    _remembered.cache_clear()
    api.forget()
