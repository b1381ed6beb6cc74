"""The vendor's attention for inference against a float64 reference written from its pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_reference import EVERYTHING, TRIANGLE, arrange, attend, close, sees
from torch import Tensor

HALF, BF16 = torch.float16, torch.bfloat16
DENSE = ("BSH", "BSND", "BNSD", "NSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD")
PACKED = ("TND", "NTD", "TND_NTD", "NTD_TND")
# Names of the second form for those of the first.
_RENAMED = {
    "num_heads": "num_query_heads", "scale": "softmax_scale", "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen", "softmax_lse_flag": "return_softmax_lse",
}  # fmt: skip


def _run(dev: torch.device, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Both forms of the operator, which must agree to the bit; answers what the first answered, on the CPU."""
    options = {n: v.to(dev) if isinstance(v, Tensor) else v for n, v in options.items()}
    mine = [t.contiguous().to(dev) for t in inputs]
    first = torch.ops.npu.npu_fused_infer_attention_score(*mine, **options)
    if "key_shared_prefix" not in options:  # not in the second form
        second = torch.ops.npu.npu_fused_infer_attention_score_v2(*mine, **{_RENAMED.get(n, n): v for n, v in options.items()})
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return first[0].cpu(), first[1].cpu()


def _inputs(
    batch: int, heads: int, groups: int, queries: int, keys: int, size: int = 32, values: int | None = None,
    dtype: torch.dtype = HALF,
) -> list[Tensor]:  # fmt: skip
    shapes = [(batch, heads, queries, size), (batch, groups, keys, size), (batch, groups, keys, values or size)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def _expect(
    inputs: Sequence[Tensor], used: Sequence[int], lengths: Sequence[int], seen: Sequence[Tensor | None], scale: float,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(B, N, Sq, Dv) and (B, N, Sq): zeros behind the queries that count."""
    query, key, value = inputs
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.double)
    lse = torch.zeros(query.shape[:3], dtype=torch.double)
    for b, (n, m) in enumerate(zip(used, lengths, strict=True)):
        more = {name: t[b if t.shape[0] > 1 else 0, :, :n, :m] for name, t in options.items()}
        answer = attend(query[b, :, :n], key[b, :, :m], value[b, :, :m], seen[b], scale, **more)
        out[b, :, :n], lse[b, :, :n] = answer.out, answer.lse
    return out, lse


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize(("groups", "dtype"), [(4, HALF), (2, BF16), (1, HALF)])
def test_layouts_and_grouped_heads(dev: torch.device, layout: str, groups: int, dtype: torch.dtype) -> None:
    batch = 1 if layout == "NSD" else 2
    inputs = _inputs(batch, 4, groups, 5, 7, dtype=dtype)
    given, answered = layout.partition("_")[0], layout.rpartition("_")[2]
    out, lse = _run(
        dev, *(arrange(t, given) for t in inputs), num_heads=4, num_key_value_heads=groups, input_layout=layout, scale=0.2,
        softmax_lse_flag=True,
    )  # fmt: skip
    expected, logarithms = _expect(inputs, [5] * batch, [7] * batch, [None] * batch, 0.2)
    close(out, arrange(expected, answered), dtype)
    assert lse.shape == (batch, 4, 5, 1)
    close(lse.squeeze(-1), logarithms, torch.float32)


def test_defaults(dev: torch.device) -> None:
    """Scale 1, one head, layout BSH, no logarithms, as many key heads as query heads."""
    inputs = _inputs(2, 1, 1, 3, 4)
    out, lse = _run(dev, *(arrange(t, "BSH") for t in inputs))
    close(out, arrange(_expect(inputs, [3] * 2, [4] * 2, [None] * 2, 1.0)[0], "BSH"), HALF)
    assert lse.shape == (0,) and lse.dtype == torch.float32


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 9), (9, 4), (3, 2100)])
@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [(0, EVERYTHING, EVERYTHING), (0, 2, 1), (0, EVERYTHING, 0), (1, 2, 1), (2, 1, 1), (3, 1, 1), (4, 2, 1), (4, 3, -1),
     (4, -1, 2)],
)  # fmt: skip
def test_sparse_modes(dev: torch.device, mode: int, before: int, after: int, queries: int, keys: int) -> None:
    seen = sees(mode, queries, keys, before, after)
    if mode == 1:
        seen = torch.rand(queries, keys) > 0.3
    mask = TRIANGLE if mode > 1 else ~seen
    inputs = _inputs(1, 2, 1, queries, keys)
    options = {"sparse_mode": mode, "pre_tokens": before, "next_tokens": after, "inner_precise": 2 if mode < 2 else 0}
    out, lse = _run(
        dev, *inputs, num_heads=2, num_key_value_heads=1, input_layout="BNSD", scale=0.2, atten_mask=mask,
        softmax_lse_flag=True, **options,
    )  # fmt: skip
    expected, logarithms = _expect(inputs, [queries], [keys], [seen], 0.2)
    close(out, expected, HALF)
    blind = ~seen.any(-1)  # assumed: an infinite logarithm, of either sign in the reference
    close(lse[0, :, ~blind, 0], logarithms[0][:, ~blind], torch.float32)
    assert torch.isinf(lse[0, :, blind]).all()


@pytest.mark.parametrize("shape", [(5, 7), (1, 5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (1, 1, 16, 32), (5, 16)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8])
def test_shapes_of_masks(dev: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Longer masks than the sequences are read in their upper left part."""
    mask = torch.rand(shape) > 0.6
    mask[..., 2] = False
    inputs = _inputs(2, 2, 2, 5, 7)
    out, _ = _run(dev, *inputs, num_heads=2, input_layout="BNSD", scale=0.2, atten_mask=mask.to(dtype))
    seen = (~mask[..., :5, :7]).expand(2, 1, 5, 7)
    close(out, _expect(inputs, [5] * 2, [7] * 2, list(seen), 0.2)[0], HALF)


@pytest.mark.parametrize("mode", [0, 2, 3])
@pytest.mark.parametrize(("given", "used"), [([3, 5], [3, 5]), ([4], [4, 4]), ([2, 0, 9], [2, 0])])
def test_lengths(dev: torch.device, mode: int, given: list[int], used: list[int]) -> None:
    """One for all, or one for each sequence; queries behind them are zero, and the last corner is that of the lengths."""
    lengths = [6, 4]
    inputs = _inputs(2, 4, 2, 5, 7)
    seen = [sees(mode, n, m) if mode else None for n, m in zip(used, lengths, strict=True)]
    out, lse = _run(
        dev, *(arrange(t, "BSH") for t in inputs), num_heads=4, num_key_value_heads=2, scale=0.2, actual_seq_lengths=given,
        actual_seq_lengths_kv=lengths, sparse_mode=mode, softmax_lse_flag=True, **({"atten_mask": TRIANGLE} if mode else {}),
    )  # fmt: skip
    expected, logarithms = _expect(inputs, used, lengths, seen, 0.2)
    close(out, arrange(expected, "BSH"), HALF)
    finite = ~torch.isinf(logarithms)
    close(lse.squeeze(-1)[finite], logarithms[finite], torch.float32)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_one_query(dev: torch.device, layout: str) -> None:
    """Lengths of queries and modes mean nothing to it; a mask is (B, Skv)."""
    inputs = _inputs(2, 4, 2, 1, 9)
    mask = torch.rand(2, 9) > 0.6
    mask[:, 0] = False
    common = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": layout, "scale": 0.2, "actual_seq_lengths_kv": [9, 5]}
    for given in (mask, mask[:, None, None]):
        out, _ = _run(dev, *(arrange(t, layout) for t in inputs), atten_mask=given, **common)
        seen = [~mask[b : b + 1, :n] for b, n in enumerate((9, 5))]
        close(out, arrange(_expect(inputs, [1] * 2, [9, 5], seen, 0.2)[0], layout), HALF)
    for mode in (2, 3):
        options = {"sparse_mode": mode, "atten_mask": TRIANGLE, "actual_seq_lengths": [0]}
        out, _ = _run(dev, *(arrange(t, layout) for t in inputs), **common, **options)
        close(out, arrange(_expect(inputs, [1] * 2, [9, 5], [None] * 2, 0.2)[0], layout), HALF)


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 5, 7), (1, 4, 8, 32)])
def test_bias(dev: torch.device, shape: tuple[int, ...]) -> None:
    inputs, bias = _inputs(2, 4, 2, 5, 7), torch.randn(shape).half()
    out, _ = _run(dev, *inputs, num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale=0.2, pse_shift=bias)
    close(out, _expect(inputs, [5] * 2, [7] * 2, [None] * 2, 0.2, last=bias)[0], HALF)


