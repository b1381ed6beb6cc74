"""A path: one way of computing attention, with declared constraints, and what may be changed so that a request meets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from portable.attn.canonical import Canonical
from portable.attn.request import Request


@dataclass(frozen=True)
class Arguments:
    """A call's tensors in the order (batch, heads, length, head_dim), and what goes with them."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Canonical
    dropout: float
    scale: float
    lse: bool = False


Answer = tuple[Tensor, Tensor | None]
"""Attention (B, H, Lq, Dv), and the log-sum-exp (B, H, Lq) if it was asked for."""


@dataclass(frozen=True)
class Adaptation:
    """A change that does not change the answer.

    Attributes:
        name: short, for tables.
        request: the request after it.
        cost: what it costs, in words.
        before: the arguments after it; None if the path does it itself.
        after: undoes it on the answer, given the arguments as they were; None if nothing is to be undone.
    """

    name: str
    request: Callable[[Request], Request]
    cost: Callable[[Request], str]
    before: Callable[[Arguments], Arguments] | None = None
    after: Callable[[Arguments, Answer], Answer] | None = None


@dataclass(frozen=True)
class Constraint:
    """One condition of a path.

    Attributes:
        broken: whether a request does not meet it.
        reason: why not, in words.
        adaptation: a change after which it does, if there is one.
    """

    broken: Callable[[Request], bool]
    reason: Callable[[Request], str]
    adaptation: Adaptation | None = None


@dataclass(frozen=True)
class Path:
    """One way of computing attention.

    Attributes:
        name: unique on its backend.
        title: what it is, in words.
        constraints: checked in order; an adaptation is applied before the next one is checked.
        call: computes it; None for a path that is only explained (its package is not here).
        memory: bytes beyond inputs and answer.
        fused: does not hold all scores.
        source: where the constraints come from.
    """

    name: str
    title: str
    constraints: tuple[Constraint, ...]
    call: Callable[[Arguments], Answer] | None
    memory: Callable[[Request], int]
    source: str
    fused: bool = True

    def why_not(self, request: Request) -> list[str]:
        """Reasons why this path cannot serve the request, adapted or not; empty if it can."""
        return self.fit(request).reasons

    def fit(self, request: Request) -> Fit:
        """What it would take to serve the request."""
        reasons, adaptations, costs = [], [], []
        adapted = request
        for constraint in self.constraints:
            if not constraint.broken(adapted):
                continue
            found = constraint.adaptation
            if found is not None and found not in adaptations and not constraint.broken(found.request(adapted)):
                adaptations.append(found)
                costs.append(found.cost(adapted))
                adapted = found.request(adapted)
                continue
            reasons.append(constraint.reason(adapted))
        return Fit(self, tuple(reasons), tuple(adaptations), tuple(costs), adapted)


@dataclass(frozen=True)
class Fit:
    """How a path serves a request.

    Attributes:
        path: the path.
        refused: reasons why it cannot; empty if it can.
        adaptations: changes made before.
        costs: what each costs.
        request: the request after them.
    """

    path: Path
    refused: tuple[str, ...]
    adaptations: tuple[Adaptation, ...]
    costs: tuple[str, ...]
    request: Request

    @property
    def reasons(self) -> list[str]:
        """Reasons why the path cannot serve the request."""
        return list(self.refused)

    def run(self, arguments: Arguments) -> Answer:
        """Compute it."""
        call = self.path.call
        assert call is not None, "the selector takes only paths that can be called"
        if not self.adaptations:
            return call(arguments)
        stack = []
        for adaptation in self.adaptations:
            if adaptation.before is not None:
                stack.append((adaptation, arguments))
                arguments = adaptation.before(arguments)
        answer = call(arguments)
        for adaptation, given in reversed(stack):
            if adaptation.after is not None:
                answer = adaptation.after(given, answer)
        return answer


def constraint(
    broken: Callable[[Request], bool], reason: str | Callable[[Request], str], adaptation: Adaptation | None = None
) -> Constraint:
    """A condition whose reason may be a text with the request's fields in braces ("head_dim {head_dim} is above 256")."""
    words = reason if callable(reason) else lambda request, text=reason: text.format_map(_Fields(request))
    return Constraint(broken, words, adaptation)


class _Fields(Mapping[str, Any]):
    def __init__(self, request: Request) -> None:
        self._request = request

    def __getitem__(self, name: str) -> Any:
        return getattr(self._request, name)

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def changed(request: Request, **fields: Any) -> Request:
    """A request with other fields."""
    return replace(request, **fields)


def ordered(paths: Sequence[Path], names: Sequence[str]) -> tuple[Path, ...]:
    """Paths in an order of preference."""
    known = {path.name: path for path in paths}
    return tuple(known[name] for name in names)
