"""The vendor's attention operators against a dense softmax in float64 whose mask is written out rule by rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@pytest.fixture
def ops(rehearsal: Any) -> Any:
    return torch.ops.npu


def dense(
    query: Tensor, key: Tensor, value: Tensor, scale: float, masked: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention (B, N, S, D) and log-sum-exp; rows that see nothing give 0."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("bnqd,bnkd->bnqk", query, key) * scale
    if bias is not None:
        scores = scores + bias
    if masked is not None:
        scores = scores.masked_fill(masked, -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    return torch.einsum("bnqk,bnkd->bnqd", weights, value), torch.logsumexp(scores, -1)


def inputs(sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value of (batch, heads, key heads, queries, keys, head_dim)."""
    torch.manual_seed(0)
    b, n, nk, q, k, d = sizes
    return [torch.randn(b, n, q, d).to(dtype), torch.randn(b, nk, k, d).to(dtype), torch.randn(b, nk, k, d).to(dtype)]


def laid(tensor: Tensor, layout: str) -> Tensor:
    """(B, N, S, D) in another layout."""
    by_length = tensor.transpose(1, 2)
    return {
        "BNSD": tensor,
        "BSND": by_length,
        "BSH": by_length.flatten(2),
        "SBH": by_length.flatten(2).transpose(0, 1),
        "TND": by_length.flatten(0, 1),
    }[layout].contiguous()


