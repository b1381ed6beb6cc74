"""What a plugin may provide (pluggy hook specifications).

A plugin is a module or object named by an entry point of the group ``portable``::

    [project.entry-points.portable]
    acme = "portable_acme"

It implements any of the hooks below with the marker ``portable.hookspecs.hookimpl``. Importing a plugin must not import the
vendor's package: that happens in `Backend.load`, when the backend is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pluggy

if TYPE_CHECKING:
    from portable.backend import Backend

PROJECT = "portable"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@runtime_checkable
class AttentionPath(Protocol):
    """One way of computing attention on a backend."""

    name: str

    def why_not(self, request: Any) -> list[str]:
        """Reasons why this path cannot serve the request; empty if it can."""


@runtime_checkable
class ConformanceCase(Protocol):
    """One check of the conformance suite."""

    name: str

    def run(self, backend: Backend) -> None:
        """Raise AssertionError if the backend computes something wrong."""


@runtime_checkable
class MigrationRule(Protocol):
    """One rule of the migration checklist."""

    code: str
    title: str


@hookspec
def portable_backend() -> Backend:  # type: ignore[empty-body]
    """Provide a backend: an instance of a subclass of `portable.backend.Backend`.

    Return it on every machine; whether it can run there is what its ``probe`` says.
    """


@hookspec
def portable_attention_paths(backend: str) -> Sequence[AttentionPath]:  # type: ignore[empty-body]
    """Add attention paths to the backend of this name; an empty sequence for backends the plugin does not know."""


@hookspec
def portable_conformance_cases() -> Sequence[ConformanceCase]:  # type: ignore[empty-body]
    """Add cases to the conformance suite."""


@hookspec
def portable_migration_rules() -> Sequence[MigrationRule]:  # type: ignore[empty-body]
    """Add rules to the migration checklist."""
