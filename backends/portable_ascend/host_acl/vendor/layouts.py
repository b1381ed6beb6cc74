"""Layouts of the vendor's attention operators, and the one that the arithmetic here uses: (batch, heads, length, head_dim).

Letters: B batch, S length, N heads, D head_dim, H = N * D, T the lengths of a batch one behind another. Source: the API page of
``torch_npu.npu_fusion_attention``, input_layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

DENSE = ("BSH", "SBH", "BSND", "BNSD")
LAYOUTS = (*DENSE, "TND")
_DIMENSIONS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}


@dataclass(frozen=True)
class Layout:
    """A layout with what it does not show itself: the number of heads."""

    name: str
    heads: int

    def to_bnsd(self, tensor: Tensor, heads: int) -> Tensor:
        """A view in the order (batch, heads, length, head_dim)."""
        if self.name == "BNSD":
            return tensor
        if self.name == "BSND":
            return tensor.transpose(1, 2)
        if self.name == "SBH":
            tensor = tensor.transpose(0, 1)
        return tensor.unflatten(-1, (heads, tensor.shape[-1] // heads)).transpose(1, 2)

    def from_bnsd(self, tensor: Tensor) -> Tensor:
        """The inverse, contiguous."""
        if self.name == "BNSD":
            return tensor.contiguous()
        tensor = tensor.transpose(1, 2)
        if self.name == "BSND":
            return tensor.contiguous()
        tensor = tensor.flatten(2)
        return (tensor.transpose(0, 1) if self.name == "SBH" else tensor).contiguous()

    def key_heads(self, query: Tensor, key: Tensor) -> int:
        """Number of key heads, from the sizes."""
        if self.name == "BNSD":
            return key.shape[1]
        if self.name in ("BSND", "TND"):
            return key.shape[-2]
        head_dim = query.shape[-1] // self.heads
        return key.shape[-1] // head_dim if head_dim else 0


def check_layout(operator: str, layout: str, allowed: Sequence[str], **tensors: Tensor) -> None:
    """Refuse an unknown layout, or tensors of other dimensions than it has.

    Raises:
        ValueError: see above.
    """
    if layout not in allowed:
        raise ValueError(f"{operator} was given input_layout={layout!r}. It takes {', '.join(allowed)}.")
    for name, tensor in tensors.items():
        if tensor.dim() != _DIMENSIONS[layout]:
            raise ValueError(
                f"{operator} was given {name} of shape {tuple(tensor.shape)} with input_layout={layout!r}, which has "
                f"{_DIMENSIONS[layout]} dimensions. Reshape it, or name its layout."
            )
