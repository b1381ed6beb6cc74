"""Keys and values in blocks of memory that a table assigns to sequences ("page attention").

Source: the API pages of ``torch_npu.npu_fused_infer_attention_score`` and ``npu_incre_flash_attention``: block_table,
block_size and the layouts of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pages:
    """Where the blocks of each sequence are.

    Attributes:
        operator: for messages.
        table: block_table, int32 (batch, blocks of a sequence).
        size: tokens of a block.
        heads: number of key heads.
    """

    operator: str
    table: Tensor
    size: int
    heads: int

    @property
    def capacity(self) -> int:
        """The longest sequence that the table has room for."""
        return int(self.table.shape[-1]) * self.size

    def check(self, batch: int, heads_first: bool, caches: Sequence[Tensor]) -> None:
        """Refuse a table or caches that do not fit.

        Args:
            batch: number of sequences.
            heads_first: whether the query's layout goes with caches (blocks, heads, block_size, head_dim).
            caches: key and value.

        Raises:
            ValueError: see above.
        """
        if self.table.dtype != torch.int32 or self.table.dim() != 2 or self.table.shape[0] != batch:
            raise ValueError(
                f"{self.operator} was given a block_table of {self.table.dtype} and shape {tuple(self.table.shape)} for a "
                f"batch of {batch}. It takes int32 of shape ({batch}, blocks of a sequence)."
            )
        if caches[0].shape[:-1] != caches[1].shape[:-1]:
            raise ValueError(
                f"{self.operator} was given caches of shape {tuple(caches[0].shape)} and {tuple(caches[1].shape)}. It takes "
                "one shape for keys and values."
            )
        for cache in caches:
            if cache.dim() == 4 and not heads_first:
                raise ValueError(
                    f"{self.operator} was given a cache of shape {tuple(cache.shape)} with a query in layout BSH or BSND. "
                    "They go with (blocks, block_size, heads * head_dim) only."
                )

    def gather(self, cache: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The tokens of each sequence, (heads, length, head_dim).

        Args:
            cache: (blocks, block_size, heads * head_dim), (blocks, heads, block_size, head_dim), or the device's own format
                (blocks, heads, head_dim / 16, block_size, 16).
            lengths: of the sequences.

        Raises:
            ValueError: a cache of another shape, or a block that does not exist.
        """
        if cache.dim() == 3 and cache.shape[1] == self.size and cache.shape[2] % self.heads == 0:
            cache = cache.unflatten(2, (self.heads, -1)).transpose(1, 2)
        elif cache.dim() == 5:
            cache = cache.permute(0, 1, 3, 2, 4).flatten(3)
        if cache.dim() != 4 or cache.shape[1] != self.heads or cache.shape[2] != self.size:
            raise ValueError(
                f"{self.operator} was given a cache of shape {tuple(cache.shape)} with block_size={self.size} and {self.heads} "
                "key heads. It takes (blocks, block_size, heads * head_dim) or (blocks, heads, block_size, head_dim)."
            )
        found = []
        for row, length in zip(self.table, lengths, strict=True):
            blocks = row[: -(-length // self.size)].long()
            if blocks.numel() and not 0 <= int(blocks.min()) <= int(blocks.max()) < cache.shape[0]:
                raise ValueError(
                    f"{self.operator} was given blocks {blocks.tolist()} and a cache of {cache.shape[0]} blocks. The "
                    "device does not check this and would read other memory."
                )
            found.append(cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length])
        return found
