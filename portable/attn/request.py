"""A call of attention, as far as the choice of a path depends on it: sizes, dtypes and kinds, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class MaskTraits:
    """What a path may ask of a mask (see `portable.attn.canonical.Canonical`).

    Attributes:
        kind: in words, "none" without one.
        trivial: everything is attended to.
        causal: PyTorch's ``is_causal`` and nothing more.
        bottom_right: the last row attends to all keys, causally, and nothing more (Lq = Lk: the same as causal).
        band: only the distance of column and row decides.
        window: for a band, (least, greatest) ``column - row``.
        boolean: it can be said by a boolean tensor: it has no bias.
        bias: it adds numbers to the scores.
        learned: gradients of the bias are wanted.
        dense: a tensor was given, broadcast to (batch, heads) of these sizes.
        same_for_heads: it is the same for all heads.
        empty_rows: rows may be masked throughout.
    """

    kind: str = "none"
    trivial: bool = True
    causal: bool = False
    bottom_right: bool = False
    band: bool = True
    window: tuple[int, int] | None = None
    boolean: bool = True
    bias: bool = False
    learned: bool = False
    dense: bool = False
    same_for_heads: bool = True
    empty_rows: bool = False


@dataclass(frozen=True)
class Request:
    """One call.

    Attributes:
        device: PyTorch's device type.
        generation: name of the device's generation, "" if it is not known.
        dims: dimensions of the inputs, 3 or 4.
        batch, heads, key_heads, queries, keys: sizes B, H, Hk, Lq, Lk.
        head_dim, value_dim: D of query and key, Dv of value.
        dtype: of all three ("bfloat16").
        mask: see `MaskTraits`.
        dropout: rate.
        grad: whether a backward pass will follow.
        dense_last: the last dimension of all three is contiguous.
        deterministic: torch.use_deterministic_algorithms is on.
        lse: the log-sum-exp is wanted.
        compiled: within torch.compile.
        packed: sequences lie one behind another (cu_seqlens).
        off: PyTorch's flash, efficient and cuDNN kernels that ``torch.nn.attention.sdpa_kernel`` has switched off.
    """

    device: str
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    batch: int = 1
    heads: int = 1
    key_heads: int = 1
    generation: str = ""
    dims: int = 4
    mask: MaskTraits = MaskTraits()
    dropout: float = 0.0
    grad: bool = False
    dense_last: bool = True
    deterministic: bool = False
    lse: bool = False
    compiled: bool = False
    packed: bool = False
    off: tuple[bool, bool, bool] = (False, False, False)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return _BYTES[self.dtype]

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.heads != self.key_heads

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in (self.batch, self.heads, self.queries, self.keys, self.head_dim, self.value_dim)

    @property
    def score_bytes(self) -> int:
        """Memory of all scores in the inputs' dtype, which the math path holds at least twice."""
        return self.batch * self.heads * self.queries * self.keys * self.itemsize

    @property
    def mask_bytes(self) -> int:
        """Memory of the mask as a tensor that is the same for all sequences and heads."""
        return self.queries * self.keys * (self.heads * self.itemsize if self.mask.bias else 1)

    @property
    def default_scale(self) -> float:
        """1 / sqrt(D)."""
        return 1 / sqrt(self.head_dim) if self.head_dim else 1.0

    def words(self) -> str:
        """The request in a line."""
        shape = f"{self.batch},{self.heads},{self.queries},{self.head_dim}"
        parts = [f"query ({shape})"]
        if self.grouped or self.keys != self.queries or self.value_dim != self.head_dim:
            parts.append(f"{self.key_heads} key heads, {self.keys} keys, value head_dim {self.value_dim}")
        parts += [self.dtype, f"mask {self.mask.kind}"]
        parts += [f"dropout {self.dropout:g}"] if self.dropout else []
        parts += ["training" if self.grad else "inference"]
        return ", ".join(parts)
