"""Sorting tokens by expert and back, with gradients: npu_moe_token_permute, ..._unpermute and their forms with a routing map.

Source: the operators' documentation in the wheel (torch_npu/_op_plugin_docs.py) and, for what drop_and_pad takes, op-plugin's
tests (test/test_custom_ops/test_npu_moe_token_*.py), whose references are Megatron's permute and unpermute. Gradients:
op-plugin's derivatives.yaml says what is passed to the backward operators; what they compute is the derivative of the forward
ones. Sums are taken in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from portable_ascend.host_acl.vendor.refusals import refuse, wide


def _check_padding(name: str, padded_mode: bool) -> None:
    if padded_mode:
        raise NotImplementedError(
            f"{name} was given padded_mode=True, which is not computed here. Use the routing map's drop_and_pad."
        )


def npu_moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens (T, H) by expert, and where each pair of token and choice went, int32 (T * K,).

    Args:
        tokens: (T, H).
        indices: experts, (T,) or (T, K).
        num_out_tokens: how many are answered; 0 or None: all; negative: so many fewer.
        padded_mode: not computed here.
    """
    _check_padding("npu_moe_token_permute", padded_mode)
    if tokens.dim() != 2 or indices.dim() not in (1, 2) or indices.shape[0] != tokens.shape[0]:
        refuse(
            "npu_moe_token_permute",
            f"tokens {tuple(tokens.shape)}, indices {tuple(indices.shape)}",
            "(T, H) and (T,) or (T, K)",
        )
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    order = torch.sort(indices.flatten(), stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel())
    asked = num_out_tokens or 0
    length = min(asked, order.numel()) if asked > 0 else order.numel() + asked
    return tokens[order[:length] // max(choices, 1)], places.int()


def _back(rows: Tensor, places: Tensor) -> Tensor:
    """The rows of all pairs, in float32 and in the order of the pairs; zeros for those that were cut off."""
    picked = (
        wide(rows)[places.long().clamp(max=max(rows.shape[0] - 1, 0))]
        if rows.shape[0]
        else wide(rows).new_zeros(places.numel(), rows.shape[1])
    )
    return picked * (places < rows.shape[0]).unsqueeze(1)


def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    padded_mode: bool = False,
) -> Tensor:
    """Gradient of the tokens, (T, H): the sum over each token's choices."""
    _check_padding("npu_moe_token_permute_grad", padded_mode)
    rows = _back(grad_permuted_tokens, sorted_indices)
    return rows.view(tokens_size_0, num_topK, -1).sum(1).to(tokens_dtype)


def npu_moe_token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    """As `npu_moe_token_permute_grad_v2`."""
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    return npu_moe_token_permute_grad_v2(
        grad_permuted_tokens, sorted_indices, tokens.shape[0], tokens.dtype, choices, padded_mode
    )


def _npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(tokens in their order, each the sum of its choices times their probabilities (T, K); the rows for the backward pass)."""
    _check_padding("npu_moe_token_unpermute", padded_mode)
    if permuted_tokens.dim() != 2 or sorted_indices.dim() != 1:
        refuse(
            "npu_moe_token_unpermute",
            f"rows {tuple(permuted_tokens.shape)}, indices {tuple(sorted_indices.shape)}",
            "(R, H), (R,)",
        )
    if probs is not None and (probs.dim() != 2 or probs.numel() != sorted_indices.numel()):
        refuse("npu_moe_token_unpermute", f"probs {tuple(probs.shape)} for {sorted_indices.numel()} rows", "(T, K)")
    choices = 1 if probs is None else probs.shape[1]
    rows = _back(permuted_tokens, sorted_indices)
    if probs is not None:
        rows = rows * wide(probs).reshape(-1, 1)
    return rows.view(-1, choices, rows.shape[1]).sum(1).to(permuted_tokens.dtype), permuted_tokens


def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    permuted_tokens_dtype: torch.dtype,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
    permuted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the rows and of the probabilities."""
    _check_padding("npu_moe_token_unpermute_grad", padded_mode)
    choices = 1 if probs is None else probs.shape[1]
    grad = wide(grad_unpermuted_tokens).repeat_interleave(choices, 0)
    of_rows = torch.zeros(permuted_tokens_size_0, grad.shape[1], dtype=grad.dtype)
    kept = sorted_indices < permuted_tokens_size_0
    of_rows[sorted_indices[kept].long()] = (grad if probs is None else grad * wide(probs).reshape(-1, 1))[kept]
    of_probs = None
    if probs is not None and permuted_tokens is not None:
        of_probs = (grad * _back(permuted_tokens, sorted_indices)).sum(1).view(probs.shape).to(probs.dtype)
    return of_rows.to(permuted_tokens_dtype), of_probs


