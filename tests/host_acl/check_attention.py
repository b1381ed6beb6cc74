"""Which kernel F.scaled_dot_product_attention reaches: what the vendor's compiled code did, and what we predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from portable_ascend import sdpa

HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
BOOL = torch.bool


@dataclass(frozen=True)
class Request:
    """Sizes (batch, heads, length, head_dim), key and value as query unless given; ``fused``: where there are fused kernels."""

    label: str
    fused: bool
    query: tuple[int, ...] = (2, 4, 128, 64)
    key: tuple[int, ...] | None = None
    value: tuple[int, ...] | None = None
    dtype: torch.dtype = HALF
    mask: tuple[int, ...] | None = None
    mask_dtype: torch.dtype = BOOL
    grad: bool = False
    options: dict[str, Any] = field(default_factory=dict)


# Expected outcomes: shared facts on the vendor's ScaledDotProductAttentionKernelNpuOpApi.cpp, read rule by rule.
REQUESTS = [
    Request("plain", True),
    Request("training", True, grad=True),
    Request("bfloat16", True, dtype=BF16),
    Request("float32", True, dtype=FULL),
    Request("float32 training", True, dtype=FULL, grad=True),
    Request("float64", False, dtype=DOUBLE),
    Request("causal", True, options={"is_causal": True}),
    Request("causal training", True, grad=True, options={"is_causal": True}),
    Request("causal float32", True, dtype=FULL, options={"is_causal": True}),
    Request("causal with fewer keys", True, key=(2, 4, 64, 64), options={"is_causal": True}),
    Request("causal with more keys", True, query=(2, 4, 64, 64), key=(2, 4, 128, 64), options={"is_causal": True}),
    Request("boolean mask SS", True, mask=(128, 128)),
    Request("boolean mask 11SS", True, mask=(1, 1, 128, 128)),
    Request("boolean mask B1SS", True, mask=(2, 1, 128, 128)),
    Request("boolean mask BNSS", True, mask=(2, 4, 128, 128)),
    Request("boolean mask 1NSS", True, mask=(1, 4, 128, 128)),
    Request("boolean padding mask B11S", True, mask=(2, 1, 1, 128)),
    Request("boolean mask 1S", True, mask=(1, 128)),
    Request("boolean mask training", True, mask=(128, 128), grad=True),
    Request("float mask", False, mask=(128, 128), mask_dtype=HALF),
    Request("float mask training", False, mask=(128, 128), mask_dtype=HALF, grad=True),
    Request("float mask float32", False, dtype=FULL, mask=(128, 128), mask_dtype=FULL),
    Request("2-D", False, query=(128, 64)),
    Request("3-D", False, query=(4, 128, 64)),
    Request("3-D training", False, query=(4, 128, 64), grad=True),
    Request("5-D", False, query=(1, 2, 4, 128, 64)),
    Request("smaller value", True, value=(2, 4, 128, 32)),
    Request("smaller value training", True, value=(2, 4, 128, 32), grad=True),
    Request("grouped", True, query=(2, 8, 128, 64), key=(2, 2, 128, 64), options={"enable_gqa": True}),
    Request("grouped without the flag", True, query=(2, 8, 128, 64), key=(2, 2, 128, 64)),
    Request("one key head", True, query=(1, 130, 8, 16), key=(1, 1, 8, 16), options={"enable_gqa": True}),
    Request("other lengths", True, key=(2, 4, 64, 64)),
    Request("decoding", True, query=(2, 4, 1, 64), key=(2, 4, 77, 64)),
    Request("decoding with a mask", True, query=(2, 4, 1, 64), key=(2, 4, 77, 64), mask=(1, 77)),
    Request("head_dim 8", True, query=(1, 2, 16, 8)),
    Request("head_dim 30", True, query=(1, 2, 16, 30)),
    Request("head_dim 30 float32", False, query=(1, 2, 16, 30), dtype=FULL),
    Request("head_dim 20 float32", True, query=(1, 2, 16, 20), dtype=FULL),
    Request("value head_dim 30 float32", False, query=(1, 2, 16, 32), value=(1, 2, 16, 30), dtype=FULL),
    Request("head_dim 100", True, query=(1, 2, 16, 100)),
    Request("head_dim 256", True, query=(1, 2, 16, 256)),
    Request("head_dim 512", True, query=(1, 2, 16, 512)),
    Request("head_dim 513", False, query=(1, 2, 16, 513)),
    Request("head_dim 528 float32", False, query=(1, 2, 16, 528), dtype=FULL),
    Request("2048 heads", True, query=(1, 2048, 2, 16)),
    Request("2049 heads", False, query=(1, 2049, 2, 16)),
    Request("dropout", True, grad=True, options={"dropout_p": 0.1}),
    Request("scale", True, options={"scale": 0.3}),
]


def _call(request: Request, dev: torch.device) -> torch.Tensor:
    sizes = (request.query, request.key or request.query, request.value or request.key or request.query)
    inputs = [torch.randn(size).to(request.dtype).to(dev).requires_grad_(request.grad) for size in sizes]
    mask = None
    if request.mask is not None:
        mask = torch.ones(request.mask, dtype=BOOL, device=dev)
        if request.mask_dtype != BOOL:
            mask = torch.zeros(request.mask, dtype=request.mask_dtype, device=dev)
    return F.scaled_dot_product_attention(*inputs, attn_mask=mask, **request.options)


@pytest.fixture(autouse=True)
def lenient(rehearsal: Any) -> Iterator[None]:
    """The path is chosen before CANN meets the tensors: bfloat16 on the first series is noted, and goes on."""
    rehearsal.keep_going()
    yield
    rehearsal.keep_going(False)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.label)
def test_path(dev: torch.device, rehearsal: Any, recorder: Any, request_: Request) -> None:
    soc = rehearsal.profile.family.value
    if request_.label == "grouped without the flag" and not sdpa.has_fused_kernels(soc):
        # PyTorch's math path does not group heads unless it is told to.
        with pytest.raises(RuntimeError, match="must match the size"):
            _call(request_, dev)
        return
    _call(request_, dev)
    ((path, reasons, _, line),) = recorder.attention
    assert path == (sdpa.TRAINING if request_.fused and sdpa.has_fused_kernels(soc) else sdpa.MATH)
    assert (path == sdpa.MATH) == bool(reasons), "each request on the math path has its reason, and no other"
    assert "check_attention.py" in line


def test_the_table_is_large_enough() -> None:
    counts = Counter(request.fused for request in REQUESTS)
    assert len(REQUESTS) >= 40 and counts[False] >= 12


def test_prediction_agrees_on_random_requests(dev: torch.device, rehearsal: Any, recorder: Any) -> None:
    """Requests drawn at random, without gradients, so that the kernel for inference could be reached too."""
    draw = torch.Generator().manual_seed(0)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (1,), generator=draw))]

    soc = rehearsal.profile.family.value
    seen: Counter[str] = Counter()
    for _ in range(300):
        heads, dims = pick(1, 2, 8, 64, 256, 300, 2100), pick(4, 4, 4, 3, 5)
        key_heads = pick(heads, max(heads // 2, 1), 1)
        length, keys = pick(1, 2, 16, 33), pick(7, 16)
        size, lead = pick(8, 16, 30, 64, 512, 528), {3: (), 4: (2,), 5: (1, 2)}[dims]
        dtype = pick(HALF, BF16, FULL)
        kind = pick("none", "none", "boolean", "float", "causal")
        shapes = ((*lead, heads, length, size), *[(*lead, key_heads, keys, size)] * 2)
        mask = {"boolean": torch.ones(length, keys, dtype=BOOL), "float": torch.zeros(length, keys, dtype=dtype)}.get(kind)
        recorder.reset()
        inputs = [torch.randn(shape, generator=draw).to(dtype).to(dev) for shape in shapes]
        try:
            with torch.inference_mode():
                F.scaled_dot_product_attention(
                    *inputs,
                    attn_mask=None if mask is None else mask.to(dev),
                    is_causal=kind == "causal",
                    enable_gqa=key_heads != heads,
                )
        except RuntimeError:  # PyTorch's math path refuses some groupings and dimensions
            continue
        ((path, reasons, _, _),) = recorder.attention
        assert (path == sdpa.MATH) == bool(reasons), (shapes, dtype, kind, reasons)
        seen[path] += 1
    assert seen[sdpa.MATH] > 30 and (seen[sdpa.TRAINING] > 30 or not sdpa.has_fused_kernels(soc))
    assert sdpa.INFERENCE not in seen


def test_values_equal_the_cpu(dev: torch.device, rehearsal: Any) -> None:
    """To the bit where the fused kernel and the CPU's flash kernel serve the same request; within rounding elsewhere."""
    fused = sdpa.has_fused_kernels(rehearsal.profile.family.value)
    mask = torch.rand(130, 130) > 0.3
    mask[5] = False  # a row that sees nothing: zeros
    for dtype in (FULL, BF16, HALF):
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
            here = [torch.randn(2, 4, 130, 64).to(dtype).requires_grad_() for _ in range(3)]
            there = [t.detach().to(dev).requires_grad_() for t in here]
            moved = {n: v.to(dev) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
            out, mine = F.scaled_dot_product_attention(*here, **options), F.scaled_dot_product_attention(*there, **moved)
            grad = torch.randn_like(out)
            out.backward(grad)
            mine.backward(grad.to(dev))
            for a, b in zip((out, *(t.grad for t in here)), (mine, *(t.grad for t in there)), strict=True):
                if fused:
                    assert torch.equal(a, b.cpu())
                else:
                    torch.testing.assert_close(a, b.cpu(), rtol=3e-2, atol=3e-2)


def test_dropout_repeats_with_the_seed(dev: torch.device) -> None:
    inputs = [torch.randn(2, 4, 64, 32, device=dev, requires_grad=True) for _ in range(3)]

    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.npu.manual_seed(seed)
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.3)
        (grad,) = torch.autograd.grad(out.sum(), inputs[2])
        return out.detach().cpu(), grad.cpu()

    first, again, other = run(3), run(3), run(4)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]) and not torch.equal(first[0], other[0])
    # Forward and backward use one mask: the gradient of the values is the column sum of the weights that survived.
    ones = torch.ones_like(inputs[2])
    torch.npu.manual_seed(3)
    rows = F.scaled_dot_product_attention(inputs[0], inputs[1], ones, dropout_p=0.3).detach().cpu()[..., 0]
    torch.testing.assert_close(first[1][..., 0].sum(-1), rows.sum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        (((1, 2, 8, 32), (1, 2, 8, 32), (1, 2, 8, 48)), {}, "head_dim 32, 32, 48"),
        (((1, 2, 8, 32), (1, 2, 8, 32), (1, 2, 8, 32)), {"dropout_p": 1.0}, "keep_prob=0.0"),
    ],
)
def test_what_the_kernel_refuses(dev: torch.device, rehearsal: Any, sizes: Any, options: Any, words: str) -> None:
    """Requests that the vendor's dispatch sends to the fused kernel, whose page does not allow them."""
    if not sdpa.has_fused_kernels(rehearsal.profile.family.value):
        assert F.scaled_dot_product_attention(*(torch.randn(s, device=dev) for s in sizes), **options).shape[-1] in (32, 48)
        return
    with pytest.raises(ValueError, match=words):
        F.scaled_dot_product_attention(*(torch.randn(s, device=dev) for s in sizes), **options)