def check(found: Tensor, right: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    tolerance = factor * {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(found.double().cpu(), right.double(), rtol=tolerance, atol=tolerance)


def forward_and_backward(
    dev: torch.device, layout: str, sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype, masked: Tensor | None,
    bias: Tensor | None = None, operator: str = "npu_fusion_attention", scale: float = 0.3, **options: Any,
) -> None:  # fmt: skip
    tensors = inputs(sizes, dtype)
    exact = [t.double().requires_grad_() for t in tensors]
    right, lse = dense(*exact, scale, masked, bias)
    there = [laid(t, layout).to(dev).requires_grad_() for t in tensors]
    options = {n: v.to(dev) if isinstance(v, Tensor) else v for n, v in options.items()}
    out, top, total, *_ = getattr(torch.ops.npu, operator)(*there, sizes[1], layout, scale=scale, **options)
    check(out, laid(right, layout), dtype)
    assert out.dtype == dtype and top.dtype == total.dtype == torch.float32 and top.shape[-1] == 8
    if layout != "TND":
        seen = ~lse.isinf()
        check(
            (top[..., 0].cpu() + total[..., 0].cpu().log())[seen], lse[seen], torch.float32, 10 if dtype != torch.float32 else 1
        )
    grad = torch.randn(right.shape).to(dtype)
    right.backward(grad.double())
    out.backward(laid(grad, layout).to(dev))
    for mine, theirs in zip(there, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        check(mine.grad, laid(theirs.grad, layout), dtype, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
def test_layouts(dev: torch.device, rehearsal: Any, layout: str, dtype: torch.dtype) -> None:
    forward_and_backward(dev, layout, (2, 4, 2, 5, 7, 16), dtype, None)


def band(queries: int, keys: int, before: int, after: int, shift: int = 0) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(queries), torch.arange(keys), indexing="ij")
    distance = columns - rows - shift
    return (distance > after) | (distance < -before)


MODES: dict[str, tuple[Callable[[int, int], Tensor], dict[str, Any]]] = {
    "0 mask": (lambda q, k: band(q, k, 2, 1), {"sparse_mode": 0, "atten_mask": lambda q, k: band(q, k, 2, 1)}),
    "0 mask and window": (
        lambda q, k: band(q, k, 2, 1),
        {"sparse_mode": 0, "atten_mask": lambda q, k: torch.zeros(q, k, dtype=torch.bool), "pre_tockens": 2, "next_tockens": 1},
    ),
    "1 whole mask": (lambda q, k: band(q, k, 3, 0), {"sparse_mode": 1, "atten_mask": lambda q, k: band(q, k, 3, 0)}),
    "2 left-up": (lambda q, k: band(q, k, 99, 0), {"sparse_mode": 2, "atten_mask": lambda q, k: COMPRESSED}),
    "3 right-down": (lambda q, k: band(q, k, 99, 0, k - q), {"sparse_mode": 3, "atten_mask": lambda q, k: COMPRESSED}),
    "4 band": (
        lambda q, k: band(q, k, 2, 1, k - q),
        {"sparse_mode": 4, "atten_mask": lambda q, k: COMPRESSED, "pre_tockens": 2, "next_tockens": 1},
    ),
}


@pytest.mark.parametrize("lengths", [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_sparse_modes(dev: torch.device, rehearsal: Any, mode: str, lengths: tuple[int, int]) -> None:
    """True in the mask means masked out. Rows that see nothing are made zeros by inner_precise=2."""
    rule, options = MODES[mode]
    built = {n: v(*lengths) if callable(v) else v for n, v in options.items()}
    forward_and_backward(
        dev, "BNSD", (2, 3, 3, *lengths, 8), torch.float32, rule(*lengths), inner_precise=2, **built
    )  # fmt: skip


def test_prefix_modes(dev: torch.device, rehearsal: Any) -> None:
    """The first keys are seen by all queries of a sequence, the rest as right-down causal."""
    causal, columns = band(5, 7, 99, 0, 2), torch.arange(7)
    masked = torch.stack([causal & (columns >= n) for n in (4, 0)]).unsqueeze(1)
    options = {"prefix": [4, 0], "inner_precise": 2}
    forward_and_backward(dev, "BNSD", (2, 2, 2, 5, 7, 8), torch.float32, masked, sparse_mode=5, atten_mask=masked, **options)
    compressed = torch.zeros(3072, 2048, dtype=torch.bool)
    forward_and_backward(
        dev, "BNSD", (2, 2, 2, 5, 7, 8), torch.float32, masked, sparse_mode=6, atten_mask=compressed, **options
    )


def test_rows_that_see_nothing(dev: torch.device, rehearsal: Any) -> None:
    """Zeros with inner_precise 2; without it the mean of the values, and no error."""
    q, k, v = (t.to(dev) for t in inputs((1, 1, 1, 3, 4, 8)))
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    for precise, right in ((2, torch.zeros(8)), (0, v.cpu()[0, 0].mean(0))):
        out = torch.ops.npu.npu_fusion_attention(q, k, v, 1, "BNSD", atten_mask=mask.to(dev), inner_precise=precise)[0]
        torch.testing.assert_close(out.cpu()[0, 0, 1], right)


def test_the_scale_is_one_unless_told(dev: torch.device, rehearsal: Any) -> None:
    tensors = inputs((1, 2, 2, 4, 4, 8))
    out = torch.ops.npu.npu_fusion_attention(*(t.to(dev) for t in tensors), 2, "BNSD")[0]
    check(out, dense(*(t.double() for t in tensors), 1.0)[0], torch.float32)


@pytest.mark.parametrize("operator", ["npu_fusion_attention", "npu_fusion_attention_v3"])
def test_bias(dev: torch.device, rehearsal: Any, operator: str) -> None:
    bias = torch.randn(2, 3, 5, 7)
    forward_and_backward(dev, "BNSD", (2, 3, 3, 5, 7, 8), torch.float32, None, bias.double(), operator, pse=bias)


@pytest.mark.parametrize("kind", [0, 1])
def test_second_form(dev: torch.device, rehearsal: Any, kind: int) -> None:
    bias = torch.randn(2, 3, 5, 7)
    added = bias.double() * (0.3 if kind == 0 else 1.0)
    options = {"operator": "npu_fusion_attention_v2", "pse": bias, "pse_type": kind}
    forward_and_backward(dev, "BNSD", (2, 3, 3, 5, 7, 8), torch.float32, None, added, **options)
    with pytest.raises(NotImplementedError, match="pse_type=2"):
        torch.ops.npu.npu_fusion_attention_v2(*(t.to(dev) for t in inputs((1, 1, 1, 4, 4, 8))), 1, "BNSD", pse_type=2)


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_packed_sequences(dev: torch.device, rehearsal: Any, mode: int) -> None:
    """Lengths 3, 0 and 5 against 4, 2 and 5 keys, each as if alone."""
    torch.manual_seed(0)
    q_ends, k_ends = [3, 3, 8], [4, 6, 11]
    q, k, v = torch.randn(8, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 8)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    parts, starts = [], [(0, 0), (3, 4), (3, 6)]
    for (a, c), b, d in zip(starts, q_ends, k_ends, strict=True):
        if a == b:
            continue
        one = [exact[0][a:b], exact[1][c:d], exact[2][c:d]]
        masked = {0: None, 2: band(b - a, d - c, 99, 0), 3: band(b - a, d - c, 99, 0, (d - c) - (b - a))}[mode]
        parts.append(dense(*(t.transpose(0, 1).unsqueeze(0) for t in one), 0.5, masked)[0][0].transpose(0, 1))
    right = torch.cat(parts)
    there = [t.to(dev).requires_grad_() for t in (q, k, v)]
    options = {} if mode == 0 else {"sparse_mode": mode, "atten_mask": COMPRESSED.to(dev)}
    out = torch.ops.npu.npu_fusion_attention(
        *there, 4, "TND", scale=0.5, actual_seq_qlen=q_ends, actual_seq_kvlen=k_ends, **options
    )[0]
    check(out, right.detach(), torch.float32)
    grad = torch.randn(8, 4, 8)
    right.backward(grad.double())
    out.backward(grad.to(dev))
    for a, b in zip(there, exact, strict=True):
        check(a.grad, b.grad, torch.float32, 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("operator", ["npu_fusion_attention", "npu_fusion_attention_v3"])
def test_dropout(dev: torch.device, rehearsal: Any, operator: str) -> None:
    q, k, v = (t.to(dev).requires_grad_() for t in inputs((1, 2, 2, 32, 64, 16)))
    call = getattr(torch.ops.npu, operator)
    eye = torch.eye(64, device=dev).expand(1, 2, 64, 64).contiguous()

    def run(seed: int, value: Tensor) -> Tensor:
        torch.npu.manual_seed(seed)  # type: ignore[attr-defined]
        return call(q, k, value, 2, "BNSD", scale=0.25, keep_prob=0.7)[0]

    # The identity as value shows the weights that survived: the softmax's, over 0.7.
    q8, k8 = q.detach().cpu().double(), k.detach().cpu().double()
    wide_key = torch.nn.functional.pad(k8, (0, 48))
    weights = torch.softmax(torch.einsum("bnqd,bnkd->bnqk", torch.nn.functional.pad(q8, (0, 48)), wide_key) * 0.25, -1)
    torch.npu.manual_seed(5)  # type: ignore[attr-defined]
    padded = [torch.nn.functional.pad(t.detach(), (0, 48)) for t in (q, k)]
    shown = call(*padded, eye, 2, "BNSD", scale=0.25, keep_prob=0.7)[0].cpu().double()
    kept = shown != 0
    assert abs(kept.double().mean().item() - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    torch.testing.assert_close(shown[kept], weights[kept] / 0.7, rtol=1e-4, atol=1e-6)
    out = run(5, v)
    expected = torch.einsum("bnqk,bnkd->bnqd", weights * kept / 0.7, v.detach().cpu().double())
    check(out, expected, torch.float32)
    assert torch.equal(run(5, v).cpu(), out.cpu()) and not torch.equal(run(6, v).cpu(), out.cpu())
    grad = torch.randn(1, 2, 32, 16)
    out = run(5, v)
    torch.npu.manual_seed(99)  # type: ignore[attr-defined]
    (of_value,) = torch.autograd.grad(out, v, grad.to(dev))
    check(of_value, torch.einsum("bnqk,bnqd->bnkd", weights * kept / 0.7, grad.double()), torch.float32, 4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"input_layout": "NBSD"}, ValueError, "input_layout='NBSD'"),
        ({"input_layout": "BSH"}, ValueError, "which has 3 dimensions"),
        ({"keep_prob": 0.0}, ValueError, "keep_prob=0.0"),
        ({"inner_precise": 5}, ValueError, "inner_precise=5"),
        ({"sparse_mode": 2, "atten_mask": torch.ones(4, 4, dtype=torch.bool)}, ValueError, r"\(2048, 2048\)"),
        ({"sparse_mode": 9}, ValueError, "sparse_mode=9"),
        ({"atten_mask": torch.ones(4, 5, dtype=torch.bool)}, ValueError, r"shape \(4, 5\)"),
        ({"atten_mask": torch.ones(4, 4)}, ValueError, "bool or uint8"),
        ({"padding_mask": torch.ones(4, 4)}, ValueError, "padding_mask"),
        ({"sparse_mode": 5, "atten_mask": torch.ones(4, 4, dtype=torch.bool)}, ValueError, "prefix"),
        ({"head_num": 3}, ValueError, "query heads"),
    ],
)
def test_refusals(dev: torch.device, rehearsal: Any, options: dict[str, Any], error: Any, words: str) -> None:
    given: dict[str, Any] = {"head_num": 2, "input_layout": "BNSD", **options}
    given = {n: v.to(dev) if isinstance(v, Tensor) else v for n, v in given.items()}
    with pytest.raises(error, match=words):
        torch.ops.npu.npu_fusion_attention(*(t.to(dev) for t in inputs((1, 2, 2, 4, 4, 8))), **given)


# -- inference -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@pytest.mark.parametrize("operator", ["npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"])
def test_inference(dev: torch.device, rehearsal: Any, operator: str, layout: str, dtype: torch.dtype) -> None:
    tensors = inputs((2, 4, 2, 5, 7, 16), dtype)
    right, lse = dense(*(t.double() for t in tensors), 0.25)
    laid_in = [laid(t, layout.split("_")[0]).to(dev) for t in tensors]
    heads, scale, flag = (
        ("num_heads", "scale", "softmax_lse_flag")
        if not operator.endswith("v2")
        else ("num_query_heads", "softmax_scale", "return_softmax_lse")
    )
    options = {heads: 4, scale: 0.25, flag: True, "num_key_value_heads": 2, "input_layout": layout}
    out, sums = getattr(torch.ops.npu, operator)(*laid_in, **options)
    check(out, laid(right, layout.split("_")[-1]), dtype)
    assert sums.shape == (2, 4, 5, 1)
    check(sums[..., 0], lse, torch.float32, 10)
    meta, meta_sums = getattr(torch.ops.npu, operator)(*(t.to("meta") for t in laid_in), **options)
    assert (meta.shape, meta.dtype, meta_sums.shape) == (out.shape, out.dtype, sums.shape)


@pytest.mark.parametrize("mode", [2, 3, 4])
def test_inference_with_compressed_masks(dev: torch.device, rehearsal: Any, mode: int) -> None:
    tensors = inputs((2, 2, 2, 4, 9, 16), torch.float16)
    window = {"pre_tokens": 2, "next_tokens": 1} if mode == 4 else {}
    masked = {2: band(4, 9, 99, 0), 3: band(4, 9, 99, 0, 5), 4: band(4, 9, 2, 1, 5)}[mode]
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        *(t.to(dev) for t in tensors), num_heads=2, input_layout="BNSD", scale=0.25, sparse_mode=mode,
        atten_mask=COMPRESSED.to(dev), **window,
    )  # fmt: skip
    check(out, dense(*(t.double() for t in tensors), 0.25, masked)[0], torch.float16)


def test_decoding_from_a_cache(dev: torch.device, rehearsal: Any) -> None:
    """One query a sequence, caches filled to 3 and 8 of 8; dense, and in blocks of 4 that lie anywhere."""
    query, key, value = inputs((2, 4, 2, 1, 8, 16), torch.float16)
    masked = torch.stack([torch.arange(8) >= n for n in (3, 8)]).view(2, 1, 1, 8)
    right = dense(*(t.double() for t in (query, key, value)), 0.25, masked)[0]
    options: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "scale": 0.25}
    call = torch.ops.npu.npu_fused_infer_attention_score
    there = [t.to(dev) for t in (query, key, value)]
    check(call(*there, actual_seq_lengths_kv=[3, 8], **options)[0], right, torch.float16)
    check(call(*there, atten_mask=masked.to(dev), **options)[0], right, torch.float16)
    table = torch.tensor([[5, 0], [1, 3]], dtype=torch.int32)
    pools = []
    for tensor in (key, value):
        pool = torch.full((6, 2, 4, 16), float("nan"), dtype=torch.float16)
        for sequence in range(2):
            for block in range(2):
                pool[table[sequence, block]] = tensor[sequence, :, 4 * block : 4 * block + 4]
        pools.append(pool.to(dev))
    paged = call(there[0], *pools, actual_seq_lengths_kv=[3, 8], block_table=table.to(dev), block_size=4, **options)[0]
    check(paged, right, torch.float16)
    old = torch.ops.npu.npu_incre_flash_attention(
        *there, actual_seq_lengths=[3, 8], num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale_value=0.25
    )
    check(old, right, torch.float16)


def test_packed_inference(dev: torch.device, rehearsal: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, 2, 16).half() for _ in range(3))
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        *(t.to(dev) for t in (q, k, v)), num_heads=2, num_key_value_heads=2, input_layout="TND", scale=0.25, sparse_mode=3,
        atten_mask=COMPRESSED.to(dev), actual_seq_lengths=[3, 7], actual_seq_lengths_kv=[3, 7],
    )  # fmt: skip
    parts = [
        dense(*(t[a:b].double().transpose(0, 1).unsqueeze(0) for t in (q, k, v)), 0.25, band(b - a, b - a, 99, 0))[0][0]
        for a, b in ((0, 3), (3, 7))
    ]
    check(out, torch.cat([p.transpose(0, 1) for p in parts]), torch.float16)