def test_rows_that_see_nothing(dev: torch.device) -> None:
    """Zeros where the operator is told by inner_precise; and with no key at all."""
    inputs = _inputs(1, 2, 2, 4, 6)
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[1] = True
    common = {"num_heads": 2, "input_layout": "BNSD", "atten_mask": mask}
    for precision in (2, 3):
        out, _ = _run(dev, *inputs, inner_precise=precision, **common)
        assert not out[0, :, 1].any() and out[0, :, 2].any()
    assert _run(dev, *inputs, **common)[0][0, :, 1].any()
    empty = [inputs[0], inputs[1][:, :, :0], inputs[2][:, :, :0]]
    out, _ = _run(dev, *empty, num_heads=2, input_layout="BNSD")
    assert out.shape == (1, 2, 4, 32) and not out.any()


def test_a_prefix_that_all_share(dev: torch.device) -> None:
    inputs, prefix = _inputs(2, 4, 2, 5, 7), _inputs(1, 4, 2, 1, 6)[1:]
    whole = [
        inputs[0],
        *(torch.cat([p[:, :, :4].expand(2, -1, -1, -1), t], 2) for p, t in zip(prefix, inputs[1:], strict=True)),
    ]
    for mode, seen in ((0, None), (3, sees(3, 5, 11))):
        out, _ = _run(
            dev, *inputs, num_heads=4, num_key_value_heads=2, input_layout="BNSD", scale=0.2, key_shared_prefix=prefix[0],
            value_shared_prefix=prefix[1], actual_shared_prefix_len=[4], sparse_mode=mode,
            **({"atten_mask": TRIANGLE} if mode else {}),
        )  # fmt: skip
        close(out, _expect(whole, [5] * 2, [11] * 2, [seen] * 2, 0.2)[0], HALF)


