"""npu_fusion_attention in its three forms, forward and backward, against a float64 reference written from the vendor's page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_reference import EVERYTHING, PREFIX_MASK, TRIANGLE, arrange, attend, close, sees
from torch import Tensor

FULL, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
FORMS = ("npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3")
_TOKENS = {"npu_fusion_attention_v2": ("pre_tokens", "next_tokens")}


def _op(form: str) -> Any:
    return getattr(torch.ops.npu, form)


def _inputs(
    batch: int, heads: int, key_heads: int, queries: int, keys: int, size: int = 16, value_size: int | None = None,
    dtype: torch.dtype = FULL,
) -> list[Tensor]:  # fmt: skip
    shapes = [(batch, heads, queries, size), (batch, key_heads, keys, size), (batch, key_heads, keys, value_size or size)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def _compare(
    dev: torch.device, form: str, layout: str, inputs: list[Tensor], seen: Sequence[Tensor | None], scale: float = 0.3,
    bias: Tensor | None = None, sink: Tensor | None = None, bias_first: bool = True, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run the operator on (B, N, S, D) inputs and compare output and every gradient; answers what it answered."""
    dtype, heads = inputs[0].dtype, inputs[0].shape[1]
    mine = [arrange(t, layout).contiguous().to(dev).requires_grad_() for t in inputs]
    extra = {"pse": bias, "sink": sink}
    given = {n: t.to(dev).requires_grad_() for n, t in extra.items() if t is not None}
    options = {n: t.to(dev) if isinstance(t, Tensor) else t for n, t in options.items()}
    answer = _op(form)(*mine, heads, layout, scale=scale, **given, **options)

    theirs = [t.double().requires_grad_() for t in inputs]
    doubles = {n: t.double().requires_grad_() for n, t in extra.items() if t is not None}
    rows = []
    for b in range(inputs[0].shape[0]):
        pse = doubles["pse"][b if bias is not None and bias.shape[0] > 1 else 0] if "pse" in doubles else None
        where = {"first" if bias_first else "last": pse}
        rows.append(attend(*(t[b] for t in theirs), seen[b], scale, sink=doubles.get("sink"), **where).out)
    expected = torch.stack(rows)
    close(answer[0], arrange(expected, layout), dtype)

    grad = torch.randn(expected.shape).to(dtype)
    answer[0].backward(arrange(grad, layout).contiguous().to(dev))
    expected.backward(grad.double())
    for a, b in zip(mine, theirs, strict=True):
        close(a.grad, arrange(b.grad, layout), dtype)
    for name, tensor in given.items():
        close(tensor.grad, doubles[name].grad, tensor.dtype)
    return answer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize(("key_heads", "dtype"), [(4, FULL), (2, FULL), (1, HALF), (4, BF16)])
def test_layouts_grouped_heads_and_dtypes(
    dev: torch.device, form: str, layout: str, key_heads: int, dtype: torch.dtype
) -> None:
    inputs = _inputs(2, 4, key_heads, 5, 7, dtype=dtype)
    mask = torch.rand(2, 1, 5, 7) > 0.7
    mask[..., 0] = False
    _compare(dev, form, layout, inputs, [None, None])
    _compare(dev, form, layout, inputs, list(~mask), atten_mask=mask)


def test_the_default_scale_is_one(dev: torch.device) -> None:
    inputs = _inputs(1, 2, 2, 3, 4)
    out = torch.ops.npu.npu_fusion_attention(*(t.to(dev) for t in inputs), 2, "BNSD")[0]
    close(out[0], attend(*(t[0] for t in inputs), scale=1.0).out, FULL)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9), (9, 4), (1, 5), (3, 2100)])
