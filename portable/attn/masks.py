"""Which keys a query attends to, as specifications instead of tensors.

A specification is a rule on positions. It costs nothing to make, and each path turns it into what its kernel wants (a flag, a
window, lengths, a tensor) once per shape: see `portable.attn.canonical`. Specifications are joined by ``&``: a query attends to
what all of them allow. Positions count from 0: row r is the r-th query, column c the c-th key; Lq queries, Lk keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from portable.errors import ConfigurationError


class Mask:
    """Base of all specifications.

    Attributes:
        token: what tells it from others, hashable; None where that is a tensor.
    """

    @property
    def token(self) -> Any:
        """See the class."""
        return None

    def __and__(self, other: Mask | Tensor) -> Mask:
        return Intersection((*self.parts(), *as_mask(other).parts()))

    def __rand__(self, other: Tensor) -> Mask:
        return as_mask(other) & self

    def parts(self) -> tuple[Mask, ...]:
        """The specifications that are joined, without joined ones among them."""
        return (self,)


@dataclass(frozen=True)
class Causal(Mask):
    """Row r attends to columns 0 to r: aligned at the top left, as PyTorch's ``is_causal``."""

    token: ClassVar[Any] = ("causal",)


@dataclass(frozen=True)
class CausalBottomRight(Mask):
    """The last row attends to all columns: row r to columns 0 to r + Lk - Lq.

    What decoding and chunked prefill with a cache need, where the queries are the last of the positions. As
    ``torch.nn.attention.bias.causal_lower_right`` and FlashAttention from 2.1 on.
    """

    token: ClassVar[Any] = ("bottom right",)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Row r attends to the columns from ``left`` before to ``right`` after its position, r + Lk - Lq.

    Args:
        left: columns before the position, None for all of them.
        right: columns after it, None for all of them; 0 makes the window causal.
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ConfigurationError(
                    f"SlidingWindow was given {name}={value!r}. Give a number of keys, 0 or more, or None for no limit."
                )

    @property
    def token(self) -> Any:
        """See `Mask`."""
        return ("window", self.left, self.right)


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Keys behind a sequence's end are not attended to.

    Args:
        lengths: (B,) number of keys of each sequence; a tensor of integers, or numbers.
    """

    lengths: Tensor

    def __init__(self, lengths: Tensor | Sequence[int]) -> None:
        object.__setattr__(self, "lengths", _integers("Padding", "lengths", lengths, (1,)))


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """Attention stays within a document: queries and keys with the same number.

    Args:
        ids: (L,) or (B, L) number of the document of each position; of the keys if queries have numbers of their own.
        query_ids: (Lq,) or (B, Lq), where the queries are not the same positions as the keys.
    """

    ids: Tensor
    query_ids: Tensor | None = None

    def __init__(self, ids: Tensor | Sequence[int], query_ids: Tensor | Sequence[int] | None = None) -> None:
        object.__setattr__(self, "ids", _integers("Document", "ids", ids, (1, 2)))
        given = None if query_ids is None else _integers("Document", "query_ids", query_ids, (1, 2))
        object.__setattr__(self, "query_ids", given)


@dataclass(frozen=True, eq=False)
class PrefixLM(Mask):
    """The first ``n`` columns are attended to by all rows, the others causally (bottom right).

    Args:
        n: length of the prefix, or (B,) one for each sequence.
    """

    n: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.n, Tensor):
            _integers("PrefixLM", "n", self.n, (1,))
        elif isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 0:
            raise ConfigurationError(f"PrefixLM was given n={self.n!r}. Give a number of keys, 0 or more, or a tensor (B,).")

    @property
    def token(self) -> Any:
        """See `Mask`."""
        return None if isinstance(self.n, Tensor) else ("prefix", self.n)


@dataclass(frozen=True, eq=False)
class ALiBi(Mask):
    """A bias of ``-slope * distance`` on the scores of each head (Press et al. 2022); alone it masks nothing.

    Args:
        slopes: (H,) or (B, H) positive slopes. `alibi_slopes` has the paper's.
    """

    slopes: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.slopes, Tensor) or self.slopes.dim() not in (1, 2) or not self.slopes.is_floating_point():
            raise ConfigurationError(f"ALiBi was given slopes={_shown(self.slopes)}. Give a float tensor (H,) or (B, H).")


@dataclass(frozen=True)
class Band(Mask):
    """Row r attends to the columns r + low to r + high: what a recognised tensor says."""

    low: int
    high: int

    @property
    def token(self) -> Any:
        """See `Mask`."""
        return ("band", self.low, self.high)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A tensor that broadcasts to (B, H, Lq, Lk): boolean, True for what is attended to; or numbers added to the scores."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Intersection(Mask):
    """What all of several specifications allow; biases add up."""

    members: tuple[Mask, ...]

    def __post_init__(self) -> None:
        tokens = tuple(member.token for member in self.members)
        object.__setattr__(self, "_token", None if None in tokens else tokens)

    @property
    def token(self) -> Any:
        """See `Mask`."""
        return self._token  # type: ignore[attr-defined]

    def parts(self) -> tuple[Mask, ...]:
        return self.members


def as_mask(value: Mask | Tensor) -> Mask:
    """A specification, or a tensor as one.

    Raises:
        ConfigurationError: it is neither.
    """
    if isinstance(value, Mask):
        return value
    if isinstance(value, Tensor):
        return Dense(value)
    raise ConfigurationError(
        f"mask={_shown(value)} was given. Pass a specification (pt.Causal(), pt.SlidingWindow(...), ...), a tensor, or None."
    )


def alibi_slopes(heads: int) -> Tensor:
    """The slopes of Press et al. 2022 (arXiv:2108.12409, section 3): a geometric sequence from 2^(-8 / heads).

    Args:
        heads: number of query heads; where it is no power of two, the sequence of the next lower one is filled up with every
            other element of the next higher one, as in the paper's code.
    """
    if heads < 1:
        raise ConfigurationError(f"slopes for {heads} heads were asked for. Give a number of heads, 1 or more.")
    lower = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / lower) for i in range(lower)]
    slopes += [2 ** (-4 * (2 * i + 1) / lower) for i in range(heads - lower)]
    return torch.tensor(slopes)


def _integers(name: str, argument: str, value: Tensor | Sequence[int], dims: tuple[int, ...]) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.tensor(list(value))
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(())
    if tensor.dim() not in dims or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ConfigurationError(
            f"{name} was given {argument}={_shown(value)}. Give integers of {' or '.join(map(str, dims))} "
            f"dimension{'s' if dims != (1,) else ''}."
        )
    return tensor


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype)[6:]} and shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
