"""Grouped products and the routing of experts on NPU tensors, against loops over tokens and experts in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def ops(rehearsal: Any) -> Any:
    return torch.ops.npu


def close(found: Tensor, right: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.double().cpu(), right.double(), rtol=tolerance, atol=tolerance)


# -- gating --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gating_softmax(ops: Any, dev: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    values, experts, rows = ops.npu_moe_gating_top_k_softmax(x.to(dev), None, 3)
    right = torch.softmax(x.double(), -1)
    assert experts.dtype == rows.dtype == torch.int32 and values.dtype == dtype
    flat, chosen = right.reshape(-1, 8), experts.cpu().reshape(-1, 3)
    for row in range(6):
        order = sorted(range(8), key=lambda e, row=row: -flat[row, e].item())[:3]  # type: ignore[misc]
        assert chosen[row].tolist() == order
    close(values, right.gather(-1, experts.cpu().long()), 1e-5 if dtype == torch.float32 else 1e-2)
    assert rows.cpu().reshape(6, 3).tolist() == [[r, r + 6, r + 12] for r in range(6)]


def test_finished_rows_go_nowhere(ops: Any, dev: torch.device) -> None:
    x, finished = torch.randn(3, 4), torch.tensor([False, True, False])
    _, experts, _ = ops.npu_moe_gating_top_k_softmax(x.to(dev), finished.to(dev), 2)
    assert experts[1].tolist() == [4, 4] and max(experts[0].tolist()) < 4


def test_gating_softmax_of_the_chosen(ops: Any, dev: torch.device) -> None:
    x = torch.randn(5, 8)
    values, experts, whole = ops.npu_moe_gating_top_k_softmax_v2(x.to(dev), k=3, renorm=1)
    best = x.double().topk(3, -1)
    close(values, torch.softmax(best.values, -1))
    assert torch.equal(experts.cpu().long(), best.indices) and whole.numel() == 0
    _, _, whole = ops.npu_moe_gating_top_k_softmax_v2(x.to(dev), k=3, output_softmax=True)
    close(whole, torch.softmax(x.double(), -1))


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("norm", [0, 1])
def test_gating_with_groups(ops: Any, dev: torch.device, norm: int, mode: int) -> None:
    x, bias = torch.randn(7, 12), torch.randn(12)
    options = {"k_group": 2, "group_count": 4, "group_select_mode": mode, "norm_type": norm, "out_flag": True}
    there = x.to(dev).requires_grad_()
    weights, experts, whole = ops.npu_moe_gating_top_k(there, 3, bias=bias.to(dev), routed_scaling_factor=2.5, **options)
    exact = x.double().requires_grad_()
    norms = torch.softmax(exact, -1) if norm == 0 else torch.sigmoid(exact)
    close(whole, norms.detach())
    picked = []
    for row in range(7):
        scores = (norms[row] + bias).tolist()
        best = [sorted(scores[3 * g : 3 * g + 3], reverse=True) for g in range(4)]
        groups = sorted(range(4), key=lambda g: -(best[g][0] if mode == 0 else best[g][0] + best[g][1]))[:2]
        allowed = [e for g in groups for e in range(3 * g, 3 * g + 3)]
        picked.append(sorted(allowed, key=lambda e: -scores[e])[:3])
    assert experts.tolist() == picked
    chosen = norms.gather(1, torch.tensor(picked))
    right = chosen * 2.5 / (chosen.sum(1, keepdim=True) if norm == 1 else 1)
    close(weights, right.detach())
    grad = torch.randn(7, 3)
    right.backward(grad.double())
    weights.backward(grad.to(dev))
    close(there.grad, exact.grad, 1e-4)  # type: ignore[arg-type]


# -- products ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ends", "sizes", "list"])
@pytest.mark.parametrize("split", [0, 2])
def test_grouped_matmul(ops: Any, dev: torch.device, dtype: torch.dtype, kind: str, split: int) -> None:
    x, weight = torch.randn(9, 4).to(dtype), torch.randn(3, 4, 5).to(dtype)
    ends = [2, 2, 9]
    right = torch.cat([x[a:b].double() @ weight[e].double() for e, (a, b) in enumerate([(0, 2), (2, 2), (2, 9)])])
    bias = [torch.randn(5).to(dtype).to(dev) for _ in range(3)] if dtype == torch.float32 else None
    if bias is not None:
        right = torch.cat([right[:2] + bias[0].cpu(), right[2:] + bias[2].cpu()])
    there = [x.to(dev)], [w.to(dev) for w in weight]
    if kind == "list":
        out = ops.npu_grouped_matmul.List(*there, bias=bias, group_list=ends, split_item=split)
    else:
        groups = torch.tensor(ends if kind == "ends" else [2, 0, 7], device=dev)
        out = ops.npu_grouped_matmul(
            *there, bias=bias, group_list=groups, split_item=split, group_type=0, group_list_type=int(kind == "sizes")
        )
    assert [tuple(o.shape) for o in out] == ([(2, 5), (0, 5), (7, 5)] if split == 0 else [(9, 5)])
    assert all(o.dtype == dtype for o in out)
    close(torch.cat([o.cpu() for o in out]), right, {torch.float32: 1e-5}.get(dtype, 1e-2))


def test_grouped_matmul_forms(ops: Any, dev: torch.device) -> None:
    xs, weights = [torch.randn(n, 4) for n in (2, 3)], [torch.randn(4, 5), torch.randn(4, 6)]
    out = ops.npu_grouped_matmul([x.to(dev) for x in xs], [w.to(dev) for w in weights])
    for o, x, w in zip(out, xs, weights, strict=True):
        close(o, x.double() @ w.double())
    stacked = torch.randn(2, 4, 5)
    groups = torch.tensor([2, 5], device=dev)
    x = torch.cat(xs)
    (whole,) = ops.npu_grouped_matmul([x.to(dev)], [stacked.to(dev)], group_list=groups, split_item=3, group_type=0, act_type=5)
    plain = torch.cat([x[:2].double() @ stacked[0].double(), x[2:].double() @ stacked[1].double()])
    close(whole, plain / (1 + torch.exp(-plain)))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"group_list": [2, 1]}, ValueError, "do not go down"),
        ({"group_list": [2, 99]}, ValueError, "within x"),
        ({"group_list": [2]}, ValueError, "one group for each weight"),
        ({}, ValueError, "no group_list"),
        ({"group_list": [2, 9], "act_type": 3}, ValueError, "act_type=3"),
        ({"group_list": [2, 9], "split_item": 7}, ValueError, "split_item=7"),
    ],
)
def test_grouped_matmul_refuses(ops: Any, dev: torch.device, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        ops.npu_grouped_matmul.List([torch.ones(9, 4, device=dev)], [torch.ones(4, 5, device=dev)] * 2, **options)
    with pytest.raises(NotImplementedError, match="scale"):
        ops.npu_grouped_matmul(
            [torch.ones(9, 4, device=dev)], [torch.ones(4, 5, device=dev)], scale=[torch.ones(5, device=dev)]
        )


# -- routing -------------------------------------------------------------------------------------------------------------------


def test_routing_to_experts_and_back(ops: Any, dev: torch.device) -> None:
    """A mixture of experts by the vendor's inference operators equals the sum over experts."""
    torch.manual_seed(1)
    x, gate, experts = torch.randn(10, 6), torch.randn(6, 4), torch.randn(4, 6, 6)
    bias, skip = torch.randn(4, 6), torch.randn(10, 6)
    weights, chosen, rows = ops.npu_moe_gating_top_k_softmax((x @ gate).to(dev), None, 2)
    sorted_x, places, sorted_experts = ops.npu_moe_init_routing(x.to(dev), rows, chosen, 10)
    assert sorted_experts.tolist() == sorted(chosen.flatten().tolist()) and sorted_x.shape == (20, 6)
    ends = ops.npu_moe_compute_expert_tokens(sorted_experts, 4)
    assert ends.tolist() == [int((chosen.cpu() <= e).sum()) for e in range(4)]
    (out,) = ops.npu_grouped_matmul([sorted_x], [experts.to(dev)], group_list=ends.long(), split_item=2, group_type=0)
    final = ops.npu_moe_finalize_routing(out, skip.to(dev), None, bias.to(dev), weights, places, chosen)
    right = skip.double()
    for row in range(10):
        for j in range(2):
            e = int(chosen[row, j])
            right[row] += float(weights[row, j]) * (x[row].double() @ experts[e].double() + bias[e])
    close(final, right, 1e-4)
    assert ops.npu_moe_init_routing(x.to(dev), rows, chosen, 3)[0].shape == (6, 6)


