"""What pt.attention keeps from call to call must never change an answer; autocast and PyTorch's switches are honoured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import portable as pt
from portable.attn import api, kept, select


@pytest.fixture(autouse=True)
def _cpu(on_cpu: Any) -> None:
    """The CPU is in use."""
    select.forget()
    kept.forget()


def reference(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """A dense softmax in float64; rows that see nothing are zeros."""
    query, key, value = query.double(), key.double(), value.double()
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if bias is not None:
        scores = scores + bias.double()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    weights = torch.nan_to_num(torch.softmax(scores, -1))
    return weights @ value


def inputs(length: int = 24, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, 16, **options) for _ in range(3)]


def close(found: Tensor, right: Tensor, **options: float) -> None:
    torch.testing.assert_close(found.double(), right, **({"rtol": 1e-5, "atol": 1e-5} | options))


# -- plans ---------------------------------------------------------------------------------------------------------------------


def test_a_second_call_of_a_kind_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    real = api._planned
    monkeypatch.setattr(api, "_planned", lambda *a: planned.append(1) or real(*a))
    tensors = inputs()
    for _ in range(3):
        close(pt.attention(*tensors, mask=pt.Causal()), reference(*tensors, torch.ones(24, 24).tril().bool()))
    assert len(planned) == 1
    pt.attention(*tensors, mask=pt.SlidingWindow(3))
    assert len(planned) == 2


CHANGES: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.5},
    "dropout": {"dropout_p": 1.0},
    "lse": {"return_lse": True},
    "layout": {"layout": "bshd"},
    "path": {"path": "math"},
    "mask": {"mask": pt.SlidingWindow(2, 5)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_plan_serves_only_its_own_kind(change: str) -> None:
    """Each argument changed alone, before and after plain calls: the answer is that of a process that never saw the other."""
    tensors, options = inputs(), CHANGES[change]

    def alone(**given: Any) -> list[Tensor]:
        select.forget()
        out = pt.attention(*tensors, **given)
        return list(out) if isinstance(out, tuple) else [out]

    plain, other = alone(), alone(**options)
    assert change == "path" or len(plain) != len(other) or not torch.equal(plain[0], other[0])
    select.forget()
    for _ in range(2):
        for given, right in (({}, plain), (options, other)):
            out = pt.attention(*tensors, **given)
            for a, b in zip([out] if isinstance(out, Tensor) else out, right, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_plan_is_not_kept_for_other_strides_dtypes_and_gradients() -> None:
    query, key, value = inputs()
    strided = query.transpose(2, 3).contiguous().transpose(2, 3)
    right = reference(query, key, value)
    for _ in range(2):
        close(pt.attention(query, key, value), right)
        close(pt.attention(strided, key, value), right)
        close(pt.attention(query.double(), key.double(), value.double()), right, rtol=1e-12, atol=1e-12)
        wanted = query.clone().requires_grad_()
        out = pt.attention(wanted, key, value)
        (grad,) = torch.autograd.grad(out.sum(), wanted)
        assert grad.abs().sum() > 0
        with torch.no_grad():
            assert not pt.attention(wanted, key, value).requires_grad


def test_the_same_errors_the_second_time() -> None:
    tensors = inputs()
    pt.attention(*tensors, mask=torch.rand(24, 24) > 0.5)
    for _ in range(2):
        with pytest.raises(pt.ConfigurationError, match="does not broadcast"):
            pt.attention(*tensors, mask=torch.ones(23, 24).bool())
        with pytest.raises(pt.ConfigurationError, match="mask on meta"):
            pt.attention(*tensors, mask=torch.ones(24, 24, dtype=torch.bool, device="meta"))
        with pytest.raises(pt.ConfigurationError, match="dropout_p=2"):
            pt.attention(*tensors, dropout_p=2)
        with pytest.raises(pt.ConfigurationError, match="list as query"):
            pt.attention([1.0], *tensors[1:])  # type: ignore[arg-type]


# -- masks that change ---------------------------------------------------------------------------------------------------------


def test_lengths_changed_in_place_are_seen() -> None:
    tensors = inputs()
    lengths = torch.tensor([24, 7])
    mask = pt.Padding(lengths)
    for step in range(3):
        allowed = torch.arange(24) < lengths.view(2, 1, 1, 1)
        close(pt.attention(*tensors, mask=mask), reference(*tensors, allowed))
        lengths -= 2 + step


@pytest.mark.parametrize("view", [False, True])
def test_a_tensor_changed_in_place_is_seen(view: bool) -> None:
    tensors = inputs()
    whole = torch.ones(30, 30).tril().bool()
    base = whole if view else whole[:24, :24].clone()
    for row in (None, 3, 23):
        if row is not None:
            base[row, 0] = False
        given = base[:24, :24] if view else base
        close(pt.attention(*tensors, mask=given), reference(*tensors, given))


def test_a_new_tensor_at_the_old_ones_place_is_seen() -> None:
    tensors = inputs()
    for seed in range(8):
        mask = torch.rand(24, 24, generator=torch.Generator().manual_seed(seed)) > 0.5
        close(pt.attention(*tensors, mask=mask), reference(*tensors, mask))
        del mask


def test_masks_made_in_inference_mode_serve_training() -> None:
    tensors = inputs()
    masks = [pt.SlidingWindow(3), pt.Padding([5, 9]), torch.rand(24, 24) > 0.5]
    with torch.inference_mode():
        masks.append(torch.rand(24, 24) > 0.4)
        before = [pt.attention(*tensors, mask=mask) for mask in masks]
    wanted = [t.requires_grad_() for t in tensors]
    for mask, right in zip(masks, before, strict=True):
        out = pt.attention(*wanted, mask=mask)
        torch.testing.assert_close(out.detach(), right.clone())
        out.sum().backward()


# -- tensors that say what a specification says --------------------------------------------------------------------------------


def _tri(queries: int, keys: int, low: int | None, high: int | None) -> Tensor:
    distance = torch.arange(keys).view(1, -1) - torch.arange(queries).view(-1, 1)
    found = torch.ones(queries, keys, dtype=torch.bool)
    if low is not None:
        found &= distance >= low
    return found & (distance <= high) if high is not None else found


@pytest.mark.parametrize(("queries", "keys"), [(24, 24), (5, 24), (24, 5), (2, 2)])
@pytest.mark.parametrize(("low", "high"), [(None, 0), (None, 19), (None, -3), (-4, 2), (-4, None), (3, 8), (None, None)])
def test_bands_are_recognised(queries: int, keys: int, low: int | None, high: int | None) -> None:
    allowed = _tri(queries, keys, low, high)
    torch.manual_seed(1)
    tensors = [torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (queries, keys, keys)]
    right = reference(*tensors, allowed)
    numbers = torch.zeros(queries, keys, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    for mask in (allowed, allowed.expand(1, 2, queries, keys), allowed.view(1, 1, queries, keys), numbers):
        traits = pt.explain_attention(*tensors, mask=mask).request.mask
        assert traits.band or not allowed.any()
        close(pt.attention(*tensors, mask=mask), right, rtol=1e-12, atol=1e-12)


def test_what_is_nearly_a_band_is_not() -> None:
    tensors = [torch.randn(1, 2, 24, 8, dtype=torch.float64) for _ in range(3)]
    for row, column in ((0, 0), (23, 5), (23, 23), (11, 3), (11, 20), (0, 23)):
        mask = _tri(24, 24, None, 0)
        mask[row, column] = ~mask[row, column]
        assert not pt.explain_attention(*tensors, mask=mask).request.mask.band
        close(pt.attention(*tensors, mask=mask), reference(*tensors, mask), rtol=1e-12, atol=1e-12)


def test_numbers_that_are_not_only_off_and_on_stay_numbers() -> None:
    tensors = [torch.randn(1, 2, 24, 8, dtype=torch.float64) for _ in range(3)]
    bias = torch.zeros(24, 24, dtype=torch.float64)
    bias[20, 3] = 0.25
    assert pt.explain_attention(*tensors, mask=bias).request.mask.bias
    close(pt.attention(*tensors, mask=bias), reference(*tensors, bias=bias), rtol=1e-12, atol=1e-12)


def test_learned_slopes_get_gradients() -> None:
    """ALiBi with slopes that are parameters: against autograd through the dense softmax."""
    tensors = [t.double() for t in inputs()]
    slopes = torch.tensor([0.5, 0.25, 0.1], dtype=torch.float64, requires_grad=True)
    distance = (torch.arange(24).view(1, -1) - torch.arange(24).view(-1, 1)).abs()
    right = reference(*tensors, bias=-slopes.view(-1, 1, 1) * distance)
    grad = torch.randn_like(right)
    (expected,) = torch.autograd.grad(right, slopes, grad)
    for _ in range(2):
        (found,) = torch.autograd.grad(pt.attention(*tensors, mask=pt.ALiBi(slopes)), slopes, grad)
        torch.testing.assert_close(found, expected)


def test_under_vmap() -> None:
    tensors = [torch.randn(4, 1, 2, 6, 8, dtype=torch.float64) for _ in range(3)]
    mask = _tri(6, 6, None, 0)
    mask[2, 1] = False
    for given in (mask, pt.Causal()):
        allowed = mask if given is mask else _tri(6, 6, None, 0)
        out = torch.func.vmap(lambda q, k, v, given=given: pt.attention(q, k, v, mask=given, path="flash"))(*tensors)
        close(out, reference(*tensors, allowed), rtol=1e-12, atol=1e-12)
    masks = torch.stack([mask, ~mask, mask, mask | ~mask])
    out = torch.func.vmap(lambda q, k, v, m: pt.attention(q, k, v, mask=m, path="math"))(*tensors, masks)
    close(out, reference(*tensors, masks.view(4, 1, 1, 6, 6)), rtol=1e-12, atol=1e-12)


# -- autocast and PyTorch's switches -------------------------------------------------------------------------------------------


def test_autocast_casts_as_for_pytorchs_function() -> None:
    tensors = [t.requires_grad_() for t in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pt.attention(*tensors, mask=pt.Causal())
        stock = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        doubles = pt.attention(*[t.detach().double() for t in tensors])
    assert out.dtype == stock.dtype == torch.bfloat16 and doubles.dtype == torch.float64
    rounded = [t.detach().bfloat16() for t in tensors]
    right = reference(*rounded, torch.ones(24, 24).tril().bool())
    close(out, right, rtol=2**-8, atol=2**-8)
    grads = torch.autograd.grad(out.float().sum(), tensors)
    assert all(grad.dtype == torch.float32 for grad in grads)


def test_blockwise_stays_in_float32_within_autocast() -> None:
    """Forward and backward, also where the backward pass itself runs within autocast: equal to those without, to the bit."""
    tensors = [t.bfloat16().requires_grad_() for t in inputs()]
    grad = torch.randn(2, 3, 24, 16).bfloat16()
    right = pt.attention(*tensors, path="blockwise")
    expected = torch.autograd.grad(right, tensors, grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pt.attention(*tensors, path="blockwise")
        found = torch.autograd.grad(out, tensors, grad)
    for a, b in zip((out, *found), (right, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_kernel_that_is_switched_off_is_not_taken() -> None:
    tensors = inputs()
    for _ in range(2):
        chosen = pt.explain_attention(*tensors).chosen
        assert chosen is not None and chosen.path == "flash"
        with sdpa_kernel(SDPBackend.MATH):
            explanation = pt.explain_attention(*tensors)
            assert explanation.chosen is not None and explanation.chosen.path == "blockwise"
            assert "switched off" in explanation.verdicts[0].reasons[0]
            close(pt.attention(*tensors), reference(*tensors))