# -- packed sequences, pages, rotated parts -----------------------------------------------------------------------------------


def _lay(tensor: Tensor, layout: str) -> Tensor:
    """From (T, N, D)."""
    return tensor.transpose(0, 1) if layout == "NTD" else tensor


@pytest.mark.parametrize("layout", PACKED)
@pytest.mark.parametrize("mode", [0, 3, 4])
@pytest.mark.parametrize(("groups", "size", "values"), [(2, 128, 128), (4, 64, 64), (2, 192, 128)])
def test_packed_sequences(dev: torch.device, layout: str, mode: int, groups: int, size: int, values: int) -> None:
    given, answered = layout.partition("_")[0], layout.rpartition("_")[2]
    inputs = [torch.randn(n, h, d).half() for n, h, d in ((9, 4, size), (12, groups, size), (12, groups, values))]
    tokens = {"pre_tokens": 2, "next_tokens": 1}
    out, lse = _run(
        dev, *(_lay(t, given) for t in inputs), num_heads=4, num_key_value_heads=groups, input_layout=layout, scale=0.1,
        actual_seq_lengths=[3, 3, 8], actual_seq_lengths_kv=[4, 6, 12], sparse_mode=mode, softmax_lse_flag=True, **tokens,
        **({"atten_mask": TRIANGLE} if mode else {}),
    )  # fmt: skip
    expected, logarithms = torch.zeros(9, 4, values, dtype=torch.double), torch.zeros(9, 4, dtype=torch.double)
    for q, k in ((slice(0, 3), slice(0, 4)), (slice(3, 8), slice(6, 12))):
        seen = sees(mode, q.stop - q.start, k.stop - k.start, 2, 1) if mode else None
        answer = attend(*(t[s].transpose(0, 1) for t, s in zip(inputs, (q, k, k), strict=True)), seen, 0.1)
        expected[q], logarithms[q] = answer.out.transpose(0, 1), answer.lse.T
    close(out, _lay(expected, answered), HALF)
    assert lse.shape == (9, 4, 1)
    close(lse.squeeze(-1), logarithms, torch.float32)