@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [(0, EVERYTHING, EVERYTHING), (0, 2, 1), (0, EVERYTHING, 0), (0, 4, -1), (0, -1, 3), (1, 2, 1), (2, 1, 1), (3, 1, 1),
     (4, 2, 1), (4, EVERYTHING, 0), (4, 3, -1), (4, -1, 2), (4, 2050, 0)],
)  # fmt: skip
def test_sparse_modes(dev: torch.device, form: str, mode: int, before: int, after: int, queries: int, keys: int) -> None:
    seen = sees(mode, queries, keys, before, after)
    mask = ~seen if mode == 0 else TRIANGLE
    if mode == 1:
        seen = torch.rand(queries, keys) > 0.3
        mask = ~seen
    first, second = _TOKENS.get(form, ("pre_tockens", "next_tockens"))
    tokens = {first: before, second: after}
    options = {"sparse_mode": mode, "inner_precise": 2 if mode < 2 else 0, **tokens}
    _compare(dev, form, "BNSD", _inputs(1, 2, 1, queries, keys), [seen], atten_mask=mask, **options)


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_shapes_of_masks(dev: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = torch.rand(shape) > 0.6
    mask[..., 2] = False
    seen = (~mask).expand(2, 4, 5, 7)
    _compare(dev, FORMS[0], "BSND", _inputs(2, 4, 2, 5, 7), list(seen), atten_mask=mask.to(dtype))


def test_without_a_mask_modes_and_tokens_are_ignored(dev: torch.device) -> None:
    for mode in range(7):
        options = {"sparse_mode": mode, "pre_tockens": 1, "next_tockens": 0}
        _compare(dev, FORMS[0], "BNSD", _inputs(1, 2, 2, 4, 4), [None], **options)


@pytest.mark.parametrize(("queries", "keys", "prefix"), [(6, 6, [2, 5]), (4, 9, [5, 9]), (9, 4, [1, 3])])
def test_prefixes(dev: torch.device, queries: int, keys: int, prefix: list[int]) -> None:
    seen = [sees(5, queries, keys, prefix=n) for n in prefix]
    inputs = _inputs(2, 2, 2, queries, keys)
    whole = torch.stack([~s for s in seen]).unsqueeze(1)
    _compare(dev, FORMS[0], "BSH", inputs, seen, atten_mask=whole, sparse_mode=5, prefix=prefix)
    _compare(dev, FORMS[0], "BSH", inputs, seen, atten_mask=PREFIX_MASK, sparse_mode=6, prefix=prefix)


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (2, 4, 1, 7), (1, 4, 5, 7)])
@pytest.mark.parametrize(("form", "kind"), [*((f, None) for f in FORMS), ("npu_fusion_attention_v2", 0)])
def test_bias(dev: torch.device, shape: tuple[int, ...], form: str, kind: int | None) -> None:
    """Before the scale; after it with pse_type 0."""
    options = {} if kind is None else {"pse_type": kind}
    _compare(dev, form, "BNSD", _inputs(2, 4, 2, 5, 7), [None] * 2, bias=torch.randn(shape), bias_first=kind is None, **options)


@pytest.mark.parametrize("form", FORMS)
def test_sink(dev: torch.device, form: str) -> None:
    _compare(
        dev, form, "BNSD", _inputs(2, 4, 2, 5, 7), [sees(2, 5, 7)] * 2, sink=torch.randn(4), atten_mask=TRIANGLE, sparse_mode=2
    )


def test_smaller_values(dev: torch.device) -> None:
    for layout in ("BSH", "BNSD"):
        _compare(dev, FORMS[0], layout, _inputs(2, 4, 2, 5, 7, 24, 8), [None, None])


# -- packed sequences ---------------------------------------------------------------------------------------------------------


