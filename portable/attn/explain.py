"""`pt.explain_attention`: what each path makes of a call, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from portable.attn.api import request_of
from portable.attn.building import canonical
from portable.attn.describe import traits
from portable.attn.masks import Causal, CausalBottomRight, Mask, PrefixLM, SlidingWindow
from portable.attn.request import Request
from portable.attn.select import fits
from portable.backend import Backend
from portable.errors import ConfigurationError
from portable.selection import active, availability

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Verdict:
    """What one path makes of a call.

    Attributes:
        path: its name.
        title: what it is.
        chosen: whether it is the one taken.
        reasons: why it cannot serve the call; empty if it can.
        adaptations: what is changed first, with the cost.
        memory: bytes beyond inputs and answer.
        source: where its rules come from.
    """

    path: str
    title: str
    chosen: bool
    reasons: tuple[str, ...]
    adaptations: tuple[str, ...]
    memory: int
    source: str


@dataclass(frozen=True)
class Explanation:
    """All paths of a backend for one call, in the order of preference."""

    backend: str
    request: Request
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Verdict | None:
        """The path that is taken, None if none can serve the call."""
        return next((verdict for verdict in self.verdicts if verdict.chosen), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, for JSON."""
        return {"schema": "portable.attention/1", **asdict(self)}

    def table(self) -> Table:
        """For people."""
        from rich.table import Table

        where = f"{self.backend}{f' ({self.request.generation})' if self.request.generation else ''}"
        table = Table(title=f"attention on {where}: {self.request.words()}", title_justify="left", show_edge=False)
        for column in ("", "path", "why not; what is changed first", "memory"):
            table.add_column(column, overflow="fold")
        for verdict in self.verdicts:
            mark = "[green]chosen[/]" if verdict.chosen else "[red]refused[/]" if verdict.reasons else "possible"
            lines = [*verdict.reasons, *(f"+ {text}" for text in verdict.adaptations)]
            table.add_row(mark, verdict.path, "\n".join(lines) or "-", _size(verdict.memory))
        return table


def _size(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def explain(request: Request, backend: Backend) -> Explanation:
    """What each path of a backend makes of a request."""
    found = fits(request, backend.attention_paths(request))
    first = next((fit for fit in found if not fit.refused), None)
    verdicts = tuple(
        Verdict(
            fit.path.name,
            fit.path.title,
            fit is first,
            fit.refused,
            tuple(f"{a.name}: {cost}" for a, cost in zip(fit.adaptations, fit.costs, strict=True)),
            fit.path.memory(fit.request),
            fit.path.source,
        )
        for fit in found
    )
    return Explanation(backend.spec.name, request, verdicts)


def explain_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Explanation:
    """What `pt.attention` would do with these arguments, and why; nothing is computed.

    Args:
        query, key, value, options: as for `pt.attention`.
    """
    request, backend = request_of(query, key, value, **options)
    return explain(request, backend)


def declared_request(
    shape: Sequence[int],
    dtype: str = "bfloat16",
    mask: str = "none",
    dropout: float = 0.0,
    *,
    key_heads: int | None = None,
    keys: int | None = None,
    value_dim: int | None = None,
    grad: bool = False,
    dims: int = 4,
    dense_last: bool = True,
    backend: Backend | None = None,
    generation: str = "",
) -> Request:
    """A request without tensors, for a machine that need not be here.

    Args:
        shape: (B, H, L, D) of the query.
        mask: none, causal, bottom-right, window:LEFT[,RIGHT], prefix:N, padding, boolean, additive, alibi.
    """
    if len(shape) != 4 or any(size < 0 for size in shape):
        raise ConfigurationError(f"shape {tuple(shape)} was given. Give four sizes: batch, heads, length, head_dim.")
    batch, heads, queries, head_dim = shape
    length = queries if keys is None else keys
    spec = (backend or active()).spec
    if generation and generation not in spec.generations:
        raise ConfigurationError(
            f"generation {generation!r} was asked for, but the {spec.name} backend knows {', '.join(spec.generations)}."
        )
    return Request(
        spec.device_type,
        queries,
        length,
        head_dim,
        head_dim if value_dim is None else value_dim,
        dtype,
        batch,
        heads,
        heads if key_heads is None else key_heads,
        generation,
        dims,
        traits(canonical(_named(mask, batch, heads, queries, length), batch, heads, queries, length), grad),
        dropout,
        grad,
        dense_last,
    )


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def by_words(backend: Backend, shape: str, dtype: str, mask: str, dropout: float, generation: str | None, **more: Any
             ) -> Explanation:  # fmt: skip
    """An explanation from the command line's words.

    Args:
        shape: "batch,heads,length,head_dim".
        dtype: "bf16" or "bfloat16" ...
        generation: of the backend's table; "8.0" stands for "sm_80". That of the device here if it is left out.
    """
    try:
        sizes = [int(part) for part in shape.split(",")]
    except ValueError:
        raise ConfigurationError(f"shape {shape!r} was given. Give four numbers: batch,heads,length,head_dim.") from None
    name = _DTYPES.get(dtype.lower(), dtype.lower())
    if name not in _DTYPES.values():
        raise ConfigurationError(f"dtype {dtype!r} was given. Use one of {', '.join(_DTYPES)}.")
    known = backend.spec.generations
    wanted = generation or ""
    if wanted and wanted not in known:
        wanted = next((n for n in (f"sm_{wanted.replace('.', '')}", *known) if n in known and _same(n, wanted)), wanted)
    if not wanted and availability(backend).available:
        found = backend.generation()
        wanted = found.name if found else ""
    request = declared_request(sizes, name, mask, dropout, backend=backend, generation=wanted, **more)
    return explain(request, backend)


def _same(name: str, wanted: str) -> bool:
    return name.lower() in (wanted.lower(), f"sm_{wanted.replace('.', '')}", f"ascend{wanted.lower()}")


def _named(name: str, batch: int, heads: int, queries: int, keys: int) -> Mask | Tensor | None:
    import torch

    from portable.attn.masks import ALiBi, Padding, alibi_slopes

    kind, _, rest = name.partition(":")
    numbers = [int(part) for part in rest.split(",") if part.strip().lstrip("-").isdigit()]
    plain: dict[str, Any] = {
        "none": lambda: None,
        "causal": Causal,
        "bottom-right": CausalBottomRight,
        "window": lambda: SlidingWindow(*(numbers or [256])),
        "prefix": lambda: PrefixLM(*(numbers or [1])),
        "padding": lambda: Padding([keys] * batch),
        # Patterns that no specification says, or they would be taken for one.
        "boolean": lambda: (torch.arange(keys) % 2 == 0).expand(queries, keys),
        "additive": lambda: torch.full((1, 1), 0.5).expand(queries, keys),
        "alibi": lambda: ALiBi(alibi_slopes(heads)),
    }
    if kind not in plain:
        raise ConfigurationError(f"mask {name!r} was asked for. Use one of {', '.join(plain)}.")
    return plain[kind]()