def _paged(tensor: Tensor, size: int, form: str) -> tuple[Tensor, Tensor]:
    """A cache with the tokens of (B, Nkv, S, D) in blocks out of order, and the table."""
    batch, heads, length, width = tensor.shape
    count = -(-length // size)
    table = torch.arange(batch * count).flip(0).view(batch, count).int()
    cache = torch.randn(batch * count + 1, size, heads, width).half()
    for b in range(batch):
        for position in range(length):
            cache[table[b, position // size], position % size] = tensor[b, :, position]
    if form == "tokens first":
        return cache.flatten(2), table
    if form == "heads first":
        return cache.transpose(1, 2).contiguous(), table
    return cache.view(*cache.shape[:3], width // 16, 16).permute(0, 2, 3, 1, 4).contiguous(), table


@pytest.mark.parametrize("form", ["tokens first", "heads first", "the device's own"])
@pytest.mark.parametrize(("layout", "queries", "size"), [("BSH", 1, 16), ("BNSD", 1, 48), ("BNSD", 5, 128), ("BSND", 5, 128)])
def test_pages(dev: torch.device, form: str, layout: str, queries: int, size: int) -> None:
    inputs = _inputs(2, 4, 2, queries, 150)
    (key, table), (value, _) = (_paged(t, size, form) for t in inputs[1:])
    options = {"sparse_mode": 3, "atten_mask": TRIANGLE} if queries > 1 else {}

    def run() -> Tensor:
        return _run(
            dev, arrange(inputs[0], layout), key, value, num_heads=4, num_key_value_heads=2, input_layout=layout, scale=0.2,
            block_table=table, block_size=size, actual_seq_lengths_kv=[150, 97], **options,
        )[0]  # fmt: skip

    if form == "heads first" and layout != "BNSD":
        with pytest.raises(ValueError, match="heads"):
            run()
        return
    seen = [sees(3, queries, n) for n in (150, 97)]
    close(run(), arrange(_expect(inputs, [queries] * 2, [150, 97], seen, 0.2)[0], layout), HALF)


def test_pages_with_packed_queries(dev: torch.device) -> None:
    """As vLLM decodes and prefills: lengths of keys are those of each sequence, and not summed up."""
    inputs = _inputs(2, 4, 2, 5, 40, 128)
    (key, table), (value, _) = (_paged(t, 16, "tokens first") for t in inputs[1:])
    query = torch.cat([inputs[0][0, :, :3], inputs[0][1]], 1).transpose(0, 1)
    out, _ = _run(
        dev, query, key, value, num_heads=4, num_key_value_heads=2, input_layout="TND", scale=0.1, block_table=table,
        block_size=16, actual_seq_lengths=[3, 8], actual_seq_lengths_kv=[40, 21], sparse_mode=3, atten_mask=TRIANGLE,
    )  # fmt: skip
    expected, _ = _expect(inputs, [3, 5], [40, 21], [sees(3, 3, 40), sees(3, 5, 21)], 0.1)
    close(out, torch.cat([expected[0, :, :3], expected[1]], 1).transpose(0, 1), HALF)


@pytest.mark.parametrize("layout", ["BSH", "BNSD", "BNSD_NBSD", "TND"])
@pytest.mark.parametrize(("size", "groups"), [(128, 2), (512, 1)])
@pytest.mark.parametrize("pages", [False, True])
def test_rotated_parts(dev: torch.device, layout: str, size: int, groups: int, pages: bool) -> None:
    """The products of the rotated parts are added to the scores."""
    given, answered = layout.partition("_")[0], layout.rpartition("_")[2]
    query, key, value = _inputs(2, 4, groups, 3, 7, size)
    query_rope, key_rope = _inputs(2, 4, groups, 3, 7, 64)[:2]

    def lay(t: Tensor, to: str = given) -> Tensor:
        return t.transpose(1, 2).flatten(0, 1) if to == "TND" else arrange(t, to)

    options: dict[str, Any] = {}
    keys = [lay(t) for t in (key, value, key_rope)]
    if pages:
        (*keys,), (table, *_) = zip(*(_paged(t, 16, "tokens first") for t in (key, value, key_rope)), strict=True)
        options = {"block_table": table, "block_size": 16, "actual_seq_lengths_kv": [7, 7]}
    if layout == "TND":
        options = {"actual_seq_lengths": [3, 6], "actual_seq_lengths_kv": [7, 7] if pages else [7, 14], **options}
    if pages and layout in ("BSH", "BNSD", "BNSD_NBSD") and size == 128:
        options["sparse_mode"] = 0
    out, _ = _run(
        dev, lay(query), keys[0], keys[1], query_rope=lay(query_rope), key_rope=keys[2], num_heads=4,
        num_key_value_heads=groups, input_layout=layout, scale=0.05, **options,
    )  # fmt: skip
    joined = [torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1), value]
    close(out, lay(_expect(joined, [3] * 2, [7] * 2, [None] * 2, 0.05)[0], answered), HALF)


def test_learnable_sink(dev: torch.device) -> None:
    inputs = [torch.randn(n, 2, 128).bfloat16() for n in (5, 8, 8)]
    sink = torch.randn(2).bfloat16()
    options = {"learnable_sink": sink.to(dev), "actual_seq_qlen": [5], "actual_seq_kvlen": [8], "return_softmax_lse": True}
    out, lse = torch.ops.npu.npu_fused_infer_attention_score_v2(
        *(t.to(dev) for t in inputs), num_query_heads=2, input_layout="TND", softmax_scale=0.1, **options
    )
    expected = attend(*(t.transpose(0, 1) for t in inputs), None, 0.1, sink=sink)
    close(out, expected.out.transpose(0, 1), BF16)
    close(lse.squeeze(-1), expected.lse.T, torch.float32)


def test_answers_in_given_tensors(dev: torch.device) -> None:
    """The form that vLLM captures into graphs: workspace first, then answers into tensors."""
    inputs = [t.to(dev) for t in _inputs(2, 4, 2, 5, 7)]
    options: dict[str, Any] = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "softmax_lse_flag": True}
    expected = torch.ops.npu.npu_fused_infer_attention_score(*inputs, **options)
    renamed = {_RENAMED.get(n, n): v for n, v in options.items()}
    for name, given in (("npu_fused_infer_attention_score", options), ("npu_fused_infer_attention_score_v2", renamed)):
        workspace = getattr(torch.ops.npu, f"_{name}_get_max_workspace")(*inputs, **given)
        out = [torch.full_like(t, 9.0) for t in expected]
        answer = getattr(torch.ops.npu, name).out(*inputs, workspace=workspace, out=out, **given)
        for a, b, c in zip(out, answer, expected, strict=True):
            assert torch.equal(a, c) and torch.equal(b, c)


# -- the older operators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
def test_prompts(dev: torch.device, layout: str) -> None:
    """next_tokens is 0 by default: with a mask nothing to the right is seen."""
    raw = _inputs(2, 4, 2, 5, 7)
    mine = [arrange(t, layout.partition("_")[0]).contiguous().to(dev) for t in raw]
    common = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": layout, "scale_value": 0.2}
    out = torch.ops.npu.npu_prompt_flash_attention(*mine, actual_seq_lengths=[3, 5], actual_seq_lengths_kv=[7, 4], **common)
    answered = layout.rpartition("_")[2]
    close(out, arrange(_expect(raw, [3, 5], [7, 4], [None] * 2, 0.2)[0], answered), HALF)
    mask = torch.zeros(5, 7, dtype=torch.bool, device=dev)
    out = torch.ops.npu.npu_prompt_flash_attention(*mine, atten_mask=mask, **common)
    close(out, arrange(_expect(raw, [5] * 2, [7] * 2, [sees(0, 5, 7, EVERYTHING, 0)] * 2, 0.2)[0], answered), HALF)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_one_more_token(dev: torch.device, layout: str) -> None:
    """actual_seq_lengths are those of the keys."""
    raw = _inputs(2, 4, 2, 1, 40)
    mask = torch.rand(2, 40) > 0.6
    mask[:, 0] = False
    common = {"num_heads": 4, "num_key_value_heads": 2, "input_layout": layout, "scale_value": 0.2}
    query = arrange(raw[0], layout).contiguous().to(dev)
    out = torch.ops.npu.npu_incre_flash_attention(
        query, *(arrange(t, layout).contiguous().to(dev) for t in raw[1:]), atten_mask=mask.to(dev),
        actual_seq_lengths=[40, 17], **common,
    )  # fmt: skip
    close(out, arrange(_expect(raw, [1] * 2, [40, 17], [~mask[:1], ~mask[1:, :17]], 0.2)[0], layout), HALF)
    (key, table), (value, _) = (_paged(t, 16, "tokens first") for t in raw[1:])
    options = {"block_table": table.to(dev), "block_size": 16, "actual_seq_lengths": [40, 17], **common}
    out = torch.ops.npu.npu_incre_flash_attention(query, key.to(dev), value.to(dev), **options)
    close(out, arrange(_expect(raw, [1] * 2, [40, 17], [None] * 2, 0.2)[0], layout), HALF)


# -- shapes, refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", [*DENSE, *PACKED])
def test_shapes_are_those_of_the_wheel(dev: torch.device, layout: str, lse: bool) -> None:
    given = layout.partition("_")[0]
    if layout in PACKED:
        inputs = [_lay(torch.randn(n, h, 128), given).half() for n, h in ((9, 4), (12, 2), (12, 2))]
        options: dict[str, Any] = {"actual_seq_lengths": [3, 9], "actual_seq_lengths_kv": [5, 12]}
    else:
        inputs, options = [arrange(t, given) for t in _inputs(1, 4, 2, 5, 7)], {}
    options |= {"num_heads": 4, "num_key_value_heads": 2, "input_layout": layout, "softmax_lse_flag": lse}
    for name, known in (("npu_fused_infer_attention_score", {}), ("npu_fused_infer_attention_score_v2", _RENAMED)):
        call = getattr(torch.ops.npu, name)
        renamed = {known.get(n, n): v for n, v in options.items()}
        mine, theirs = (call(*(t.contiguous().to(where) for t in inputs), **renamed) for where in (dev, "meta"))
        for a, b in zip(mine, theirs, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


_MASK = torch.zeros(8, 8, dtype=torch.bool)
_TABLE = torch.zeros(1, 1, dtype=torch.int32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"input_layout": "SBH"}, "input_layout='SBH'"),
    "dimensions": ({"input_layout": "BSH"}, "3 dimensions"),
    "groups": ({"num_key_value_heads": 3}, "3 key heads"),
    "heads": ({"num_heads": 4}, "num_heads=4"),
    "mode": ({"sparse_mode": 5}, "sparse_mode=5"),
    "tree": ({"sparse_mode": 9, "atten_mask": _MASK}, "sparse_mode=9"),
    "whole mask missing": ({"sparse_mode": 1}, "sparse_mode=1 without"),
    "compressed mask missing": ({"sparse_mode": 3}, "no atten_mask"),
    "mask that is not compressed": ({"sparse_mode": 3, "atten_mask": _MASK}, r"\(8, 8\)"),
    "mask of another shape": ({"atten_mask": _MASK[:7]}, r"\(7, 8\)"),
    "float mask": ({"atten_mask": _MASK.half()}, "float16"),
    "inner_precise": ({"inner_precise": 4}, "inner_precise=4"),
    "lengths too long": ({"actual_seq_lengths": [9]}, "actual_seq_lengths=\\[9\\]"),
    "key lengths too long": ({"actual_seq_lengths_kv": [9]}, "actual_seq_lengths_kv"),
    "bias": ({"pse_shift": torch.zeros(1, 1, 8, 8).half()}, "pse_shift"),
    "bias of another dtype": ({"pse_shift": torch.zeros(1, 2, 8, 8)}, "float32"),
    "one rope": ({"query_rope": torch.zeros(1, 2, 8, 64).half()}, "both or neither"),
    "one prefix": ({"key_shared_prefix": torch.zeros(1, 2, 8, 32).half()}, "both or neither"),
    "pages without lengths": ({"block_table": _TABLE, "block_size": 128}, "actual_seq_lengths_kv"),
    "block_size": ({"block_table": _TABLE, "block_size": 16, "actual_seq_lengths_kv": [8]}, "block_size=16"),
    "quantised keys": ({"antiquant_scale": torch.zeros(2)}, "antiquant_scale"),
    "quantised answers": ({"quant_scale2": torch.ones(1), "quant_offset2": torch.ones(1)}, "quant_offset2, quant_scale2"),
    "padding on the left": ({"kv_padding_size": torch.zeros(1, dtype=torch.int64)}, "kv_padding_size"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(dev: torch.device, name: str) -> None:
    options, words = REFUSED[name]
    options = {"num_heads": 2, "input_layout": "BNSD", **options}
    options = {n: v.to(dev) if isinstance(v, Tensor) else v for n, v in options.items()}
    with pytest.raises((ValueError, NotImplementedError), match=words):
        torch.ops.npu.npu_fused_infer_attention_score(*(t.to(dev) for t in _inputs(1, 2, 2, 8, 8)), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "actual_seq_lengths"),
        ({"actual_seq_lengths": [8]}, "actual_seq_lengths_kv"),
        ({"actual_seq_lengths": [9], "actual_seq_lengths_kv": [8]}, "cumulative"),
        ({"actual_seq_lengths": [8], "actual_seq_lengths_kv": [4, 8]}, "1 query and 2 key"),
        ({"actual_seq_lengths": [8], "actual_seq_lengths_kv": [8], "atten_mask": _MASK}, "atten_mask"),
        ({"actual_seq_lengths": [8], "actual_seq_lengths_kv": [8], "atten_mask": TRIANGLE, "sparse_mode": 2}, "sparse_mode=2"),
        ({"actual_seq_lengths": [8], "actual_seq_lengths_kv": [8], "pse_shift": torch.zeros(1, 2, 8, 8).half()}, "pse_shift"),
        ({"actual_seq_lengths": [8], "actual_seq_lengths_kv": [8], "size": 32}, "head_dim 32"),
    ],
)
def test_refusals_of_packed_sequences(dev: torch.device, options: dict[str, Any], words: str) -> None:
    given = {n: v.to(dev) if isinstance(v, Tensor) else v for n, v in options.items()}
    size = given.pop("size", 128)
    inputs = [torch.randn(8, 2, size, dtype=HALF, device=dev) for _ in range(3)]
    with pytest.raises(ValueError, match=words):
        torch.ops.npu.npu_fused_infer_attention_score(*inputs, num_heads=2, input_layout="TND", **given)


def test_refusals_of_shapes_and_dtypes(dev: torch.device) -> None:
    def run(*inputs: Tensor, layout: str = "BNSD", **options: Any) -> None:
        heads = options.pop("num_heads", 2)
        moved = {n: v.to(dev) if isinstance(v, Tensor) else v for n, v in options.items()}
        torch.ops.npu.npu_fused_infer_attention_score(
            *(t.to(dev) for t in inputs), num_heads=heads, input_layout=layout, **moved
        )

    query, key, value = _inputs(1, 2, 2, 8, 8)
    with pytest.raises(ValueError, match="float32"):
        run(query.float(), key.float(), value.float())
    with pytest.raises(ValueError, match="int8"):
        run(query, key.to(torch.int8), value.to(torch.int8))
    with pytest.raises(ValueError, match="one shape for both"):
        run(query, key, value[..., :16])
    with pytest.raises(ValueError, match="head_dim 24"):
        run(*_inputs(1, 2, 2, 8, 8, 24))
    with pytest.raises(ValueError, match="head_dim 528"):
        run(*_inputs(1, 2, 2, 8, 8, 528))
    with pytest.raises(ValueError, match="at most 64"):
        run(*_inputs(1, 130, 1, 2, 2, 16), num_heads=130, num_key_value_heads=1)
    with pytest.raises(ValueError, match="BNSD_BSND"):
        run(*_inputs(1, 2, 2, 1, 8), layout="BNSD_BSND")
    with pytest.raises(ValueError, match="up to 16"):
        run(*_inputs(1, 2, 2, 17, 8), layout="BNSD_NBSD")
    with pytest.raises(ValueError, match="inner_precise=2"):
        run(*_inputs(1, 2, 2, 1, 8), inner_precise=2)
    cache, table = torch.zeros(1, 2, 128, 32).half(), torch.tensor([[1]], dtype=torch.int32)
    with pytest.raises(ValueError, match="cache of 1 blocks"):
        run(query, cache, cache, block_table=table, block_size=128, actual_seq_lengths_kv=[8])
    with pytest.raises(ValueError, match="queries of length 1"):
        torch.ops.npu.npu_incre_flash_attention(*(t.to(dev) for t in (query, key, value)), num_heads=2, input_layout="BNSD")
    with pytest.raises(NotImplementedError, match="padding_mask"):
        torch.ops.npu.npu_prompt_flash_attention(
            *(t.to(dev) for t in (query, key, value)), num_heads=2, input_layout="BNSD", padding_mask=_MASK.to(dev)
        )
