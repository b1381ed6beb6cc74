"""PyTorch's operator samples: every operator that the CPU has, first samples only. operators.py runs more of them."""

from __future__ import annotations

import warnings

import pytest
import torch
from operators import KNOWN, compare, operators


@pytest.mark.parametrize(("dtype", "samples"), [(torch.float32, 4), (torch.int64, 2), (torch.bfloat16, 2), (torch.bool, 1)])
def test_answers_and_gradients_equal_the_cpu(dev: torch.device, dtype: torch.dtype, samples: int) -> None:
    found = operators(dtype)
    assert len(found) > 300
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        differences = [str(d) for op in found for d in compare(op, dev, samples, dtype)]
    assert differences == []


def test_known_differences_exist(dev: torch.device) -> None:
    """The list does not outlive its reasons."""
    from torch.testing._internal.common_methods_invocations import op_db

    assert KNOWN.keys() <= {op.name for op in op_db}


def test_memory_outlives_changes_of_shape(dev: torch.device) -> None:
    """In-place changes of shape keep the tensor's memory (as_strided_ was once run on the CPU's side, which freed it)."""
    x = torch.arange(6.0, device=dev)
    for change in ("squeeze_", "unsqueeze_"):
        y = x.clone().view(1, 6)
        getattr(y, change)(0)
        noise = [torch.randn(6) for _ in range(50)]
        assert y.flatten().tolist() == [0, 1, 2, 3, 4, 5] and len(noise) == 50
    z = x.clone().as_strided_((2, 2), (1, 2), 1)
    assert z.tolist() == [[1, 3], [2, 4]]


def test_zero_tensors_have_memory(dev: torch.device) -> None:
    """PyTorch answers gradients that are zero without memory where a device knows such tensors."""
    x = torch.ones(3, device=dev, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert grad.tolist() == [0, 0, 0] and (grad + 1).tolist() == [1, 1, 1]


def test_numbers_of_float64_do_not_widen(dev: torch.device) -> None:
    scalar = torch.tensor(2.0, dtype=torch.float64, device=dev)
    assert (torch.ones(3, device=dev) * scalar).dtype == torch.float32
    assert (torch.ones(3, dtype=torch.float64, device=dev) * torch.tensor(2.0, device=dev)).dtype == torch.float64


def test_integer_products_write_to_their_targets(dev: torch.device) -> None:
    a, b = torch.tensor([[1, 2], [3, 4]], device=dev), torch.tensor([[1, 1], [2, 0]], device=dev)
    right = [[5, 1], [11, 3]]
    out, fresh = torch.zeros(2, 2, dtype=torch.int64, device=dev), torch.empty(0, dtype=torch.int64, device=dev)
    assert torch.mm(a, b, out=out) is out and out.tolist() == right
    assert torch.mm(a, b, out=fresh).tolist() == right
    assert torch.ones(2, 2, dtype=torch.int64, device=dev).addmm_(a, b).tolist() == [[6, 2], [12, 4]]
    assert torch.addmm(a, a, b, beta=2, alpha=3).tolist() == [[17, 7], [39, 17]]


def test_addr_differs_by_rounding_alone(dev: torch.device) -> None:
    draw = torch.Generator().manual_seed(0)
    m, a, b = torch.randn(5, 7, generator=draw), torch.randn(5, generator=draw), torch.randn(7, generator=draw)
    found = torch.addr(m.to(dev), a.to(dev), b.to(dev), beta=0.3, alpha=0.7).cpu().double()
    right = 0.3 * m.double() + 0.7 * torch.outer(a.double(), b.double())
    # Three roundings of terms no larger than these, each of half a unit in the last place (2**-24).
    assert ((found - right).abs() <= 3 * 2**-24 * (m.abs() + torch.outer(a, b).abs()).double()).all()
