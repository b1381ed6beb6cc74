"""Products of matrices in groups on NPU tensors, against loops over the groups in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_reference import close
from torch import Tensor

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
npu = torch.ops.npu


def _there(dev: torch.device, *values: Any) -> list[Any]:
    return [v.to(dev) if isinstance(v, Tensor) else v for v in values]


def _listed(sizes: list[int], kind: int, dev: torch.device) -> Tensor:
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return torch.tensor(sizes if kind else ends, device=dev)


@pytest.mark.parametrize("dtype", [HALF, BF16, FULL])
@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("biased", [False, True])
def test_groups_of_rows(dev: torch.device, dtype: torch.dtype, kind: int, stacked: bool, biased: bool) -> None:
    """One x whose rows are in groups, an empty one among them; weights in one tensor, also transposed, or one by one."""
    sizes = [3, 0, 4, 2]
    x, weight = torch.randn(9, 8).to(dtype), torch.randn(4, 6, 8).to(dtype).transpose(1, 2)
    bias = torch.randn(4, 6).to(FULL if dtype == BF16 else dtype)
    weights = [weight.to(dev)] if stacked else [w.to(dev) for w in weight]
    biases = [bias.to(dev)] if stacked else [b.to(dev) for b in bias]
    common = {"split_item": 3, "group_type": 0, "group_list_type": kind}
    (out,) = npu.npu_grouped_matmul(
        [x.to(dev)], weights, bias=biases if biased else None, group_list=_listed(sizes, kind, dev), **common
    )
    owners = [g for g, n in enumerate(sizes) for _ in range(n)]
    rows = [x[i].double() @ weight[g].double() + (bias[g].double() if biased else 0) for i, g in enumerate(owners)]
    close(out, torch.stack(rows), dtype)
    (theirs,) = npu.npu_grouped_matmul(
        [x.to("meta")], [w.to("meta") for w in weights], group_list=_listed(sizes, kind, dev).cpu(), **common
    )
    assert (out.shape, out.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.parametrize("kind", [0, 1])
def test_groups_of_columns(dev: torch.device, kind: int) -> None:
    """Gradients of weights: x as the transposed view that training code passes."""
    sizes = [3, 0, 4]
    x, weight = torch.randn(7, 5).bfloat16(), torch.randn(7, 6).bfloat16()
    common = {"split_item": 3, "group_type": 2, "group_list_type": kind}
    (out,) = npu.npu_grouped_matmul([x.to(dev).t()], [weight.to(dev)], group_list=_listed(sizes, kind, dev), **common)
    expected = [x[:3].double().t() @ weight[:3].double(), torch.zeros(5, 6), x[3:].double().t() @ weight[3:].double()]
    close(out, torch.stack(expected), BF16)
    (theirs,) = npu.npu_grouped_matmul(
        [x.t().to("meta")], [weight.to("meta")], group_list=_listed(sizes, kind, dev).cpu(), **common
    )
    assert (out.shape, out.dtype) == (theirs.shape, theirs.dtype)


def test_products_one_by_one(dev: torch.device) -> None:
    """The page's example in small: no groups; and matrices of more dimensions."""
    x = [torch.randn(4, 8), torch.randn(6, 5), torch.randn(2, 3, 7)]
    weight = [torch.randn(8, 3), torch.randn(5, 9), torch.randn(7, 2)]
    bias = [torch.randn(3), torch.randn(9), torch.randn(2)]
    mine = npu.npu_grouped_matmul(
        *([t.to(dev) for t in ts] for ts in (x, weight)), bias=[b.to(dev) for b in bias], group_type=-1
    )
    older = npu.npu_grouped_matmul.List(*([t.to(dev) for t in ts] for ts in (x, weight)), bias=[b.to(dev) for b in bias])
    assert len(mine) == len(older) == 3
    for out, other, a, b, c in zip(mine, older, x, weight, bias, strict=True):
        close(out, a.double() @ b.double() + c.double(), FULL)
        assert torch.equal(out, other)


@pytest.mark.parametrize("split", [0, 1, 2, 3])
def test_ends_as_numbers(dev: torch.device, split: int) -> None:
    """The older form: one x, a weight for each group; one answer for each, or one in all."""
    x, weight = torch.randn(9, 8).half(), torch.randn(3, 8, 6).half()
    outs = npu.npu_grouped_matmul.List([x.to(dev)], [w.to(dev) for w in weight], group_list=[2, 2, 9], split_item=split)
    expected = [part.double() @ w.double() for part, w in zip((x[:2], x[:0], x[2:]), weight, strict=True)]
    if split > 1:
        (out,) = outs
        close(out, torch.cat(expected), HALF)
    else:
        for out, part in zip(outs, expected, strict=True):
            close(out, part, HALF)


def test_many_matrices_in_one_answer(dev: torch.device) -> None:
    x, weight = [torch.randn(n, 8).half() for n in (2, 3)], [torch.randn(8, 6).half() for _ in range(2)]
    moved = [[t.to(dev) for t in ts] for ts in (x, weight)]
    expected = torch.cat([a.double() @ b.double() for a, b in zip(x, weight, strict=True)])
    for given in (None, torch.tensor([2, 5], device=dev)):
        (out,) = npu.npu_grouped_matmul(*moved, group_list=given, split_item=2, group_type=0)
        close(out, expected, HALF)
    (out,) = npu.npu_grouped_matmul.List(*moved, group_list=[2, 5], split_item=2)
    close(out, expected, HALF)


@pytest.mark.parametrize("shape", [(10, 6), (2, 5, 6)])
@pytest.mark.parametrize("kind", [0, 1])
def test_products_added_up(dev: torch.device, shape: tuple[int, ...], kind: int) -> None:
    x, weight, total = torch.randn(7, 5).half(), torch.randn(7, 6).half(), torch.randn(shape)
    expected = total.double().view(2, 5, 6) + torch.stack(
        [x[:3].double().t() @ weight[:3].double(), x[3:].double().t() @ weight[3:].double()]
    )
    given = _there(dev, x, weight)
    mine = total.to(dev)
    answer = npu.npu_grouped_matmul_add_(mine, *given, _listed([3, 4], kind, dev), group_list_type=kind)
    assert answer is mine
    close(mine, expected.view(shape), FULL)
    copy = npu.npu_grouped_matmul_add(total.to(dev), *given, _listed([3, 4], kind, dev), group_list_type=kind)
    close(copy, expected.view(shape), FULL)
