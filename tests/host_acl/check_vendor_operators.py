"""The vendor's operators on NPU tensors against float64 formulas; sizes and dtypes against the wheel's own meta kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@pytest.fixture
def ops(rehearsal: Any) -> Any:
    return torch.ops.npu


@dataclass(frozen=True)
class Case:
    """An operator, its float inputs (shapes), what else it takes, and its formula."""

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    formula: Callable[..., Tensor | tuple[Tensor, ...]]
    rest: tuple[Any, ...] = ()
    options: dict[str, Any] | None = None
    grad: bool = True
    outputs: int = 1


def rms(x: Tensor, w: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    dims = tuple(range(x.dim() - w.dim(), x.dim()))
    root = 1 / torch.sqrt((x**2).mean(dims, keepdim=True) + eps)
    return x * root * w, root


def layer(x: Tensor, w: Tensor, b: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(-1, keepdim=True)
    root = 1 / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps)
    return (x - mean) * root * w + b, mean, root


def half(x: Tensor) -> Tensor:
    n = x.shape[-1] // 2
    return torch.cat([-x[..., n:], x[..., :n]], -1)


def pairs(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[..., 0::2], out[..., 1::2] = -x[..., 1::2], x[..., 0::2]
    return out


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    parts = x.reshape(x.shape[0], 2, -1)
    parts = (parts - parts.mean(-1, keepdim=True)) / torch.sqrt(parts.var(-1, unbiased=False, keepdim=True) + 1e-5)
    return parts.reshape(x.shape) * w.view(1, -1, 1, 1) + b.view(1, -1, 1, 1)


CASES = [
    Case("npu_rms_norm", ((3, 5, 8), (8,)), rms, outputs=2),
    Case("npu_rms_norm", ((3, 5, 8), (5, 8)), lambda x, w: rms(x, w, 1e-3), (1e-3,), outputs=2),
    Case("npu_gemma_rms_norm", ((3, 5, 8), (8,)), lambda x, w: rms(x, 1 + w), grad=False, outputs=2),
    # The vendor has no derivative of it.
    Case("npu_add_rms_norm", ((3, 8), (3, 8), (8,)), lambda a, b, w: (*rms(a + b, w), a + b), grad=False, outputs=3),
    Case(
        "npu_add_rms_norm_cast",
        ((3, 8), (3, 8), (8,)),
        lambda a, b, w: (rms(a + b, w)[0], *rms(a + b, w), a + b),
        grad=False,
        outputs=4,
    ),
    Case(
        "npu_add_layer_norm",
        ((3, 8), (3, 8), (8,), (8,)),
        lambda a, c, w, b: (*layer(a + c, w, b), a + c),
        (1e-5, True),
        outputs=4,
    ),
    Case("npu_layer_norm_eval", ((3, 8),), lambda x: layer(x, torch.ones(8), torch.zeros(8))[0], ([8],), grad=False),
    Case(
        "npu_deep_norm",
        ((3, 8), (3, 8), (8,), (8,)),
        lambda x, g, b, w: (lambda y, m, r: (m, r, y))(*layer(0.5 * x + g, w, b, 1e-6)),
        (0.5,),
        outputs=3,
    ),
    Case("npu_rotary_mul", ((2, 3, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8)), lambda x, c, s: c * x + s * half(x)),
    Case(
        "npu_rotary_mul",
        ((2, 4, 3, 8), (2, 4, 1, 8), (2, 4, 1, 8)),
        lambda x, c, s: c * x + s * pairs(x),
        ("interleave",),
    ),
    Case(
        "npu_apply_rotary_pos_emb",
        ((2, 4, 3, 64), (2, 4, 1, 64), (2, 4, 1, 64), (2, 4, 1, 64)),
        lambda q, k, c, s: (c * q + s * half(q), c * k + s * half(k)),
        grad=False,
        outputs=2,
    ),
    Case("npu_swiglu", ((3, 8),), lambda x: x[:, :4] * sigmoid(x[:, :4]) * x[:, 4:]),
    Case("npu_swiglu", ((6, 2, 4),), lambda x: x[:3] * sigmoid(x[:3]) * x[3:], (0,)),
    Case("npu_silu", ((3, 8),), lambda x: x * sigmoid(x)),
    Case("fast_gelu", ((3, 8),), lambda x: x / (1 + torch.exp(-1.702 * x.abs())) * torch.exp(0.851 * (x - x.abs()))),
    Case("npu_fast_gelu", ((3, 8),), lambda x: x / (1 + torch.exp(-1.702 * x.abs())) * torch.exp(0.851 * (x - x.abs()))),
    Case("npu_gelu", ((3, 8),), gelu),
    Case("npu_gelu", ((3, 8),), gelu_tanh, options={"approximate": "tanh"}),
    Case("npu_mish", ((3, 8),), lambda x: x * torch.tanh(torch.log(1 + torch.exp(x)))),
    Case("npu_geglu", ((3, 8),), lambda x: (x[:, :4] * gelu_tanh(x[:, 4:]), gelu_tanh(x[:, 4:])), outputs=2),
    Case("npu_geglu", ((3, 8),), lambda x: (x[:, 4:] * gelu(x[:, :4]), gelu(x[:, :4])), (-1, 0, True), outputs=2),
    Case("npu_gelu_mul", ((3, 8),), lambda x: gelu(x[:, :4]) * x[:, 4:], grad=False),
    Case(
        "npu_group_norm_swish",
        ((2, 4, 3, 2), (4,), (4,)),
        lambda x, w, b: group_norm(x, w, b) * sigmoid(1.5 * group_norm(x, w, b)),
        options={"num_groups": 2, "swish_scale": 1.5},
        outputs=3,
    ),
    Case(
        "npu_confusion_transpose",
        ((2, 3, 4, 6),),
        lambda x: x.permute(0, 2, 1, 3).reshape(2, 4, 18),
        ((0, 2, 1, 3), (2, 4, 18), True),
    ),
    Case(
        "npu_confusion_transpose",
        ((2, 3, 4, 6),),
        lambda x: x.reshape(2, 12, 6).permute(0, 2, 1),
        ((0, 2, 1), (2, 12, 6), False),
    ),
    Case("npu_transpose", ((2, 3, 4),), lambda x: x.permute(2, 0, 1), ((2, 0, 1),), grad=False),
    Case("npu_bmmV2", ((2, 3, 4), (2, 4, 5)), lambda a, b: torch.einsum("bij,bjk->bik", a, b), ([],)),
    Case("npu_linear", ((3, 4), (5, 4), (5,)), lambda x, w, b: torch.einsum("ij,kj->ik", x, w) + b),
    Case("npu_max.dim", ((3, 8),), lambda x: x.amax(1), (1,), outputs=2),
    Case("npu_min.dim", ((3, 8),), lambda x: x.amin(0, True), (0, True), outputs=2),
    Case("npu_pad", ((2, 3),), lambda x: F.pad(x, (1, 2, 0, 1)), ((0, 1, 1, 2),), grad=False),
]  # fmt: skip


def _named(case: Case, tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    options = dict(case.options or {})
    if case.operator == "npu_group_norm_swish":
        x, w, b = tensors
        return (x, options.pop("num_groups"), w, b), options
    return (*tensors, *case.rest), options


def _call(case: Case, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    packet, _, overload = case.operator.partition(".")
    args, options = _named(case, tensors)
    out = getattr(getattr(torch.ops.npu, packet), overload or "default")(*args, **options)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.operator)
def test_values_and_gradients(dev: torch.device, case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(dtype) for shape in case.shapes]
    exact = [t.double().requires_grad_() for t in tensors]
    there = [t.to(dev).requires_grad_(case.grad) for t in tensors]
    right, found = case.formula(*exact), _call(case, there)
    right = right if isinstance(right, tuple) else (right,)
    assert len(found) == case.outputs
    # One rounding of the answer, and float32's own errors.
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for a, b in zip(right, found, strict=False):
        torch.testing.assert_close(b.double().cpu(), a.detach(), rtol=tolerance, atol=tolerance)
    if not case.grad:
        return
    which = next(i for i, out in enumerate(found) if out.requires_grad and i < len(right))
    if case.operator == "npu_deep_norm":
        which = 2
    direction = torch.randn(right[which].shape)
    wanted = torch.autograd.grad(right[which], exact, direction.double(), allow_unused=True)
    got = torch.autograd.grad(found[which], there, direction.to(dev, found[which].dtype), allow_unused=True)
    for a, b, t in zip(wanted, got, tensors, strict=True):
        assert a is not None and b is not None and b.shape == t.shape and b.dtype == dtype
        torch.testing.assert_close(b.double().cpu(), a, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.operator)
def test_sizes_and_dtypes_are_the_wheels(dev: torch.device, case: Case) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.randn(shape).to(dtype) for shape in case.shapes]
        try:
            meta = _call(case, [t.to("meta") for t in tensors])
        except NotImplementedError:
            pytest.skip("the wheel has no meta kernel for it")
        found = _call(case, [t.to(dev) for t in tensors])
        assert [(tuple(m.shape), m.dtype) for m in meta] == [(tuple(f.shape), f.dtype) for f in found]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda o, t: o.npu_rms_norm(t(3, 8), t(7)), r"gamma of shape \(7,\)"),
        (lambda o, t: o.npu_rms_norm(t(3, 8).double(), t(8).double()), "float64"),
        (lambda o, t: o.npu_swiglu(t(3, 7)), "size 7 in dimension -1"),
        (lambda o, t: o.npu_rotary_mul(t(1, 2, 3, 7), t(1, 1, 3, 7), t(1, 1, 3, 7)), "head_dim 7"),
        (lambda o, t: o.npu_rotary_mul(t(1, 2, 3, 8), t(1, 1, 4, 8), t(1, 1, 4, 8)), "broadcast"),
        (lambda o, t: o.npu_rotary_mul(t(1, 2, 3, 8), t(1, 1, 3, 8), t(1, 1, 3, 8), "quarter"), "rotary_mode='quarter'"),
        (lambda o, t: o.npu_geglu(t(3, 8), -1, 2), "approximate=2"),
        (lambda o, t: o.npu_scaled_masked_softmax(t(1, 1, 33, 32), t(1, 1, 33, 32) > 0), "multiples of 32"),
        (lambda o, t: o.npu_cross_entropy_loss(t(2, 3), t(2).long(), None, "mean", -100, 0.0, 0.5), "z loss"),
    ],
)
def test_refusals(ops: Any, dev: torch.device, call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(ops, lambda *shape: torch.ones(shape, device=dev))


# -- softmax and losses --------------------------------------------------------------------------------------------------------


def test_scaled_masked_softmax(ops: Any, dev: torch.device) -> None:
    x, mask = torch.randn(2, 3, 32, 64), torch.rand(2, 1, 32, 64) > 0.6
    exact = x.double().requires_grad_()
    right = torch.softmax((exact * 0.5).masked_fill(mask, float("-inf")), -1)
    there = x.to(dev).requires_grad_()
    out = ops.npu_scaled_masked_softmax(there, mask.to(dev), 0.5)
    torch.testing.assert_close(out.double().cpu(), right, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(x)
    right.backward(grad.double())
    out.backward(grad.to(dev))
    torch.testing.assert_close(there.grad.double().cpu(), exact.grad, rtol=1e-4, atol=1e-6)
    square = torch.randn(1, 1, 32, 32)
    triangle = ops.npu_scaled_masked_softmax(square.to(dev), torch.zeros(1, 1, 32, 32, dtype=torch.bool).to(dev), 1.0, True)
    causal = torch.softmax(square.masked_fill(torch.ones(32, 32).triu(1).bool(), float("-inf")), -1)
    torch.testing.assert_close(triangle.cpu(), causal, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(ops: Any, dev: torch.device, reduction: str) -> None:
    x, target = torch.randn(6, 5), torch.tensor([0, 4, 2, 1, 2, 3])
    exact, there = x.double().requires_grad_(), x.to(dev).requires_grad_()
    right = -torch.log_softmax(exact, -1)[torch.arange(6), target]
    right = {"mean": right.mean(), "sum": right.sum(), "none": right}[reduction]
    loss, log_prob, _, _ = ops.npu_cross_entropy_loss(there, target.to(dev), None, reduction)
    torch.testing.assert_close(loss.double().cpu().view(right.shape), right)
    torch.testing.assert_close(log_prob.double().cpu(), torch.log_softmax(exact, -1), check_dtype=False)
    right.sum().backward()
    loss.sum().backward()
    torch.testing.assert_close(there.grad.double().cpu(), exact.grad, rtol=1e-5, atol=1e-6)


def test_softmax_cross_entropy_with_probabilities(ops: Any, dev: torch.device) -> None:
    x, labels = torch.randn(4, 5), torch.rand(4, 5)
    exact, there = x.double().requires_grad_(), x.to(dev).requires_grad_()
    right = -(labels.double() * torch.log_softmax(exact, -1)).sum(1)
    out = ops.npu_softmax_cross_entropy_with_logits(there, labels.to(dev))
    torch.testing.assert_close(out.double().cpu(), right)
    right.sum().backward()
    out.sum().backward()
    torch.testing.assert_close(there.grad.double().cpu(), exact.grad, rtol=1e-5, atol=1e-6)


# -- dropout -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_npu_dropout", "_dropout_with_byte_mask"])
def test_dropout(ops: Any, dev: torch.device, name: str) -> None:
    x = torch.ones(100, 100, device=dev, requires_grad=True)
    torch.npu.manual_seed(3)  # type: ignore[attr-defined]
    out, mask = getattr(ops, name)(x, 0.3)
    assert mask.dtype == torch.uint8 and mask.numel() == (10_000 if "byte" in name else 1264)
    kept = out.detach().cpu() != 0
    assert abs(kept.double().mean().item() - 0.7) < 5 * (0.3 * 0.7 / 10_000) ** 0.5
    torch.testing.assert_close(out.detach().cpu()[kept], torch.full((int(kept.sum()),), 1 / 0.7))
    out.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), kept / 0.7)  # type: ignore[union-attr]
    torch.npu.manual_seed(3)  # type: ignore[attr-defined]
    assert torch.equal(getattr(ops, name)(x, 0.3)[0].detach().cpu(), out.detach().cpu())


def test_a_mask_that_is_made_and_used(ops: Any, dev: torch.device) -> None:
    x = torch.rand(7, 9, device=dev) + 1
    mask = ops._npu_dropout_gen_mask(x, [7, 9], 0.5, 11, 22)
    assert mask.numel() == 16
    out, same = ops.npu_dropout_do_mask(x, mask, 0.5)
    kept = out.cpu() != 0
    assert torch.equal(same.cpu(), mask.cpu()) and 15 < int(kept.sum()) < 48
    torch.testing.assert_close(out.cpu()[kept], 2 * x.cpu()[kept])
    assert torch.equal(ops._npu_dropout_gen_mask(x, [7, 9], 0.5, 11, 22).cpu(), mask.cpu())
    assert not torch.equal(ops._npu_dropout_gen_mask(x, [7, 9], 0.5, 11, 26).cpu(), mask.cpu())
    with pytest.raises(ValueError, match="one bit for each"):
        ops.npu_dropout_do_mask(torch.ones(200, device=dev), mask, 0.5)


def test_dropout_with_add_softmax(ops: Any, dev: torch.device) -> None:
    x, y = (torch.randn(2, 3, 4, 5) for _ in range(2))
    here = [t.double().requires_grad_() for t in (x, y)]
    there = [t.to(dev).requires_grad_() for t in (x, y)]
    _, softmax, out = ops.npu_dropout_with_add_softmax(*there, 0.5, 0.4, -1)
    right = torch.softmax(here[0] * 0.5 + here[1], -1)
    torch.testing.assert_close(softmax.double().cpu(), right, rtol=1e-5, atol=1e-6)
    kept = (out.detach().cpu() != 0).double()
    dropped = right * kept / 0.6
    torch.testing.assert_close(out.double().cpu(), dropped, rtol=1e-5, atol=1e-6)
    grad = torch.randn(2, 3, 4, 5)
    wanted = torch.autograd.grad(dropped, here, grad.double())
    for a, b in zip(wanted, torch.autograd.grad(out, there, grad.to(dev)), strict=True):
        torch.testing.assert_close(b.double().cpu(), a, rtol=1e-4, atol=1e-6)


# -- optimizers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adam", "adamw", "amsgrad", "maximize"])
def test_fused_steps_are_pytorchs(ops: Any, dev: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    start, decay = torch.randn(5, 3), 0.1 if kind != "adam" else 0.0
    weight = start.double().clone().requires_grad_()
    make = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    options = {} if kind in ("adam", "adamw") else {kind: True}
    opt = make([weight], lr=0.01, weight_decay=decay, **options)
    var, m, v = start.to(dev), torch.zeros(5, 3, device=dev), torch.zeros(5, 3, device=dev)
    greatest = torch.zeros(5, 3, device=dev)
    for number in range(1, 21):
        grad = torch.randn(5, 3) / number
        weight.grad = grad.double()
        opt.step()
        if kind == "adam":
            powers = (0.9**number, 0.999**number)
            # The operator takes epsilon beside the moment that is not corrected, PyTorch beside the corrected one.
            out = ops.npu_apply_adam.out(
                *powers, 0.01, 0.9, 0.999, 1e-8 * (1 - powers[1]) ** 0.5, grad.to(dev), None, None, out=[var, m, v]
            )
        else:
            powers = (0.9 ** (number - 1), 0.999 ** (number - 1))
            flags = (greatest, True, False) if kind == "amsgrad" else (None, False, kind == "maximize")
            out = ops.npu_apply_adam_w.out(*powers, 0.01, decay, 0.9, 0.999, 1e-8, grad.to(dev), *flags, out=[var, m, v])
            if kind == "amsgrad":
                before = greatest.clone()
                greatest = torch.maximum(greatest, v)
                assert number > 1 or not bool(before.any()), "the operator only reads it"
        assert out[0] is var and out[2] is v
    torch.testing.assert_close(var.double().cpu(), weight.detach(), rtol=1e-5, atol=1e-5)  # fmt: skip


def test_bert_adam(ops: Any, dev: torch.device) -> None:
    var, grad = torch.randn(6), torch.randn(6)
    out = [var.to(dev), torch.full((6,), 0.1, device=dev), torch.full((6,), 0.2, device=dev)]
    ops.npu_bert_apply_adam.out(0.01, 0.9, 0.99, 1e-6, grad.to(dev), 1.0, 4.0, 0.05, None, 0, out=out)
    g = grad.double() / 4
    m, v = 0.09 + 0.1 * g, 0.198 + 0.01 * g**2
    torch.testing.assert_close(out[0].double().cpu(), var - 0.01 * (m / (v.sqrt() + 1e-6) + 0.05 * var), check_dtype=False)
    with pytest.raises(NotImplementedError, match="adam_mode=1"):
        ops.npu_bert_apply_adam.out(0.01, 0.9, 0.99, 1e-6, grad.to(dev), 1.0, 4.0, 0.05, None, 1, out=out)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("NpuFusedAdamW", torch.optim.AdamW),
        ("NpuFusedAdam", torch.optim.Adam),
        ("NpuFusedSGD", torch.optim.SGD),
        ("NpuFusedAdadelta", torch.optim.Adadelta),
        ("NpuFusedRMSprop", torch.optim.RMSprop),
    ],
)
def test_the_vendors_fused_optimizers(dev: torch.device, name: str, other: Any) -> None:
    import torch_npu

    def run(device: Any, make: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        opt = make(model.parameters(), lr=0.01)
        for number in range(20):
            x = torch.linspace(-1, 1, 24).view(4, 6).roll(number, 0).to(device)
            opt.zero_grad()
            (model(x) - 1).square().mean().backward()
            opt.step()
        return [p.detach().cpu() for p in model.parameters()]

    for a, b in zip(run("cpu", other), run(dev, getattr(torch_npu.optim, name)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


def test_finite_checks(ops: Any, dev: torch.device) -> None:
    good, bad = torch.ones(3, device=dev), torch.tensor([1.0, float("inf")], device=dev)
    assert ops._amp_foreach_non_finite_check([good, good]) is False
    assert ops._amp_foreach_non_finite_check([good, bad]) is True
    assert ops.npu_get_float_status(ops.npu_alloc_float_status(good)).tolist() == [0] * 8


def test_scatter_nd_update(ops: Any, dev: torch.device) -> None:
    x, index, new = torch.zeros(4, 2), torch.tensor([[1], [3]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out = ops.npu_scatter_nd_update(x.to(dev), index.to(dev), new.to(dev))
    assert out.tolist() == [[0, 0], [1, 2], [0, 0], [3, 4]]
    there = x.to(dev)
    assert ops.npu_scatter_nd_update_(there, index.to(dev), new.to(dev)) is there and there.tolist() == out.tolist()