def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `npu_moe_token_unpermute_grad_v2`."""
    return npu_moe_token_unpermute_grad_v2(
        grad_unpermuted_tokens, sorted_indices, permuted_tokens.shape[0], permuted_tokens.dtype, probs, padded_mode,
        restore_shape, permuted_tokens,
    )  # fmt: skip


# -- with a routing map: (T, E), which experts each token goes to ----------------------------------------------------------


def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(tokens by expert, their probabilities, indices int32).

    Without drop_and_pad every token goes to as many experts, and the indices say where each pair of token and expert, token by
    token, went. With it every expert gets num_out_tokens / E tokens, those that chose it first, and the indices are the tokens.

    Raises:
        ValueError: a routing map that does not fit the number of tokens to answer.
    """
    name = "npu_moe_token_permute_with_routing_map"
    if tokens.dim() != 2 or routing_map.dim() != 2 or routing_map.shape[0] != tokens.shape[0]:
        refuse(name, f"tokens {tuple(tokens.shape)}, routing_map {tuple(routing_map.shape)}", "(T, H) and (T, E)")
    asked = tokens.shape[0] if num_out_tokens is None else num_out_tokens
    chosen = routing_map.bool().t()
    if drop_and_pad:
        capacity = asked // routing_map.shape[1]
        if capacity > tokens.shape[0]:
            refuse(
                name, f"num_out_tokens={asked} for {routing_map.shape[1]} experts", f"up to {tokens.shape[0]} for each expert"
            )
        order = torch.sort(chosen.to(torch.int8), dim=-1, descending=True, stable=True).indices[:, :capacity]
        picked = None if probs is None else torch.gather(probs.t(), 1, order).flatten()
        order = order.flatten()
        return tokens[order], picked, order.int()
    if int(chosen.sum()) != asked or (tokens.shape[0] and asked % tokens.shape[0]):
        refuse(
            name, f"num_out_tokens={asked} and a routing_map with {int(chosen.sum())} pairs of {tokens.shape[0]} tokens",
            "as many pairs, and as many of each token",
        )  # fmt: skip
    sources = chosen.nonzero()[:, 1]
    places = torch.sort(sources, stable=True).indices
    return tokens[sources], None if probs is None else probs.t()[chosen], places.int()