def _packed(
    dev: torch.device, form: str, inputs: list[Tensor], query_ends: list[int], key_ends: list[int],
    seen: Sequence[Tensor | None], scale: float = 0.3, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `_compare` for inputs (T, N, D)."""
    mine = [t.to(dev).requires_grad_() for t in inputs]
    ends: Any = (query_ends, key_ends) if form != FORMS[2] else (torch.tensor(query_ends), torch.tensor(key_ends))
    options = {n: t.to(dev) if isinstance(t, Tensor) else t for n, t in options.items()}
    answer = _op(form)(
        *mine, inputs[0].shape[1], "TND", scale=scale, actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], **options
    )
    theirs = [t.double().requires_grad_() for t in inputs]
    expected = torch.zeros(*inputs[0].shape[:2], inputs[2].shape[2], dtype=torch.double)
    for (a, b), (c, d), mask in zip(pairwise([0, *query_ends]), pairwise([0, *key_ends]), seen, strict=False):
        parts = [theirs[0][a:b], theirs[1][c:d], theirs[2][c:d]]
        expected[a:b] = attend(*(t.transpose(0, 1) for t in parts), mask, scale).out.transpose(0, 1)
    close(answer[0], expected, FULL)
    grad = torch.randn(expected.shape)
    answer[0].backward(grad.to(dev))
    expected.backward(grad.double())
    for a, b in zip(mine, theirs, strict=True):
        close(a.grad, b.grad, FULL)
    return answer


def _tokens(queries: int, keys: int, heads: int = 4, key_heads: int = 2, size: int = 16) -> list[Tensor]:
    return [torch.randn(n, h, size) for n, h in ((queries, heads), (keys, key_heads), (keys, key_heads))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4, 6])
def test_packed_sequences(dev: torch.device, form: str, mode: int) -> None:
    query_ends, key_ends = [3, 3, 8, 9], [4, 6, 10, 17]
    lengths = [(b - a, d - c) for (a, b), (c, d) in zip(pairwise([0, *query_ends]), pairwise([0, *key_ends]), strict=True)]
    prefix = [keys - queries + min(queries, 2) for queries, keys in lengths]
    first, second = _TOKENS.get(form, ("pre_tockens", "next_tockens"))
    tokens = {first: 2, second: 1} if mode in (0, 4) else {}
    mask = {6: PREFIX_MASK}.get(mode, TRIANGLE)
    seen = [sees(mode, q, k, 2, 1, n) for (q, k), n in zip(lengths, prefix, strict=True)]
    if mode < 2:
        mask = ~sees(mode, 5, 7, 2, 1)  # the largest lengths; each sequence reads the upper left part
    options = {"sparse_mode": mode, "atten_mask": mask, **tokens, **({"prefix": prefix} if mode == 6 else {})}
    _packed(dev, form, _tokens(9, 17), query_ends, key_ends, seen, **options)


def test_packed_sequences_left_out_at_the_end(dev: torch.device) -> None:
    """The page: lengths 2, 3, 4, 5, 6 of which the last two take no part are [2, 5, 9, 0, 0]."""
    answer = _packed(dev, FORMS[0], _tokens(20, 20), [2, 5, 9, 0, 0], [2, 5, 9, 0, 0], [None] * 3)
    assert answer[0].shape[0] == 20 and not answer[0][9:].any()


def test_split_sequences(dev: torch.device) -> None:
    """The page's examples of modes 7 and 8: two devices share a sequence's queries; together they are the unsplit call."""

    def run(inputs: list[Tensor], queries: slice, keys: slice, *ends: list[int], **options: Any) -> Tensor:
        cut = [inputs[0][queries], inputs[1][keys], inputs[2][keys]]
        out = torch.ops.npu.npu_fusion_attention(
            *(t.to(dev) for t in cut), 4, "TND", actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], atten_mask=TRIANGLE.to(dev),
            **options,
        )  # fmt: skip
        return out[0].cpu()

    inputs = _tokens(16, 18)  # lengths of queries 3, 4, 5, 4; of keys 3, 6, 5, 4
    whole = run(inputs, slice(0, 16), slice(0, 18), [3, 7, 12, 16], [3, 9, 14, 18], sparse_mode=3)
    left = run(inputs, slice(0, 5), slice(0, 9), [3, 5], [3, 9], sparse_mode=7, pre_tockens=6, next_tockens=-2)
    right = run(inputs, slice(5, 16), slice(3, 18), [2, 7, 11], [6, 11, 15], sparse_mode=3)
    torch.testing.assert_close(torch.cat([left, right]), whole)

    inputs = _tokens(17, 16)  # lengths of queries 3, 5, 5, 4; of keys 3, 4, 5, 4
    whole = run(inputs, slice(0, 17), slice(0, 16), [3, 8, 13, 17], [3, 7, 12, 16], sparse_mode=2)
    left = run(inputs, slice(0, 5), slice(0, 7), [3, 5], [3, 7], sparse_mode=2)
    right = run(inputs, slice(5, 17), slice(3, 16), [3, 8, 12], [4, 9, 13], sparse_mode=8, pre_tockens=4, next_tockens=1)
    torch.testing.assert_close(torch.cat([left, right]), whole)


def test_split_sequences_backward(dev: torch.device) -> None:
    tokens = {"pre_tockens": 6, "next_tockens": -2}
    seen = [sees(3, 3, 3), sees(4, 2, 6, 6, -2)]
    _packed(dev, FORMS[0], _tokens(5, 9), [3, 5], [3, 9], seen, atten_mask=TRIANGLE, sparse_mode=7, **tokens)
    seen = [sees(4, 3, 4, 4, 1), sees(2, 5, 5)]
    options = {"sparse_mode": 8, "pre_tockens": 4, "next_tockens": 1}
    _packed(dev, FORMS[0], _tokens(8, 9), [3, 8], [4, 9], seen, atten_mask=TRIANGLE, **options)


def test_rotated_halves(dev: torch.device) -> None:
    """The second form adds the products of the rotated parts to the scores."""
    inputs, ropes = _tokens(7, 7, 4, 4), [torch.randn(7, 4, 8) for _ in range(2)]
    mine = [t.to(dev).requires_grad_() for t in (*inputs, *ropes)]
    out = torch.ops.npu.npu_fusion_attention_v2(
        *mine[:3], 4, "TND", query_rope=mine[3], key_rope=mine[4], actual_seq_qlen=[3, 7], actual_seq_kvlen=[3, 7], scale=0.2
    )[0]
    theirs = [t.double().requires_grad_() for t in (*inputs, *ropes)]
    expected = torch.zeros(7, 4, 16, dtype=torch.double)
    for part in (slice(0, 3), slice(3, 7)):
        q, k, v, qr, kr = (t[part].transpose(0, 1) for t in theirs)
        expected[part] = attend(q, k, v, None, 0.2, first=torch.einsum("nqd,nkd->nqk", qr, kr)).out.transpose(0, 1)
    close(out, expected, FULL)
    grad = torch.randn(expected.shape)
    out.backward(grad.to(dev))
    expected.backward(grad.double())
    for a, b in zip(mine, theirs, strict=True):
        close(a.grad, b.grad, FULL)


# -- statistics, rows without a key, dropout ----------------------------------------------------------------------------------


def test_statistics(dev: torch.device) -> None:
    inputs, bias = _inputs(2, 4, 2, 5, 7), torch.randn(2, 4, 5, 7)
    mask = torch.rand(5, 7) > 0.8
    mask[:, 1] = False
    _, top, total, reserved, *_ = _compare(dev, FORMS[0], "BSH", inputs, [~mask] * 2, bias=bias, atten_mask=mask)
    assert top.shape == total.shape == (2, 4, 5, 8) and top.dtype == total.dtype == FULL and reserved.shape == (0,)
    assert all(torch.equal(t, t[..., :1].expand_as(t)) for t in (top, total))
    expected = torch.stack([attend(*(t[b] for t in inputs), ~mask, 0.3, first=bias[b]).lse for b in range(2)])
    torch.testing.assert_close((top + total.log())[..., 0].detach().cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_statistics_of_packed_sequences(dev: torch.device) -> None:
    """By default in the order sequence, head, query, whatever the shape says; with softmax_layout TND in that of the tokens."""
    inputs = _tokens(7, 9)
    spans = [(slice(0, 3), slice(0, 4)), (slice(3, 7), slice(4, 9))]
    lse = [attend(*(t[s].transpose(0, 1) for t, s in zip(inputs, (q, k, k), strict=True)), None, 0.3).lse for q, k in spans]
    orders = {"": torch.cat([part.flatten() for part in lse]), "TND": torch.cat([part.T for part in lse]).flatten()}
    for layout, expected in orders.items():
        _, top, total, *_ = _packed(dev, FORMS[0], inputs, [3, 7], [4, 9], [None] * 2, softmax_layout=layout)
        assert top.shape == (7, 4, 8)
        found = (top + total.log())[..., 0].detach().cpu().double().flatten()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(*orders.values())


def test_rows_that_see_nothing(dev: torch.device) -> None:
    """Zeros where the operator is told (inner_precise 2), and where it can tell itself: mode 3 with more queries than keys."""
    seen = torch.ones(5, 7, dtype=torch.bool)
    seen[2] = False
    _compare(dev, FORMS[0], "BNSD", _inputs(1, 2, 2, 5, 7), [seen], atten_mask=~seen, sparse_mode=1, inner_precise=2)
    answer = _compare(dev, FORMS[0], "BNSD", _inputs(1, 2, 2, 9, 4), [sees(3, 9, 4)], atten_mask=TRIANGLE, sparse_mode=3)
    assert not answer[0][0, :, :5].any() and answer[0][0, :, 5:].any()
    inputs = _inputs(1, 2, 2, 5, 7)  # otherwise (assumed) the mean of the values
    out = torch.ops.npu.npu_fusion_attention(*(t.to(dev) for t in inputs), 2, "BNSD", atten_mask=~seen.to(dev), sparse_mode=1)[
        0
    ]
    close(out[0, :, 2], inputs[2][0].double().mean(1), FULL)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_dropout(dev: torch.device, form: str, layout: str) -> None:
    """Values that are a unit matrix show the weights that were kept; the backward pass must have dropped the same ones."""
    heads, length, keep = 4, 24, 0.75
    packed = {"actual_seq_qlen": [10, 24], "actual_seq_kvlen": [10, 24]} if layout == "TND" else {}
    if form == FORMS[2]:
        packed = {n: torch.tensor(v) for n, v in packed.items()}
    q, k = (torch.randn(heads, length, length) for _ in range(2))
    v = torch.eye(length).expand(heads, length, length).clone()

    def laid(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).contiguous() if layout == "TND" else tensor.unsqueeze(0)

    def run(seed: int, keep_prob: float = keep) -> tuple[Any, list[Tensor]]:
        torch.npu.manual_seed(seed)
        mine = [laid(t).to(dev).requires_grad_() for t in (q, k, v)]
        return _op(form)(*mine, heads, layout, scale=0.1, keep_prob=keep_prob, **packed), mine

    def heads_first(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu()
        return tensor.transpose(0, 1) if layout == "TND" else tensor[0]

    full, _ = run(1, 1.0)
    answer, mine = run(1)
    weights, kept = heads_first(full[0]), heads_first(answer[0])
    survived = kept != 0
    torch.testing.assert_close(kept, weights * survived / keep)
    possible = weights != 0
    assert abs(survived.sum() / possible.sum() - keep) < 0.06
    assert torch.equal(kept, heads_first(run(1)[0][0])) and not torch.equal(kept, heads_first(run(2)[0][0]))

    grad = torch.randn(heads, length, length)
    answer[0].backward(laid(grad).to(dev))
    theirs = [t.double().requires_grad_() for t in (q, k, v)]
    attend(*theirs, possible, 0.1, drop=lambda w: w * survived / keep).out.backward(grad.double())
    for a, b in zip(mine, theirs, strict=True):
        close(a.grad, laid(b.grad), FULL)
    if form != FORMS[2]:
        assert answer[6] == (heads * (100 + 196) if packed else heads * length * length)


def test_dropout_of_packed_sequences_is_no_repetition(dev: torch.device) -> None:
    """Four equal sequences in one call, and two calls, drop other weights: eight masks that all differ."""
    values = torch.eye(16, 32, device=dev).repeat(4, 1).unsqueeze(1)
    query, ends = torch.ones(64, 1, 32, device=dev), [16, 32, 48, 64]
    torch.npu.manual_seed(5)
    masks = []
    for _ in range(2):
        out = torch.ops.npu.npu_fusion_attention(
            query, query, values, 1, "TND", scale=0.1, keep_prob=0.5, actual_seq_qlen=ends, actual_seq_kvlen=ends
        )[0].cpu()
        masks += [part[:, 0, :16] != 0 for part in out.split(16)]
    for first in range(8):
        for second in range(first):
            assert 0.3 < (masks[first] == masks[second]).double().mean() < 0.7


def test_dropout_by_a_seed_of_ones_own(dev: torch.device) -> None:
    inputs = [t.to(dev) for t in _inputs(1, 2, 2, 16, 16)]

    def run(seed: int, offset: int) -> tuple[Any, ...]:
        return torch.ops.npu.npu_fusion_attention(*inputs, 2, "BNSD", keep_prob=0.5, seed=seed, offset=offset)

    first, other = run(7, 4), run(8, 4)
    torch.npu.manual_seed(3)
    again = run(7, 4)
    assert torch.equal(first[0], again[0]) and first[4:6] == again[4:6] == (7, 4) and not torch.equal(first[0], other[0])


# -- shapes, refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD", "TND"])
def test_shapes_are_those_of_the_wheel(dev: torch.device, form: str, layout: str) -> None:
    if form == FORMS[1] and layout in ("BSND", "TND"):
        pytest.skip("the wheel's meta kernel of the second form has no rule for the statistics of this layout")
    inputs = _tokens(10, 12) if layout == "TND" else [arrange(t, layout).contiguous() for t in _inputs(2, 4, 2, 5, 6)]
    ends: dict[str, Any] = {"actual_seq_qlen": [4, 10], "actual_seq_kvlen": [5, 12]} if layout == "TND" else {}
    if form == FORMS[2]:
        ends = {n: torch.tensor(v) for n, v in ends.items()}
    mine = _op(form)(*(t.to(dev) for t in inputs), 4, layout, **ends)
    theirs = _op(form)(
        *(t.to("meta") for t in inputs), 4, layout, **{n: v.to("meta") if form == FORMS[2] else v for n, v in ends.items()}
    )
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) if isinstance(a, Tensor) else type(a) is type(b)


_MASK = torch.zeros(8, 8, dtype=torch.bool)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"layout": "BDSN"}, "input_layout='BDSN'"),
    "dimensions": ({"layout": "BSH"}, "3 dimensions"),
    "padding_mask": ({"padding_mask": _MASK}, "padding_mask"),
    "keep_prob 0": ({"keep_prob": 0.0}, "keep_prob=0.0"),
    "keep_prob above 1": ({"keep_prob": 1.5}, "keep_prob=1.5"),
    "inner_precise": ({"inner_precise": 3}, "inner_precise=3"),
    "mode": ({"sparse_mode": 9}, "sparse_mode=9"),
    "split mode without packing": ({"sparse_mode": 7, "atten_mask": TRIANGLE}, "sparse_mode=7"),
    "mask of another shape": ({"atten_mask": torch.zeros(8, 7, dtype=torch.bool)}, r"\(8, 7\)"),
    "float mask": ({"atten_mask": torch.zeros(8, 8)}, "float32"),
    "mask that is not compressed": ({"atten_mask": _MASK, "sparse_mode": 2}, "2048"),
    "prefix mask that is not compressed": ({"atten_mask": _MASK, "sparse_mode": 6, "prefix": [8]}, "3072"),
    "prefix mask without batch": ({"atten_mask": _MASK, "sparse_mode": 5, "prefix": [8]}, r"\(8, 8\)"),
    "no prefix": ({"atten_mask": PREFIX_MASK, "sparse_mode": 6}, "prefix"),
    "prefix out of range": ({"atten_mask": PREFIX_MASK, "sparse_mode": 6, "prefix": [9]}, "prefix of 9"),
    "bias of another shape": ({"pse": torch.zeros(8, 8)}, r"pse of shape \(8, 8\)"),
    "bias of another dtype": ({"pse": torch.zeros(1, 2, 8, 8, dtype=HALF)}, "float16"),
    "sink": ({"sink": torch.zeros(3)}, "sink"),
    "softmax_layout": ({"softmax_layout": "TND"}, "softmax_layout"),
    "heads": ({"heads": 3}, "head_num=3|3 query heads"),
    "dropout_mask": ({"dropout_mask": torch.zeros(8, dtype=torch.uint8)}, "dropout_mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(dev: torch.device, name: str) -> None:
    options, words = REFUSED[name]
    options = {n: v.to(dev) if isinstance(v, Tensor) else v for n, v in options.items()}
    heads, layout = options.pop("heads", 2), options.pop("layout", "BNSD")
    with pytest.raises((ValueError, NotImplementedError), match=words):
        torch.ops.npu.npu_fusion_attention(*(t.to(dev) for t in _inputs(1, 2, 2, 8, 8)), heads, layout, **options)


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ({}, "actual_seq_qlen"),
        ({"actual_seq_qlen": [4, 8]}, "actual_seq_kvlen"),
        ({"actual_seq_qlen": [4, 9], "actual_seq_kvlen": [4, 8]}, "actual_seq_qlen"),
        ({"actual_seq_qlen": [5, 4, 8], "actual_seq_kvlen": [4, 4, 8]}, "cumulative"),
        ({"actual_seq_qlen": [4, 8], "actual_seq_kvlen": [8]}, "2 query and 1 key"),
        ({"actual_seq_qlen": [8], "actual_seq_kvlen": [8], "softmax_layout": "NTD"}, "softmax_layout"),
        ({"actual_seq_qlen": [8], "actual_seq_kvlen": [8], "sparse_mode": 5, "atten_mask": _MASK}, "sparse_mode=5"),
        ({"actual_seq_qlen": [8], "actual_seq_kvlen": [8], "sparse_mode": 1, "atten_mask": _MASK[None, None]}, "atten_mask"),
        ({"actual_seq_qlen": [8], "actual_seq_kvlen": [8], "pse": torch.zeros(1, 2, 8, 8)}, "pse"),
    ],
)
def test_refusals_of_packed_sequences(dev: torch.device, ends: dict[str, Any], words: str) -> None:
    options = {n: v.to(dev) if isinstance(v, Tensor) else v for n, v in ends.items()}
    with pytest.raises((ValueError, NotImplementedError), match=words):
        torch.ops.npu.npu_fusion_attention(*(t.to(dev) for t in _tokens(8, 8, 2, 2)), 2, "TND", **options)


def test_refusals_of_shapes_and_dtypes(dev: torch.device) -> None:
    good = [t.to(dev) for t in _inputs(1, 2, 2, 8, 8)]
    wrong = {
        "float64": [t.double() for t in good],
        "float16": [good[0], good[1].half(), good[2]],
        "one batch size": [good[0].expand(2, -1, -1, -1).contiguous(), *good[1:]],
        "head_dim": [good[0], good[1], torch.cat([good[2]] * 2, -1)],
        "1 to 768": [torch.zeros(1, 2, 8, 784, device=dev)] * 3,
    }
    for words, inputs in wrong.items():
        with pytest.raises(ValueError, match=words):
            torch.ops.npu.npu_fusion_attention(*inputs, 2, "BNSD")


def test_refusals_of_the_second_form(dev: torch.device) -> None:
    inputs = [t.to(dev) for t in _inputs(1, 2, 2, 8, 8)]
    call = torch.ops.npu.npu_fusion_attention_v2
    bias = torch.zeros(1, 2, 8, 8, device=dev)
    for kind in (2, 3):
        with pytest.raises(NotImplementedError, match=f"pse_type={kind}"):
            call(*inputs, 2, "BNSD", pse=bias, pse_type=kind)
    with pytest.raises(ValueError, match="pse_type=4"):
        call(*inputs, 2, "BNSD", pse=bias, pse_type=4)
    with pytest.raises(ValueError, match="both or neither"):
        call(*inputs, 2, "BNSD", query_rope=inputs[0])
    with pytest.raises(ValueError, match="TND"):
        call(*inputs, 2, "BNSD", query_rope=inputs[0], key_rope=inputs[1])
    packed = [t.to(dev) for t in _tokens(8, 8, 4, 4)]
    lengths = {"actual_seq_qlen": [8], "actual_seq_kvlen": [8]}
    with pytest.raises(ValueError, match="pse_type=0 with query_rope"):
        call(*packed, 4, "TND", query_rope=packed[0], key_rope=packed[1], pse_type=0, **lengths)