@pytest.mark.parametrize("kind", [0, 1])
def test_init_routing_v2(ops: Any, dev: torch.device, kind: int) -> None:
    x, chosen, scale = torch.randn(4, 3), torch.tensor([[2, 0], [1, 3], [0, 1], [3, 2]], dtype=torch.int32), torch.rand(4)
    out, places, tokens, scales = ops.npu_moe_init_routing_v2(
        x.to(dev), chosen.to(dev), scale=scale.to(dev), expert_num=4, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=[0, 3], row_idx_type=kind,
    )  # fmt: skip
    # Choices in order of expert, then of place: 0 at 1 and 4, 1 at 2 and 5, 2 at 0 and 7; expert 3 is left out.
    order = [1, 4, 2, 5, 0, 7]
    assert torch.equal(out[:6].cpu(), x[[place // 2 for place in order]]) and tokens.tolist() == [2, 2, 2]
    assert torch.equal(scales[:6].cpu(), scale[[place // 2 for place in order]])
    if kind == 1:
        assert places[:6].tolist() == order
    else:
        assert places.tolist() == [order.index(p) if p in order else -1 for p in range(8)]
    pairs = ops.npu_moe_init_routing_v2(
        x.to(dev),
        chosen.to(dev),
        expert_num=4,
        expert_tokens_num_type=2,
        expert_tokens_num_flag=True,
        active_expert_range=[1, 4],
    )[2]
    assert pairs.tolist() == [[1, 2], [2, 2], [3, 2], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_probs", [True, False])
def test_permute_and_unpermute(ops: Any, dev: torch.device, dtype: torch.dtype, with_probs: bool) -> None:
    k = 2 if with_probs else 1
    tokens, chosen, probs = torch.randn(5, 4).to(dtype), torch.randint(0, 3, (5, k)), torch.rand(5, k).to(dtype)
    there, weights = tokens.to(dev).requires_grad_(), probs.to(dev).requires_grad_()
    permuted, places = ops.npu_moe_token_permute(there, chosen.to(dev))
    for i in range(5 * k):
        assert torch.equal(permuted[places[i].item()].cpu(), tokens[i // k])
    assert sorted(places.tolist()) == list(range(5 * k)) and places.dtype == torch.int32
    spread = [chosen.flatten()[places.tolist().index(row)].item() for row in range(5 * k)]
    assert spread == sorted(spread)
    scale = torch.linspace(1, 2, 5 * k).view(-1, 1)
    out = ops.npu_moe_token_unpermute(permuted * scale.to(dev, dtype), places, weights if with_probs else None)
    exact, p = tokens.double().requires_grad_(), probs.double().requires_grad_()
    factors = scale.to(dtype).double()[places.cpu().long()].view(5, k)
    right = exact * ((factors * p) if with_probs else factors).sum(1, keepdim=True)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    close(out, right.detach(), tolerance)
    grad = torch.randn(5, 4)
    right.backward(grad.double())
    out.backward(grad.to(dev, dtype))
    close(there.grad, exact.grad, 3 * tolerance)  # type: ignore[arg-type]
    if with_probs:
        close(weights.grad, p.grad, 3 * tolerance)  # type: ignore[arg-type]


def test_permute_keeps_so_many(ops: Any, dev: torch.device) -> None:
    tokens, chosen = torch.randn(4, 2), torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]])
    there = tokens.to(dev).requires_grad_()
    permuted, _ = ops.npu_moe_token_permute(there, chosen.to(dev), 5)
    assert permuted.shape == (5, 2)
    permuted.sum().backward()
    # The first five in order of expert: expert 0 of tokens 0, 1, 3, 3, then expert 1 of token 0.
    assert there.grad.tolist() == [[2, 2], [1, 1], [0, 0], [2, 2]]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="padded_mode=True"):
        ops.npu_moe_token_permute(there, chosen.to(dev), None, True)