def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of tokens and probabilities (T, E)."""
    grad, indices = wide(permuted_token_out_grad), sorted_indices.long()
    chosen = routing_map.bool().t()
    of_probs = None if probs_grad is None else torch.zeros(experts_num, tokens_num, dtype=probs_grad.dtype)
    if drop_and_pad:
        of_tokens = torch.zeros(tokens_num, grad.shape[1], dtype=grad.dtype).index_add_(0, indices, grad)
        if of_probs is not None and probs_grad is not None:
            of_probs.scatter_(1, indices.view(experts_num, -1), probs_grad.view(experts_num, -1))
    else:
        of_tokens = grad[indices].view(tokens_num, -1, grad.shape[1]).sum(1)
        if of_probs is not None and probs_grad is not None:
            of_probs[chosen] = probs_grad
    return of_tokens.to(permuted_token_out_grad.dtype), None if of_probs is None else of_probs.t().contiguous()


def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(tokens in their order, rows by token, tokens by row, probabilities of the rows), for the backward pass but the first."""
    count, indices = int(restore_shape[0]), sorted_indices.long()
    if indices.numel() and int(indices.min()) < 0:
        raise NotImplementedError(
            "npu_moe_token_unpermute_with_routing_map was given indices below 0, empty places, which are not computed here. "
            "Let every token go to as many experts."
        )
    rows = wide(permuted_tokens)
    if drop_and_pad:
        picked = None if probs is None else torch.gather(probs.t(), 1, indices.view(probs.shape[1], -1)).flatten()
        weighted = rows if picked is None else rows * wide(picked).unsqueeze(1)
        out = torch.zeros(count, rows.shape[1], dtype=rows.dtype).index_add_(0, indices, weighted)
        owners, places = torch.sort(sorted_indices, stable=True)
        return out.to(permuted_tokens.dtype), places.to(sorted_indices.dtype), owners, picked
    picked = _chosen(probs, routing_map)
    ordered = rows[indices]
    if picked is not None:
        ordered = ordered * wide(picked).unsqueeze(1)
    out = ordered.view(count, -1, rows.shape[1]).sum(1).to(permuted_tokens.dtype)
    return out, torch.zeros_like(sorted_indices), torch.zeros_like(sorted_indices), picked


def _chosen(probs: Tensor | None, routing_map: Tensor | None) -> Tensor | None:
    if probs is None:
        return None
    if routing_map is None:
        refuse("npu_moe_token_unpermute_with_routing_map", "probs without a routing_map", "both, unless drop_and_pad")
    return probs[routing_map.bool()]


def npu_moe_token_unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: Sequence[int],
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the rows and of the probabilities."""
    grad, places = wide(unpermuted_tokens_grad), out_index.long()
    count, pairs = int(restore_shape[0]), out_index.numel()
    owners = permuted_token_id.long() if drop_and_pad else torch.arange(count).repeat_interleave(pairs // max(count, 1))
    of_rows = torch.zeros(pairs, grad.shape[1], dtype=grad.dtype)
    of_rows[places] = grad[owners]
    of_probs = None
    if probs is not None and permuted_tokens is not None:
        dots = torch.zeros(pairs, dtype=grad.dtype)
        dots[places] = (grad[owners] * wide(permuted_tokens)[places]).sum(1)
        of_probs = torch.zeros(probs.shape, dtype=unpermuted_tokens_grad.dtype)
        if drop_and_pad:
            experts = places // (pairs // probs.shape[1])
            weights = wide(probs)[owners, experts]
            of_probs[owners, experts] = dots[places].to(of_probs.dtype)
        else:
            picked = _chosen(probs, routing_map)
            assert picked is not None and routing_map is not None
            weights = wide(picked)
            of_probs[routing_map.bool()] = dots[places].to(of_probs.dtype)
        of_rows[places] = of_rows[places] * weights.unsqueeze(1)
    return of_rows.to(unpermuted_tokens_grad.dtype), of_probs


# The public npu_moe_token_unpermute and ..._with_routing_map are the vendor's: they call the operators with an underscore.
OPERATORS: dict[str, Callable[..., Any]] = {
    "npu::npu_moe_token_permute": npu_moe_token_permute,
    "npu::npu_moe_token_permute_grad": npu_moe_token_permute_grad,
    "npu::npu_moe_token_permute_grad_v2": npu_moe_token_permute_grad_v2,
    "npu::_npu_moe_token_unpermute": _npu_moe_token_unpermute,
    "npu::npu_moe_token_unpermute_grad": npu_moe_token_unpermute_grad,
    "npu::npu_moe_token_unpermute_grad_v2": npu_moe_token_unpermute_grad_v2,
    "npu::npu_moe_token_permute_with_routing_map": npu_moe_token_permute_with_routing_map,
    "npu::npu_moe_token_permute_with_routing_map_grad": npu_moe_token_permute_with_routing_map_grad,
    "npu::_npu_moe_token_unpermute_with_routing_map": _npu_moe_token_unpermute_with_routing_map,
    "npu::npu_moe_token_unpermute_with_routing_map_grad": npu_moe_token_unpermute_with_routing_map_grad,
}
