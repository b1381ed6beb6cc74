"""PyTorch's operator samples on torch_npu's tensors: answers and gradients equal the CPU's to the bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from operators import compare, operators

# The device has a generator of its own, so random numbers differ; check_npu_random.py tests them.
RANDOM = {
    "exponential", "normal", "uniform", "randn", "randn_like", "rand_like", "randint", "randint_like", "multinomial",
    "bernoulli",
    "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.alpha_dropout",
    "nn.functional.feature_alpha_dropout", "nn.functional.rrelu", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "svd_lowrank", "pca_lowrank", "nn.functional.multi_head_attention_forward",
    "log_normal", "cauchy", "geometric", "nn.functional.scaled_dot_product_attention",
}  # fmt: skip
# Neither the device nor the emulation is at fault.
KNOWN = {
    "mode": "PyTorch refuses out= on every device but the CPU, CUDA and XPU",
    "narrow_copy": "the CPU's own out= form loses what it writes to a strided tensor",
    "nn.functional.binary_cross_entropy_with_logits": "torch_npu's rule gives the target no gradient",
    "_batch_norm_with_update": "the vendor's fallback makes inputs contiguous, for which the CPU adds in another order",
}


@pytest.mark.parametrize(
    ("dtype", "samples"),
    [(torch.float32, 4), (torch.int64, 2), (torch.bfloat16, 2), (torch.float16, 1), (torch.float64, 1), (torch.bool, 1)],
)
def test_answers_and_gradients_equal_the_cpu(dev: torch.device, dtype: torch.dtype, samples: int) -> None:
    found = [op for op in operators(dtype) if op.name not in RANDOM | KNOWN.keys()]
    assert len(found) > 300
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        differences = [str(d) for op in found for d in compare(op, dev, samples, dtype)]
    assert differences == []


@pytest.mark.parametrize("change", ["t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"])
def test_in_place_changes_of_shape(dev: torch.device, change: str) -> None:
    args: dict[str, tuple[Any, ...]] = {"transpose_": (0, 1), "unsqueeze_": (0,), "as_strided_": ((2, 2), (1, 2), 1)}
    here = torch.arange(6.0).view(2, 3)
    there = here.to(dev)
    for tensor in (here, there):
        getattr(tensor, change)(*args.get(change, ()))
        tensor[0] += 1
    assert there.shape == here.shape and torch.equal(there.cpu(), here)


def test_lazily_conjugated_and_negated(dev: torch.device) -> None:
    here = torch.view_as_complex(torch.randn(5, 2))
    there = here.to(dev)
    assert torch.equal((there.conj() * 2).cpu(), here.conj() * 2)
    assert torch.equal((there.conj().imag + 1).cpu(), here.conj().imag + 1)
    there.conj().copy_(torch.ones(5, dtype=torch.complex64, device=dev) * 1j)
    assert torch.equal(there.cpu(), torch.full((5,), -1j, dtype=torch.complex64))


def test_results_in_targets(dev: torch.device) -> None:
    a, b = torch.randn(5, 10), torch.randn(10)
    wide = torch.ones(5, 2, device=dev)
    torch.matmul(a.to(dev), b.to(dev), out=wide[:, 0])
    assert torch.equal(wide[:, 0].cpu(), a @ b) and bool((wide[:, 1] == 1).all())
    small = torch.empty(0, device=dev)
    assert torch.add(a.to(dev), 1, out=small) is small and torch.equal(small.cpu(), a + 1)
    parts = [torch.empty(0, device=dev) for _ in range(2)]
    torch.split_with_sizes_copy(a.to(dev), [2, 3], out=parts)
    assert [tuple(p.shape) for p in parts] == [(2, 10), (3, 10)] and torch.equal(parts[1].cpu(), a[2:])


def test_sparse_results_are_refused(dev: torch.device) -> None:
    with pytest.raises(NotImplementedError, match="sparse"):
        torch.ones(3, 3, device=dev).to_sparse()


def test_an_operator_that_is_not_computed_says_so(dev: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"NormalizeBatch|libopapi|host ACL runtime"):
        torch.ops.npu.npu_normalize_batch(torch.ones(2, 3, 4, device=dev), torch.ones(2, dtype=torch.int32, device=dev))
