"""Operators for mixtures of experts and grouped products, against plain loops written from the vendor's pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_reference import close
from torch import Tensor

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
npu = torch.ops.npu


def _there(dev: torch.device, *values: Any) -> list[Any]:
    return [v.to(dev) if isinstance(v, Tensor) else v for v in values]


def _same_shapes(mine: Sequence[Any], theirs: Sequence[Any]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(a, Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


def _integers(*shape: int, high: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(0, high, shape, dtype=dtype)


# -- choosing experts ---------------------------------------------------------------------------------------------------------


def _choose(row: Tensor, bias: Tensor, k: int, groups: int, kept: int, by_two: bool) -> list[int]:
    """One row's experts: best groups first, then the best experts in them; the lower number first where two are equal."""
    ranked = row + bias
    size = len(row) // groups
    parts = [sorted(ranked[g * size : (g + 1) * size].tolist(), reverse=True) for g in range(groups)]
    scores = [part[0] + part[1] if by_two else part[0] for part in parts]
    best = sorted(range(groups), key=lambda g: (-scores[g], g))[:kept]
    allowed = [e for e in range(len(row)) if e // size in best]
    return sorted(allowed, key=lambda e: (-float(ranked[e]), e))[:k]


@pytest.mark.parametrize("dtype", [FULL, HALF, BF16])
@pytest.mark.parametrize("norm", [0, 1])
@pytest.mark.parametrize(("groups", "kept", "by_two"), [(1, 1, 0), (8, 4, 0), (8, 4, 1), (4, 1, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_gating(dev: torch.device, dtype: torch.dtype, norm: int, groups: int, kept: int, by_two: int, biased: bool) -> None:
    x, bias = torch.randn(9, 32).to(dtype), (torch.randn(32) * 0.1).to(dtype)
    options = {"k_group": kept, "group_count": groups, "group_select_mode": by_two, "norm_type": norm, "out_flag": True}
    mine = x.to(dev).requires_grad_()
    y, chosen, scores = npu.npu_moe_gating_top_k(
        mine, 3, bias=bias.to(dev) if biased else None, routed_scaling_factor=2.5, **options
    )
    theirs = x.double().requires_grad_()
    whole = torch.softmax(theirs, -1) if norm == 0 else torch.sigmoid(theirs)
    close(scores, whole, FULL)
    # Experts that rounding could swap are taken as chosen; that they are as good is checked.
    added = bias.double() if biased else torch.zeros(32, dtype=torch.double)
    for row, experts in enumerate(chosen.cpu().tolist()):
        expected = _choose(whole[row].detach(), added, 3, groups, kept, bool(by_two))
        found = (whole[row].detach() + added)[experts]
        torch.testing.assert_close(found, (whole[row].detach() + added)[expected], rtol=1e-5, atol=1e-5)
    picked = torch.gather(whole, 1, chosen.cpu().long())
    expected_y = (picked / picked.sum(-1, keepdim=True) if norm else picked) * 2.5
    close(y, expected_y, dtype)
    grad = torch.randn(9, 3).to(dtype)
    y.backward(grad.to(dev))
    expected_y.backward(grad.double())
    close(mine.grad, theirs.grad, dtype)
    _same_shapes((y, chosen, scores), npu.npu_moe_gating_top_k(x.to("meta"), 3, **options))


def test_gating_by_a_table(dev: torch.device) -> None:
    x, ids, table = torch.randn(5, 16), _integers(5, high=7, dtype=torch.int64), _integers(7, 2, high=16)
    y, chosen, _ = npu.npu_moe_gating_top_k(*_there(dev, x), 2, input_ids=ids.to(dev), tid2eid=table.to(dev))
    assert torch.equal(chosen.cpu(), table[ids])
    close(y, torch.gather(torch.softmax(x.double(), -1), 1, table[ids].long()), FULL)


def test_scores_that_were_not_asked_for_give_no_gradient_unnoticed(dev: torch.device) -> None:
    x = torch.randn(3, 8, device=dev, requires_grad=True)
    npu.npu_moe_gating_top_k(x, 2)[0].sum().backward()
    assert x.grad.isnan().any()


def test_equal_scores_go_to_the_lower_expert(dev: torch.device) -> None:
    x = torch.zeros(2, 12, device=dev)
    assert npu.npu_moe_gating_top_k(x, 3, k_group=2, group_count=4)[1].tolist() == [[0, 1, 2]] * 2
    assert npu.npu_moe_gating_top_k_softmax(x, None, 3)[1].tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("shape", [(6, 10), (2, 3, 10)])
@pytest.mark.parametrize("dtype", [FULL, HALF])
@pytest.mark.parametrize("done", [False, True])
def test_gating_softmax(dev: torch.device, shape: tuple[int, ...], dtype: torch.dtype, done: bool) -> None:
    x = torch.randperm(60).view(shape).to(dtype) / 10  # no two are equal
    finished = torch.rand(shape[:-1]) > 0.5 if done else None
    k = 4
    y, chosen, rows = npu.npu_moe_gating_top_k_softmax(*_there(dev, x, finished), k)
    scores = torch.softmax(x.double(), -1)
    top = torch.topk(scores, k, -1)
    close(y, top.values, dtype)
    expected = top.indices if finished is None else torch.where(finished.unsqueeze(-1), 10, top.indices)
    assert torch.equal(chosen.cpu(), expected.int())
    flat = rows.cpu().view(-1, k)
    assert all(int(flat[i, j]) == j * len(flat) + i for i in range(len(flat)) for j in range(k))
    _same_shapes((y, chosen, rows), npu.npu_moe_gating_top_k_softmax(x.to("meta"), None, k))

    for renorm, whole in ((0, True), (0, False), (1, True)):
        y, chosen, all_ = npu.npu_moe_gating_top_k_softmax_v2(
            x.to(dev), k=k, finished=None if finished is None else finished.to(dev), renorm=renorm, output_softmax=whole
        )
        close(y, torch.softmax(torch.topk(x.double(), k, -1).values, -1) if renorm else top.values, dtype)
        assert torch.equal(chosen.cpu(), expected.int())
        if whole and not renorm:
            close(all_, scores, FULL)
        else:
            assert all_.shape == (0,) and all_.dtype == FULL


# -- sorting by expert --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("active", [0, 4, 7, 99])
@pytest.mark.parametrize("k", [1, 3])
def test_init_routing(dev: torch.device, active: int, k: int) -> None:
    x, experts = torch.randn(7, 5), _integers(7, k, high=4)
    rows = torch.arange(7 * k).view(k, 7).t().contiguous().int()
    answer = npu.npu_moe_init_routing(*_there(dev, x, rows, experts), active)
    out, places, found = (t.cpu() for t in answer)
    pairs = [(int(experts[i, j]), i, j) for i in range(7) for j in range(k)]
    pairs = sorted(pairs, key=lambda pair: pair[0])  # Python's sort keeps the order of equal ones
    assert found.tolist() == [e for e, _, _ in pairs]
    for position, (_, i, j) in enumerate(pairs):
        assert int(places[j * 7 + i]) == position
        if position < len(out):
            assert torch.equal(out[position], x[i])
    assert len(out) == min(active, 7) * k
    _same_shapes(answer, npu.npu_moe_init_routing(x.to("meta"), rows.to("meta"), experts.to("meta"), active))


@pytest.mark.parametrize("span", [[], [0, 6], [2, 5]])
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("backwards", [0, 1])
@pytest.mark.parametrize("active", [-1, 0, 5, 99])
def test_init_routing_by_rows(dev: torch.device, span: list[int], kind: int, backwards: int, active: int) -> None:
    x, experts, scale = torch.randn(7, 5), _integers(7, 2, high=6), torch.rand(7)
    experts[experts == 3] = 4  # an expert without a token
    options = {
        "expert_num": 6, "active_num": active, "expert_tokens_num_type": kind, "expert_tokens_num_flag": True,
        "active_expert_range": span, "row_idx_type": backwards,
    }  # fmt: skip
    answer = npu.npu_moe_init_routing_v2(*_there(dev, x, experts), scale=scale.to(dev), **options)
    out, places, counts, scales = (t.cpu() for t in answer)
    start, end = span or (0, 6)
    flat = experts.flatten().tolist()
    order = sorted((p for p in range(14) if start <= flat[p] < end), key=lambda p: flat[p])
    length = 14 if active <= 0 else min(active, 14)
    assert out.shape == (length, 5) and scales.shape == (length,)
    for position, pair in enumerate(order[:length]):
        assert torch.equal(out[position], x[pair // 2]) and scales[position] == scale[pair // 2]
    if backwards:
        assert places.tolist()[: len(order)] == order
    else:
        assert places.tolist() == [order.index(p) if p in order else -1 for p in range(14)]
    tokens = [flat.count(e) for e in range(start, end)]
    if kind == 2:
        used = [[e, n] for e, n in zip(range(start, end), tokens, strict=True) if n]
        assert counts.tolist() == used + [[0, 0]] * (6 - len(used))
    else:
        assert counts.tolist() == (tokens if kind else [sum(tokens[: n + 1]) for n in range(len(tokens))])
    theirs = npu.npu_moe_init_routing_v2(x.to("meta"), experts.to("meta"), **options)
    _same_shapes(answer, theirs)


def test_init_routing_with_capacity(dev: torch.device) -> None:
    """Each expert has as many rows; tokens beyond them are dropped, and rows without a token are zero."""
    x, experts = torch.randn(7, 5), _integers(7, 2, high=4)
    experts[:, 0] = 1
    options = {"expert_num": 4, "expert_capacity": 3, "drop_pad_mode": 1}
    answer = npu.npu_moe_init_routing_v2(*_there(dev, x, experts), **options)
    out, places, counts, scales = (t.cpu() for t in answer)
    assert out.shape == (4, 3, 5) and counts.shape == () and scales.shape == (12,)
    filled = [0] * 4
    expected = torch.zeros(4, 3, 5)
    for pair, expert in enumerate(experts.flatten().tolist()):
        slot = filled[expert]
        filled[expert] += 1
        if slot < 3:
            expected[expert, slot] = x[pair // 2]
            assert int(places[pair]) == expert * 3 + slot
        else:
            assert int(places[pair]) == -1
    assert torch.equal(out, expected) and max(filled) > 3
    _same_shapes(answer, npu.npu_moe_init_routing_v2(x.to("meta"), experts.to("meta"), **options))


def test_expert_tokens(dev: torch.device) -> None:
    """The page's example, and experts without a row."""
    assert npu.npu_moe_compute_expert_tokens(torch.tensor([0, 0, 0, 1, 1, 2], dtype=torch.int32, device=dev), 3).tolist() == [
        3,
        5,
        6,
    ]
    found = npu.npu_moe_compute_expert_tokens(torch.tensor([1, 1, 4], dtype=torch.int32, device=dev), 6)
    assert found.tolist() == [0, 2, 2, 2, 3, 3] and found.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_re_routing(dev: torch.device, dtype: torch.dtype) -> None:
    counts = torch.tensor([[2, 0, 3], [1, 4, 2]], dtype=dtype)
    tokens, scales = torch.randn(12, 4), torch.rand(12)
    answer = npu.npu_moe_re_routing(*_there(dev, tokens, counts), per_token_scales=scales.to(dev))
    labels = [(e, position) for position, e in enumerate([0] * 2 + [2] * 3 + [0] + [1] * 4 + [2] * 2)]
    order = [position for _, position in sorted(labels, key=lambda label: label[0])]
    assert answer[2].tolist() == order and answer[3].tolist() == [3, 4, 5]
    assert torch.equal(answer[0].cpu(), tokens[order]) and torch.equal(answer[1].cpu(), scales[order])
    _same_shapes(answer, npu.npu_moe_re_routing(tokens.to("meta"), counts.to("meta")))


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [FULL, HALF])
@pytest.mark.parametrize("given", ["everything", "rows only", "no scales"])
def test_finalize_routing(dev: torch.device, mode: int, dtype: torch.dtype, given: str) -> None:
    rows, k, experts, size = 5, 3, 4, 6
    pad = mode in (1, 3)
    answers = torch.randn(experts, 4, size) if pad else torch.randn(rows * k, size)
    places = torch.randperm(16 if pad else rows * k)[: rows * k].int()
    if pad:
        places[4] = -1  # dropped
    skips = [torch.randn(rows, size) for _ in range(2)] if given == "everything" else [None, None]
    bias = torch.randn(experts, size) if given == "everything" else None
    scales = None if given == "no scales" else torch.rand(rows, k)
    owners = _integers(rows, k, high=experts)
    floats = [t if t is None else t.to(dtype) for t in (answers, *skips, bias, scales)]
    out = npu.npu_moe_finalize_routing(*_there(dev, *floats, places, owners), mode, k)
    expected = torch.zeros(rows, size, dtype=torch.double)
    flat = floats[0].double().view(-1, size)
    for i in range(rows):
        for skip in floats[1:3]:
            if skip is not None:
                expected[i] += skip[i].double()
        for j in range(k):
            place = int(places[i * k + j if mode > 1 else j * rows + i])
            row = flat[place] if place >= 0 else torch.zeros(size)
            if bias is not None:
                row = row + floats[3][int(owners[i, j])].double()
            expected[i] += row * (1.0 if scales is None else float(floats[4][i, j]))
    close(out, expected, dtype)


# -- permutation --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FULL, BF16])
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("cut", [None, 0, 5, 99, -2])
def test_permute(dev: torch.device, dtype: torch.dtype, k: int | None, cut: int | None) -> None:
    tokens, experts = torch.randn(7, 4).to(dtype), _integers(*((7,) if k is None else (7, k)), high=3, dtype=torch.int64)
    mine = tokens.to(dev).requires_grad_()
    out, places = npu.npu_moe_token_permute(mine, experts.to(dev), cut)
    choices, flat = k or 1, experts.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda p: flat[p])
    length = len(flat) + (cut or 0) if (cut or 0) <= 0 else min(cut or 0, len(flat))
    assert torch.equal(out.cpu(), tokens[[p // choices for p in order[:length]]])
    assert places.tolist() == [order.index(p) for p in range(len(flat))] and places.dtype == torch.int32
    grad = torch.randn(length, 4).to(dtype)
    out.backward(grad.to(dev))
    expected = torch.zeros(7, 4, dtype=torch.double)
    for position, pair in enumerate(order[:length]):
        expected[pair // choices] += grad[position].double()
    close(mine.grad, expected, dtype)
    _same_shapes((out, places), npu.npu_moe_token_permute(tokens.to("meta"), experts.to("meta"), cut))


@pytest.mark.parametrize("dtype", [FULL, BF16])
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("inference", [False, True])
def test_unpermute(dev: torch.device, dtype: torch.dtype, k: int | None, inference: bool) -> None:
    choices = k or 1
    rows, places = torch.randn(7 * choices, 4).to(dtype), torch.randperm(7 * choices).int()
    probs = None if k is None else torch.rand(7, k).to(dtype)
    mine = [rows.to(dev).requires_grad_(), *([] if probs is None else [probs.to(dev).requires_grad_()])]
    with torch.inference_mode(inference):
        out = npu.npu_moe_token_unpermute(mine[0], places.to(dev), mine[1] if k else None)
    theirs = [rows.double().requires_grad_(), *([] if probs is None else [probs.double().requires_grad_()])]
    parts = [
        sum(theirs[0][int(places[t * choices + j])] * (theirs[1][t, j] if k else 1.0) for j in range(choices)) for t in range(7)
    ]
    expected = torch.stack(parts)  # type: ignore[arg-type]
    close(out, expected, dtype)
    assert (
        out.shape
        == npu.npu_moe_token_unpermute(rows.to("meta"), places.to("meta"), None if probs is None else probs.to("meta")).shape
    )
    if inference:
        return
    grad = torch.randn(7, 4).to(dtype)
    out.backward(grad.to(dev))
    expected.backward(grad.double())
    for a, b in zip(mine, theirs, strict=True):
        close(a.grad, b.grad, dtype)


def test_permuted_and_back(dev: torch.device) -> None:
    """A model's use: sorted, through experts that do nothing, and back with weights that add up to one."""
    tokens, experts = torch.randn(9, 4, device=dev, requires_grad=True), _integers(9, 2, high=4, dtype=torch.int64).to(dev)
    weights = torch.softmax(torch.randn(9, 2, device=dev), -1)
    rows, places = npu.npu_moe_token_permute(tokens, experts)
    out = npu.npu_moe_token_unpermute(rows, places, weights)
    torch.testing.assert_close(out, tokens)
    grad = torch.randn(9, 4, device=dev)
    out.backward(grad)
    torch.testing.assert_close(tokens.grad, grad)


def _map(tokens: int, experts: int, k: int) -> Tensor:
    found = torch.zeros(tokens, experts, dtype=torch.bool)
    for t in range(tokens):
        found[t, torch.randperm(experts)[:k]] = True
    return found


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [FULL, BF16])
def test_permute_with_a_routing_map(dev: torch.device, drop: bool, weighted: bool, dtype: torch.dtype) -> None:
    tokens, chosen, probs = torch.randn(8, 4).to(dtype), _map(8, 4, 2), torch.rand(8, 4).to(dtype)
    asked = 12 if drop else 16
    mine = [t.to(dev).requires_grad_() for t in (tokens, probs)]
    out, picked, indices = npu.npu_moe_token_permute_with_routing_map(
        mine[0], chosen.to(dev), probs=mine[1] if weighted else None, num_out_tokens=asked, drop_and_pad=drop
    )
    pairs = []  # (token, expert) in the order of the answer
    for e in range(4):
        takers = [t for t in range(8) if chosen[t, e]]
        if drop:
            takers = (takers + [t for t in range(8) if not chosen[t, e]])[:3]
        pairs += [(t, e) for t in takers]
    theirs = [t.double().requires_grad_() for t in (tokens, probs)]
    rows = torch.stack([theirs[0][t] for t, _ in pairs])
    weights = torch.stack([theirs[1][t, e] for t, e in pairs])
    close(out, rows, dtype)
    if drop:
        assert indices.tolist() == [t for t, _ in pairs]
    else:
        assert indices.tolist() == [pairs.index(pair) for pair in sorted(pairs)]
    total, expected = out.float().square().sum(), rows.square().sum()
    if weighted:
        close(picked, weights, dtype)
        total, expected = total + picked.float().square().sum(), expected + weights.square().sum()
    total.backward()
    expected.backward()
    close(mine[0].grad, theirs[0].grad, dtype)
    if weighted:
        close(mine[1].grad, theirs[1].grad, dtype)
    theirs_meta = npu.npu_moe_token_permute_with_routing_map(
        tokens.to("meta"),
        chosen.to("meta"),
        probs=probs.to("meta") if weighted else None,
        num_out_tokens=asked,
        drop_and_pad=drop,
    )
    _same_shapes((out, picked, indices), theirs_meta)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [FULL, BF16])
def test_unpermute_with_a_routing_map(dev: torch.device, drop: bool, weighted: bool, dtype: torch.dtype) -> None:
    chosen, probs = _map(8, 4, 2), torch.rand(8, 4).to(dtype)
    asked = 12 if drop else 16
    _, _, indices = npu.npu_moe_token_permute_with_routing_map(
        torch.randn(8, 5, device=dev), chosen.to(dev), num_out_tokens=asked, drop_and_pad=drop
    )
    rows = torch.randn(asked, 5).to(dtype)
    mine = [t.to(dev).requires_grad_() for t in (rows, probs)]
    out = npu.npu_moe_token_unpermute_with_routing_map(
        mine[0], indices, [8, 5], probs=mine[1] if weighted else None, routing_map=chosen.to(dev), drop_and_pad=drop
    )
    theirs = [t.double().requires_grad_() for t in (rows, probs)]
    parts: list[list[Tensor]] = [[] for _ in range(8)]
    if drop:
        for row, token in enumerate(indices.tolist()):
            parts[token].append(theirs[0][row] * (theirs[1][token, row // 3] if weighted else 1.0))
    else:
        pairs = [(t, e) for t in range(8) for e in range(4) if chosen[t, e]]
        for (token, expert), row in zip(pairs, indices.tolist(), strict=True):
            parts[token].append(theirs[0][row] * (theirs[1][token, expert] if weighted else 1.0))
    expected = torch.stack([torch.stack(p).sum(0) if p else torch.zeros(5, dtype=torch.double) for p in parts])
    close(out, expected, dtype)
    grad = torch.randn(8, 5).to(dtype)
    out.backward(grad.to(dev))
    expected.backward(grad.double())
    close(mine[0].grad, theirs[0].grad, dtype)
    if weighted:
        close(mine[1].grad, theirs[1].grad, dtype)


# -- refusals -----------------------------------------------------------------------------------------------------------------

_X, _W, _LIST = torch.zeros(4, 8), torch.zeros(2, 8, 6), torch.tensor([1, 4])
_ROUTE = (torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.int32))
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "no group_type": ("npu_grouped_matmul", ([_X], [_W]), {"group_list": _LIST}, "group_type=None"),
    "group_type": ("npu_grouped_matmul", ([_X], [_W]), {"group_type": 1}, "group_type=1"),
    "split_item": ("npu_grouped_matmul", ([_X], [_W]), {"group_type": 0, "split_item": 4, "group_list": _LIST}, "split_item=4"),
    "no group_list": ("npu_grouped_matmul", ([_X], [_W]), {"group_type": 0, "split_item": 3}, "no group_list"),
    "group_list of int32": (
        "npu_grouped_matmul", ([_X], [_W]), {"group_type": 0, "split_item": 3, "group_list": _LIST.int()}, "int32"
    ),
    "falling ends": (
        "npu_grouped_matmul", ([_X], [_W]), {"group_type": 0, "split_item": 3, "group_list": _LIST.flip(0)}, "do not fall"
    ),
    "pairs": (
        "npu_grouped_matmul", ([_X], [_W]),
        {"group_type": 0, "split_item": 3, "group_list": torch.zeros(2, 2, dtype=torch.int64), "group_list_type": 2}, "int8",
    ),
    "too many rows": (
        "npu_grouped_matmul", ([_X], [_W]), {"group_type": 0, "split_item": 3, "group_list": _LIST + 1}, "no more rows"
    ),
    "other groups": (
        "npu_grouped_matmul", ([_X], [_W]), {"group_type": 0, "split_item": 3, "group_list": _LIST[1:]}, "a group for each"
    ),
    "quantised": ("npu_grouped_matmul", ([_X], [_W]), {"group_type": 0, "scale": [torch.ones(6)]}, "scale"),
    "int8": ("npu_grouped_matmul", ([_X.to(torch.int8)], [_W.to(torch.int8)]), {"group_type": 0}, "int8"),
    "activation": ("npu_grouped_matmul", ([_X], [_W]), {"group_type": 0, "act_type": 1}, "act_type"),
    "dtypes": ("npu_grouped_matmul", ([_X.half()], [_W]), {"group_type": 0}, "one dtype"),
    "output_dtype": (
        "npu_grouped_matmul", ([_X], [_W]), {"group_type": 0, "split_item": 3, "group_list": _LIST, "output_dtype": HALF},
        "output_dtype",
    ),
    "bias": (
        "npu_grouped_matmul", ([_X], [_W]),
        {"group_type": 0, "split_item": 3, "group_list": _LIST, "bias": [torch.zeros(2, 5)]}, "biases",
    ),
    "inner sizes": ("npu_grouped_matmul", ([_X], [_W[0].t()]), {"group_type": -1}, r"\(4, 8\)"),
    "columns with a bias": (
        "npu_grouped_matmul", ([_X], [_W[0]]), {"group_type": 2, "split_item": 3, "bias": [_X[0, :6]], "group_list": _LIST},
        "no bias",
    ),
    "one end": ("npu_grouped_matmul.List", ([_X], [_W[0]]), {"group_list": [4]}, "at least two"),
    "addition of float32": ("npu_grouped_matmul_add", (torch.zeros(16, 6), _X, _W[0, :4], _LIST), {}, "float32"),
    "addition of rows": (
        "npu_grouped_matmul_add", (torch.zeros(16, 6), _X.half(), _W[0, :4].half(), _LIST), {"group_type": 0}, "group_type=0"
    ),
    "gating renorm": ("npu_moe_gating_top_k", (_X, 2), {"renorm": 1}, "renorm=1"),
    "gating k": ("npu_moe_gating_top_k", (_X, 9), {}, "k=9"),
    "gating groups": ("npu_moe_gating_top_k", (_X, 1), {"group_count": 3}, "group_count=3"),
    "gating small groups": ("npu_moe_gating_top_k", (_X, 1), {"group_count": 4}, "more than two"),
    "gating bias": ("npu_moe_gating_top_k", (_X, 1), {"bias": torch.zeros(7)}, "bias"),
    "gating table": ("npu_moe_gating_top_k", (_X, 1), {"input_ids": torch.zeros(4, dtype=torch.int64)}, "both or neither"),
    "softmax k": ("npu_moe_gating_top_k_softmax", (_X, None, 9), {}, "k=9"),
    "softmax finished": ("npu_moe_gating_top_k_softmax", (_X, torch.zeros(4), 1), {}, "finished"),
    "softmax renorm": ("npu_moe_gating_top_k_softmax_v2", (_X,), {"renorm": 2}, "renorm=2"),
    "routing dtype": ("npu_moe_init_routing", (_X, _ROUTE[1].long(), _ROUTE[1].long(), 4), {}, "int64"),
    "routing quantised": ("npu_moe_init_routing_v2", _ROUTE, {"expert_num": 4, "quant_mode": 1}, "quant_mode=1"),
    "routing range": ("npu_moe_init_routing_v2", _ROUTE, {"expert_num": 4, "active_expert_range": [1, 5]}, "experts 1 to 5"),
    "routing without experts": ("npu_moe_init_routing_v2", _ROUTE, {}, "expert_num=-1"),
    "routing capacity": ("npu_moe_init_routing_v2", _ROUTE, {"expert_num": 4, "drop_pad_mode": 1}, "expert_capacity=-1"),
    "tokens": ("npu_moe_compute_expert_tokens", (torch.zeros(3), 2), {}, "float32"),
    "re-routing scatter": ("npu_moe_re_routing", (_X, torch.ones(2, 2, dtype=torch.int32)), {"idx_type": 1}, "idx_type=1"),
    "re-routing counts": ("npu_moe_re_routing", (_X, torch.ones(2, 3, dtype=torch.int32)), {}, "add up"),
    "finalize mode": (
        "npu_moe_finalize_routing", (_X, None, None, None, None, torch.arange(4).int(), None, 1), {}, "mode=1",
    ),
    "finalize skip": ("npu_moe_finalize_routing", (_X, None, _X, None, None, torch.arange(4).int(), None), {}, "skip1"),
    "padded": ("npu_moe_token_permute", (_X, torch.zeros(4, 2, dtype=torch.int64), None, True), {}, "padded_mode"),
    "probabilities": (
        "npu_moe_token_unpermute", (_X, torch.arange(4).int(), torch.zeros(4, 2)), {}, "probs"
    ),
    "empty places": (
        "npu_moe_token_unpermute_with_routing_map", (_X, torch.tensor([0, 1, 2, -1]).int(), [2, 8]), {}, "below 0"
    ),
    "routing map": (
        "npu_moe_token_permute_with_routing_map", (_X, torch.ones(4, 2, dtype=torch.bool)), {"num_out_tokens": 4},
        "num_out_tokens=4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(dev: torch.device, name: str) -> None:
    operator, args, options, words = REFUSED[name]
    function = getattr(npu, operator.removesuffix(".List"))
    function = function.List if operator.endswith(".List") else function

    def there(value: Any) -> Any:
        if isinstance(value, list):
            return [there(v) for v in value]
        return value.to(dev) if isinstance(value, Tensor) else value

    with pytest.raises((ValueError, NotImplementedError), match=words):
        function(*map(there, args), **{n: there(v) for n, v in options.items()})
