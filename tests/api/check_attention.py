"""Attention through the public names: each mask, the choice and its explanation, the policy, against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import portable as pt

B, H, L, D = 2, 4, 24, 16
ROWS = torch.arange(L).view(L, 1)
COLUMNS = torch.arange(L).view(1, L)
LENGTHS = torch.tensor([24, 7])
IDS = torch.tensor([0] * 9 + [1] * 15)

# Rules written out on positions, apart from portable's own.
MASKS: dict[str, tuple[Callable[[], Any], Tensor]] = {
    "none": (lambda: None, torch.ones(L, L, dtype=torch.bool)),
    "causal": (lambda: pt.Causal(), ROWS >= COLUMNS),
    "bottom right": (lambda: pt.CausalBottomRight(), ROWS >= COLUMNS),
    "window": (lambda: pt.SlidingWindow(5, 0), (ROWS >= COLUMNS) & (ROWS - COLUMNS <= 5)),
    "padding": (lambda: pt.Padding(LENGTHS), (LENGTHS.view(B, 1, 1, 1) > COLUMNS)),
    "document": (lambda: pt.Document(IDS) & pt.Causal(), (IDS.view(L, 1) == IDS.view(1, L)) & (ROWS >= COLUMNS)),
    "prefix": (lambda: pt.PrefixLM(6), (ROWS >= COLUMNS) | (COLUMNS < 6)),
}


def _expected(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) / D**0.5 + bias
    return torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1) @ v.double()


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(B, H, L, D, generator=generator) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str, device: torch.device) -> None:
    mask, allowed = MASKS[kind]
    q, k, v = _inputs()
    given = mask()
    assert given is None or isinstance(given, pt.Mask)
    out = pt.attention(q.to(device), k.to(device), v.to(device), mask=given)
    torch.testing.assert_close(out.cpu().double(), _expected(q, k, v, allowed), rtol=1e-5, atol=1e-5)


def test_alibi(device: torch.device) -> None:
    q, k, v = _inputs()
    slopes = pt.alibi_slopes(H)
    assert slopes.tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    out = pt.attention(q.to(device), k.to(device), v.to(device), mask=pt.ALiBi(slopes) & pt.Causal())
    bias = -slopes.double().view(H, 1, 1) * (ROWS - COLUMNS)
    torch.testing.assert_close(out.cpu().double(), _expected(q, k, v, ROWS >= COLUMNS, bias), rtol=1e-5, atol=1e-5)


def test_explanation_and_policy(device: torch.device) -> None:
    q, k, v = (t.to(device) for t in _inputs())
    found = pt.explain_attention(q, k, v, mask=pt.Causal())
    assert found.chosen.path in {verdict.path for verdict in found.verdicts}
    assert found.chosen.chosen
    before = pt.attention_policy("error")
    try:
        assert pt.attention_policy(before) == "error"
        with pytest.raises(pt.ConfigurationError, match="attention_policy"):
            pt.attention_policy("loud")  # type: ignore[arg-type]
    finally:
        pt.attention_policy(before)