def test_a_sink(dev: torch.device, rehearsal: Any) -> None:
    tensors, sink = inputs((1, 2, 2, 4, 6, 16), torch.float16), torch.randn(2)
    out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
        *(t.to(dev) for t in tensors), num_query_heads=2, input_layout="BNSD", softmax_scale=0.25, learnable_sink=sink.to(dev)
    )
    q, k, v = (t.double() for t in tensors)
    scores = torch.cat([torch.einsum("bnqd,bnkd->bnqk", q, k) * 0.25, sink.double().view(1, 2, 1, 1).expand(1, 2, 4, 1)], -1)
    check(out, torch.einsum("bnqk,bnkd->bnqd", torch.softmax(scores, -1)[..., :6], v), torch.float16)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"input_layout": "SBH"}, ValueError, "input_layout='SBH'"),
        ({"num_heads": 3}, ValueError, "the query's own number of heads"),
        ({"sparse_mode": 5}, ValueError, "sparse_mode=5"),
        ({"sparse_mode": 1}, ValueError, "without a mask"),
        ({"actual_seq_lengths_kv": [99, 1]}, ValueError, "within the sequences"),
        ({"quant_scale2": torch.ones(1)}, NotImplementedError, "quant_scale2"),
        ({"block_size": 4, "block_table": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, "actual_seq_lengths_kv"),
    ],
)
def test_inference_refuses(dev: torch.device, rehearsal: Any, options: dict[str, Any], error: Any, words: str) -> None:
    given: dict[str, Any] = {"num_heads": 2, "input_layout": "BNSD", **options}
    given = {n: v.to(dev) if isinstance(v, Tensor) else v for n, v in given.items()}
    with pytest.raises(error, match=words):
        torch.ops.npu.npu_fused_infer_attention_score(*(t.to(dev) for t in inputs((2, 2, 2, 4, 4, 16), torch.float16)), **given)
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        torch.ops.npu.npu_fused_infer_attention_score(*(t.to(dev) for t in inputs((2, 2, 2, 4, 4, 16))), num_heads=2)
