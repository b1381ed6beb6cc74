"""Every mask on every path of the session's backend, forward and backward; what is chosen, and what is said of it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from cases import CASES, SIZES, Case, inputs, reference

import portable as pt
from portable.attn.path import Path

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def device() -> torch.device:
    """The session's device."""
    pt.use(os.environ.get("PORTABLE_BACKEND", "cpu"))
    return pt.device()


def paths(case: Case, dtype: torch.dtype, device: torch.device) -> list[Path]:
    query, key, value = (t.to(device) for t in inputs(SIZES, dtype))
    found = pt.explain_attention(query, key, value, mask=moved(case.make(SIZES), device))
    return [verdict.path for verdict in found.verdicts if not verdict.reasons]  # type: ignore[misc]


def moved(mask: Any, device: torch.device) -> Any:
    return mask.to(device) if isinstance(mask, torch.Tensor) else mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_path_computes_the_same(device: torch.device, case: Case, dtype: torch.dtype) -> None:
    tensors = inputs(SIZES, dtype)
    exact = [t.double().requires_grad_() for t in tensors]
    right, _ = reference(case, SIZES, exact)
    grad = torch.randn(right.shape).to(dtype)
    wanted = torch.autograd.grad(right, exact, grad.double())
    names = paths(case, dtype, device)
    assert "blockwise" in names
    for name in (None, *names):
        training = name != "fused_infer"
        there = [t.to(device).requires_grad_(training) for t in tensors]
        out = pt.attention(*there, mask=moved(case.make(SIZES), device), path=name)  # type: ignore[arg-type]
        assert out.dtype == dtype and out.device.type == device.type
        torch.testing.assert_close(out.double().cpu(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], msg=str(name))
        if not training:
            continue
        for a, b in zip(torch.autograd.grad(out, there, grad.to(device)), wanted, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(
                a.double().cpu(), b, rtol=3 * TOLERANCE[dtype], atol=3 * TOLERANCE[dtype], msg=f"gradient of {name}"
            )


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("none", "causal", "padding", "additive")], ids=lambda c: c.name
)
def test_forms_of_the_call(device: torch.device, case: Case) -> None:
    """Layout bshd, three dimensions, strided inputs, other value sizes, a scale, and the log-sum-exp."""
    mask = moved(case.make(SIZES), device)
    tensors = inputs(SIZES, torch.float32)
    right, sums = reference(case, SIZES, [t.double() for t in tensors], 0.3)
    query, key, value = (t.to(device) for t in tensors)
    close = lambda a, b: torch.testing.assert_close(a.double().cpu(), b, rtol=2e-5, atol=2e-5)  # noqa: E731
    out, lse = pt.attention(query, key, value, mask=mask, scale=0.3, return_lse=True)
    close(out, right)
    close(lse, sums)
    swapped = [t.transpose(1, 2).contiguous() for t in (query, key, value)]
    close(pt.attention(*swapped, mask=mask, scale=0.3, layout="bshd").transpose(1, 2), right)
    strided = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (query, key, value)]
    close(pt.attention(*strided, mask=mask, scale=0.3), right)
    close(pt.attention(query, key, value[..., :8], mask=mask, scale=0.3), right[..., :8])
    wide = torch.cat([value, value], -1)
    close(pt.attention(query, key, wide, mask=mask, scale=0.3), torch.cat([right, right], -1))
    if case.name != "padding":
        flat = pt.attention(query[0], key[0], value[0], mask=mask, scale=0.3)
        close(flat, right[0])


def test_dropout(device: torch.device) -> None:
    """The identity as value shows which weights survived: the rate, the scaling, the seed, and the same ones backwards."""
    query, key = (torch.randn(1, 2, 64, 64, device=device, requires_grad=True) for _ in range(2))
    value = torch.eye(64).expand(1, 2, 64, 64).contiguous().to(device).requires_grad_()

    def run(seed: int, values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(seed)
        return pt.attention(query, key, values, dropout_p=0.3, mask=pt.Causal())

    shown = run(5, value).detach().cpu().double()
    weights = reference(CASES[1], (1, 2, 2, 64, 64, 64, 64), [t.detach().cpu().double() for t in (query, key, value)])[0]
    below = torch.ones(64, 64).tril().bool().expand(1, 2, 64, 64)
    kept = (shown != 0) & below
    count = int(below.sum())
    assert abs(kept.sum().item() / count - 0.7) < 5 * (0.21 / count) ** 0.5
    torch.testing.assert_close(shown[kept], weights[kept] / 0.7, rtol=1e-4, atol=1e-6)
    assert torch.equal(run(5, value).detach().cpu().double(), shown)
    assert not torch.equal(run(6, value).detach().cpu().double(), shown)
    out = run(5, value)
    torch.manual_seed(99)
    (of_value,) = torch.autograd.grad(out.sum(), value)
    torch.testing.assert_close(of_value.cpu().double()[..., 0], (shown * kept).sum(2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 2, 2, 4, 4, 8, 8), (1, 2, 2, 0, 4, 8, 8), (1, 2, 2, 4, 0, 8, 8)], ids=str)
def test_nothing_to_compute(device: torch.device, sizes: Any) -> None:
    there = [t.to(device).requires_grad_() for t in inputs(sizes, torch.float32)]
    out = pt.attention(*there, mask=pt.CausalBottomRight())  # type: ignore[arg-type]
    assert out.shape == (*sizes[:2], sizes[3], sizes[6]) and not bool(out.isnan().any()) and not bool((out != 0).any())
    for grad in torch.autograd.grad(out.sum(), there):
        assert not bool((grad != 0).any())


def test_gradients_of_a_learned_bias(device: torch.device) -> None:
    case = next(c for c in CASES if c.name == "additive")
    tensors, bias = inputs(SIZES, torch.float32), case.make(SIZES)
    exact = bias.double().requires_grad_()
    _, h, hk, _, _, d, _ = SIZES
    query, key, value = (t.double() for t in tensors)
    key, value = (t.repeat_interleave(h // hk, 1) for t in (key, value))
    right = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", query, key) / d**0.5 + exact, -1) @ value
    grad = torch.randn(right.shape)
    (wanted,) = torch.autograd.grad(right, exact, grad.double())
    learned = bias.to(device).requires_grad_()
    out = pt.attention(*(t.to(device) for t in tensors), mask=learned)  # type: ignore[arg-type]
    (found,) = torch.autograd.grad(out, learned, grad.to(device))
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=1e-4, atol=1e-5)


def test_the_explanation_is_what_runs(device: torch.device) -> None:
    """On the emulated devices the vendor's gate, or the vendor's own code, records which kernel was reached."""
    from portable.rehearsal import current

    session = current()
    if session is None:
        pytest.skip("the CPU has no recorder; test_attention.py asks PyTorch itself")
    for queries in (512, 100, 1024):
        tensors = [torch.randn(1, 2, queries, 64, device=device) for _ in range(3)]
        chosen = pt.explain_attention(*tensors, mask=pt.Causal()).chosen
        assert chosen is not None and chosen.path not in ("blockwise", "math")
        session.recorder.reset()
        pt.attention(*tensors, mask=pt.Causal())  # type: ignore[arg-type]
        reached = [path for path, *_ in session.recorder.attention]
        assert "math" not in reached and session.profile.attention.value.plain not in reached
