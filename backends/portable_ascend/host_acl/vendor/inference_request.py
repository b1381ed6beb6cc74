"""A call of one of the vendor's attention operators for inference, and what its page does not allow. See `inference_core`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor import masks
from portable_ascend.host_acl.vendor.refusals import refuse

EVERYTHING = 2**31 - 1
# Of the query, and behind an underscore of the output where it is another.
LAYOUTS = (
    "BSH", "BSND", "BNSD", "TND", "NTD", "NSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "BSH_NBSD", "BSND_NBSD",
    "BNSD_NBSD", "TND_NTD",
)  # fmt: skip
_DIMENSIONS = {"BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3, "NTD": 3, "NSD": 3}
FULL_MASKS = (masks.DEFAULT, masks.ALL)
TRIANGLES = (masks.LEFT_UP, masks.RIGHT_DOWN, masks.BAND)
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Request:
    """One call. Names are those of npu_fused_infer_attention_score; None and the defaults as there."""

    operator: str
    query: Tensor
    key: Tensor
    value: Tensor
    heads: int
    key_heads: int = 0
    layout: str = "BSH"
    scale: float = 1.0
    bias: Tensor | None = None
    mask: Tensor | None = None
    mode: int = 0
    before: int = EVERYTHING
    after: int = EVERYTHING
    precision: int = 0
    query_lengths: Sequence[int] | None = None
    key_lengths: Sequence[int] | None = None
    block_table: Tensor | None = None
    block_size: int = 0
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    key_prefix: Tensor | None = None
    value_prefix: Tensor | None = None
    prefix_length: Sequence[int] | None = None
    sink: Tensor | None = None
    lse: bool = False

    @property
    def layout_in(self) -> str:
        """Layout of the query, and of keys and values that are not paged."""
        return self.layout.partition("_")[0]

    @property
    def layout_out(self) -> str:
        """Layout of the output."""
        return self.layout.rpartition("_")[2]

    @property
    def packed(self) -> bool:
        """Whether the sequences lie one behind another."""
        return self.layout_in in ("TND", "NTD")

    @property
    def single(self) -> bool:
        """Whether each sequence has one query."""
        return not self.packed and self.query.shape[2 if self.layout_in == "BNSD" else 1] == 1

    @property
    def groups(self) -> int:
        """Number of key heads."""
        return self.key_heads or self.heads

    def refuse(self, found: str, allowed: str) -> NoReturn:
        """See `refusals.refuse`."""
        refuse(self.operator, found, allowed)


def refuse_quantised(operator: str, others: dict[str, Any]) -> None:
    """Refuse arguments of quantised attention.

    Raises:
        NotImplementedError: any of them has a value.
    """
    given = sorted(name for name, value in others.items() if value is not None)
    if given:
        raise NotImplementedError(
            f"{operator} was given {', '.join(given)}, arguments of quantised attention or of padding on the left, which are "
            "not computed here. Use float16 or bfloat16 tensors without them, or an Ascend device."
        )


def check(request: Request) -> None:
    """Refuse what no sizes are needed to tell.

    Raises:
        ValueError: what the pages do not allow.
        NotImplementedError: tree masks (sparse_mode 9).
    """
    query, key, value = request.query, request.key, request.value
    if request.layout not in LAYOUTS:
        request.refuse(f"input_layout={request.layout!r}", ", ".join(LAYOUTS))
    if query.dim() != _DIMENSIONS[request.layout_in] or (request.block_table is None and key.dim() != query.dim()):
        request.refuse(
            f"query and key of shape {tuple(query.shape)}, {tuple(key.shape)} with input_layout={request.layout!r}",
            f"{_DIMENSIONS[request.layout_in]} dimensions with it",
        )
    if query.dtype not in _DTYPES or not query.dtype == key.dtype == value.dtype:
        request.refuse(
            f"dtypes {query.dtype}, {key.dtype}, {value.dtype}", "float16 or bfloat16 (quantised: not computed here)"
        )
    if not 1 <= request.heads <= 256 or request.key_heads < 0:
        request.refuse(f"{request.heads} query heads and {request.key_heads} key heads", "1 to 256, and 0 for as many")
    if request.heads % request.groups or request.heads // request.groups > 64:
        request.refuse(
            f"{request.heads} query heads and {request.groups} key heads",
            "a multiple of the key heads, at most 64 times as many",
        )
    if (request.query_rope is None) != (request.key_rope is None):
        request.refuse("one of query_rope and key_rope", "both or neither")
    if (request.key_prefix is None) != (request.value_prefix is None):
        request.refuse("one of key_shared_prefix and value_shared_prefix", "both or neither")
    if request.query_rope is not None and (request.bias is not None or request.key_prefix is not None):
        request.refuse("query_rope with pse_shift or a shared prefix", "none of them beside it")
    if request.precision not in (0, 1, 2, 3):
        request.refuse(f"inner_precise={request.precision}", "0 to 3")
    if request.mode == 9:
        raise NotImplementedError(f"{request.operator} was given sparse_mode=9, tree masks, which are not computed here.")
    if request.mode not in (*FULL_MASKS, *TRIANGLES):
        request.refuse(f"sparse_mode={request.mode}", "0 to 4")
    if request.packed and (request.bias is not None or request.key_prefix is not None):
        request.refuse(f"pse_shift or a shared prefix with input_layout={request.layout!r}", "none with packed sequences")
    if request.sink is not None:
        if request.layout not in ("TND", "NTD_TND"):
            request.refuse(f"learnable_sink with input_layout={request.layout!r}", "it with TND and NTD_TND")
        if request.sink.dtype != torch.bfloat16 or request.sink.shape != (request.heads,):
            request.refuse(
                f"a learnable_sink of {request.sink.dtype} and shape {tuple(request.sink.shape)}",
                f"bfloat16 ({request.heads},)",
            )
