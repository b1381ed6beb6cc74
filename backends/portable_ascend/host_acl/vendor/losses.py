"""Softmax with a mask, and losses with it, by the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_ascend.host_acl.derivatives import derivative
from portable_ascend.host_acl.vendor.refusals import check_floats, refuse, wide

_SMALL = -10000.0  # assumed: what the kernel puts where the mask is set, since rows masked throughout give equal weights


def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False) -> Tensor:
    """``softmax(scale * x)`` over the last dimension, zero where the mask is True.

    Args:
        x: (..., H, W), H and W from 32 to 4096 and multiples of 32.
        mask: bool, broadcastable to x; the upper triangle takes its place with fixed_triu_mask.
    """
    operator = "npu_scaled_masked_softmax"
    check_floats(operator, x=x)
    if x.dim() < 2 or any(size % 32 or not 32 <= size <= 4096 for size in x.shape[-2:]):
        refuse(operator, f"x of shape {tuple(x.shape)}", "last two sizes from 32 to 4096 that are multiples of 32")
    if mask.dtype != torch.bool and not fixed_triu_mask:
        refuse(operator, f"a mask of {mask.dtype}", "bool")
    return torch.softmax((wide(x) * scale).masked_fill(_mask(x, mask, fixed_triu_mask), _SMALL), -1).to(x.dtype)


def _mask(x: Tensor, mask: Tensor, triangle: bool) -> Tensor:
    return torch.ones(x.shape[-2:], dtype=torch.bool).triu(1) if triangle else mask


def npu_scaled_masked_softmax_backward(y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool) -> Tensor:
    """Gradient of x, by the forward pass's answer."""
    grad, out = wide(y_grad), wide(y)
    found = scale * out * (grad - (grad * out).sum(-1, keepdim=True))
    return found.masked_fill(_mask(y, mask, fixed_triu_mask), 0).to(y.dtype)


def npu_cross_entropy_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
    return_zloss: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy of logits (N, C) and classes (N,): the loss, log-probabilities, and two empty ones for the z loss."""
    operator = "npu_cross_entropy_loss"
    check_floats(operator, input=input, weight=weight)
    if reduction not in ("mean", "sum", "none"):
        refuse(operator, f"reduction={reduction!r}", "mean, sum or none")
    if lse_square_scale_for_zloss or return_zloss:
        refuse(operator, "a z loss", "none: the vendor's documentation says that it is not available yet")
    log_prob = torch.log_softmax(wide(input), -1)
    loss = F.cross_entropy(
        log_prob, target, weight, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    loss = (loss if reduction == "none" else loss.view(1)).to(input.dtype)
    return loss, log_prob.to(input.dtype), torch.empty(0, dtype=input.dtype), torch.empty(0, dtype=input.dtype)


def npu_cross_entropy_loss_backward(
    grad_loss: Tensor,
    log_prob: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    grad_zloss: Tensor | None = None,
    lse_for_zloss: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale_for_zloss: float = 0.0,
) -> Tensor:
    """Gradient of the logits, by the log-probabilities of the forward pass."""
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    grad = wide(grad_loss) if reduction == "none" else wide(grad_loss).sum()
    # The logits are known up to a number for each row, on which the loss does not depend.
    found = derivative(lambda x: F.cross_entropy(x, target, weight, **options), [wide(log_prob)], grad)
    return found[0].to(log_prob.dtype)


def npu_softmax_cross_entropy_with_logits(input: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits and probabilities (N, C), for each row."""
    return -(wide(labels) * torch.log_softmax(wide(input), -1)).sum(-1).to(input.dtype)


def npu_softmax_cross_entropy_with_logits_backward(grad: Tensor, input: Tensor, labels: Tensor) -> Tensor:
    """Gradient of the logits."""
    rows = wide(grad).unsqueeze(-1)
    return (rows * (torch.softmax(wide(input), -1) * wide(labels).sum(-1, keepdim=True) - wide(labels))).to(input.dtype)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    f"npu::{function.__name__}": function
    for function in (
        npu_scaled_masked_softmax,
        npu_scaled_masked_softmax_backward,
        npu_cross_entropy_loss,
        npu_cross_entropy_loss_backward,
        npu_softmax_cross_entropy_with_logits,
        npu_softmax_cross_entropy_with_logits_backward,
    )
}
