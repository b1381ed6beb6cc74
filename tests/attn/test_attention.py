"""pt.attention: paths in sessions of their own, PyTorch's choice against ours, explanations, masks, and what is refused."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import portable as pt
from portable.attn import blockwise, building, canonical, kept, policy, select

HERE = Path(__file__).parent
VENDOR = HERE.parents[1] / ".vendor"
SESSIONS = {
    "cpu": {"PORTABLE_BACKEND": "cpu"},
    "ascend": {"PORTABLE_BACKEND": "ascend", "PORTABLE_ASCEND_HOST": f"910B2,path={VENDOR}"},
    "ascend 910A": {"PORTABLE_BACKEND": "ascend", "PORTABLE_ASCEND_HOST": f"910A,path={VENDOR}"},
    "neuron": {"PORTABLE_BACKEND": "neuron", "PORTABLE_NEURON_EMULATED": "1"},
}
SWITCHES = ("PORTABLE_BACKEND", "PORTABLE_ASCEND_HOST", "PORTABLE_NEURON_EMULATED")


@pytest.mark.parametrize("session", SESSIONS)
def test_session(session: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    environment |= {"OMP_NUM_THREADS": "1", **SESSIONS[session]}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "check_paths.py")]
    if session == "ascend 910A":
        command += ["-k", "forms or float32"]  # it has no bfloat16
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture(autouse=True)
def _cpu(on_cpu: Any) -> None:
    """The CPU is in use."""


_FLASH = int(torch._C._SDPBackend.FLASH_ATTENTION)  # type: ignore[attr-defined, call-overload]


@pytest.mark.parametrize("dims", [3, 4])
def test_the_rules_are_pytorchs_own(dims: int) -> None:
    """Whether the flash kernel takes a call unchanged: our table against what PyTorch decides, over all combinations."""
    count = 0
    for dtype, dropout, strided, value_dim, kind, heads in itertools.product(
        (torch.float32, torch.bfloat16, torch.float64),
        (0.0, 0.1),
        (False, True),
        (8, 16),
        ("none", "causal", "bool", "float"),
        (2, 4),
    ):
        lead = () if dims == 3 else (2,)
        query, key, value = (torch.randn(*lead, n, 12, d).to(dtype) for n, d in ((4, 16), (heads, 16), (heads, value_dim)))
        if strided:
            query = query.transpose(-1, -2).contiguous().transpose(-1, -2)
        mask = {"bool": torch.rand(12, 12) > 0.3, "float": torch.randn(12, 12).to(dtype)}.get(kind)
        causal = kind == "causal"
        if dims == 3 and heads != 4:
            continue
        theirs = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=heads != 4) == _FLASH  # type: ignore[misc, arg-type]
        given: Any = pt.Causal() if causal else mask
        found = pt.explain_attention(query, key, value, mask=given, dropout_p=dropout)
        flash = found.verdicts[0]
        unchanged = not flash.reasons and not flash.adaptations
        assert unchanged == theirs, (dtype, dropout, strided, value_dim, kind, heads, dims, flash)
        count += 1
    assert count > 90


def test_it_never_ends_on_math_here() -> None:
    for options in ({"dropout_p": 0.1}, {"mask": torch.randn(12, 12).requires_grad_()}, {"return_lse": True}, {}):
        query, key, value = torch.randn(2, 4, 12, 16), torch.randn(2, 4, 12, 16), torch.randn(2, 4, 12, 8)
        chosen = pt.explain_attention(query, key, value, **options).chosen
        assert chosen is not None and chosen.path in ("flash", "blockwise")


@pytest.mark.parametrize("mask", [None, "causal", "window", "padding", "alibi", "dense"])
def test_the_graph_stays_whole(mask: str | None) -> None:
    given = {
        "causal": pt.Causal(),
        "window": pt.SlidingWindow(4),
        "padding": pt.Padding([12, 5]),
        "alibi": pt.ALiBi(pt.alibi_slopes(4)),
        "dense": torch.rand(12, 12) > 0.3,
    }.get(mask or "")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return pt.attention(q, k, v, mask=given)

    tensors = [torch.randn(2, 4, 12, 16, requires_grad=True) for _ in range(3)]
    right = call(*tensors)
    out = torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors)
    torch.testing.assert_close(out, right)
    grad = torch.randn_like(right)
    for a, b in zip(torch.autograd.grad(out, tensors, grad), torch.autograd.grad(right, tensors, grad), strict=True):
        torch.testing.assert_close(a, b)


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    code = """
import torch, portable as pt
query = torch.randn(1, 2, 16, 8)
call = torch.compile(lambda q: pt.attention(q, q, q, mask=pt.Causal()), fullgraph=True, backend="eager")
right = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
torch.testing.assert_close(call(query), right)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_gradcheck_of_the_blockwise_path() -> None:
    tensors = [torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7)]
    bias = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)

    def plain(q: Any, k: Any, v: Any, b: Any) -> Any:
        return pt.attention(q, k, v, mask=pt.CausalBottomRight() & b, path="blockwise", return_lse=True)

    def dropped(q: Any, k: Any, v: Any) -> Any:
        torch.manual_seed(1)
        return pt.attention(q, k, v, dropout_p=0.4, path="blockwise")

    assert torch.autograd.gradcheck(plain, (*tensors, bias))
    assert torch.autograd.gradcheck(dropped, tensors)


def test_blocks_of_every_size_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(3, h, n, 8, dtype=torch.float64) for h, n in ((4, 50), (2, 70), (2, 70))]
    masks = [None, pt.Causal(), pt.SlidingWindow(9, 3), pt.Padding([70, 3, 0]) & pt.CausalBottomRight()]
    right = [pt.attention(*tensors, mask=m, path="blockwise") for m in masks]  # type: ignore[arg-type]
    for scores, rows in ((1, 1), (100, 4), (5000, 7), (10**9, 10**9)):
        monkeypatch.setattr(blockwise, "SCORES", scores)
        monkeypatch.setattr(blockwise, "ROWS", rows)
        for mask, expected in zip(masks, right, strict=True):
            torch.testing.assert_close(pt.attention(*tensors, mask=mask, path="blockwise"), expected)  # type: ignore[arg-type]


# -- masks ---------------------------------------------------------------------------------------------------------------------


def test_a_tensor_that_is_causal_is_recognised_once_for_each_version() -> None:
    mask = torch.ones(12, 12).tril().bool()
    query = torch.randn(1, 2, 12, 8)
    assert pt.explain_attention(query, query, query, mask=mask).request.mask.causal
    mask[3, 0] = False
    assert not pt.explain_attention(query, query, query, mask=mask).request.mask.causal
    out = pt.attention(query, query, query, mask=mask)
    right = torch.nn.functional.scaled_dot_product_attention(query, query, query, mask)
    torch.testing.assert_close(out, right)


def test_caches_are_bounded() -> None:
    for size in range(2, 200):
        mask = torch.ones(size, size).tril().bool()
        building.canonical(mask, 1, 1, size, size)
    assert len(kept._entries) <= kept.ENTRIES
    for size in range(1000, 1020):
        canonical.boolean(building.canonical(pt.SlidingWindow(3), 1, 1, 8 * size, 8 * size), torch.device("cpu"))
    assert 0 < kept.held() <= kept.BYTES
    kept.forget()
    assert kept.held() == 0
    gc.collect()


def test_alibi_slopes_are_the_papers() -> None:
    assert pt.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert pt.alibi_slopes(12)[8:].tolist() == pytest.approx([2 ** (-0.5), 2 ** (-1.5), 2 ** (-2.5), 2 ** (-3.5)])


Q = torch.zeros(2, 4, 6, 8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pt.attention(Q, Q.double(), Q), "dtypes float32, float64, float32"),
        (lambda: pt.attention(Q.int(), Q.int(), Q.int()), "float64, float32, float16 and bfloat16"),
        (lambda: pt.attention(Q, Q[0], Q), "4 dimensions"),
        (lambda: pt.attention(Q[0, 0], Q[0, 0], Q[0, 0]), "4 dimensions"),
        (lambda: pt.attention(Q, Q[..., :4], Q), "one head_dim"),
        (lambda: pt.attention(Q, Q, Q[:, :, :3]), "one length"),
        (lambda: pt.attention(Q, Q[:1], Q[:1]), "one batch size"),
        (lambda: pt.attention(Q, Q[:, :3], Q[:, :3]), "4 query heads and 3 key heads"),
        (lambda: pt.attention(Q, Q[:, :2], Q[:, :2], enable_gqa=False), "enable_gqa=False"),
        (lambda: pt.attention(Q, Q.to("meta"), Q), "one device"),
        (lambda: pt.attention(Q, Q, Q, dropout_p=1.5), "dropout_p=1.5"),
        (lambda: pt.attention(Q, Q, Q, scale=float("nan")), "scale=nan"),
        (lambda: pt.attention(Q, Q, Q, layout="sbhd"), "layout='sbhd'"),  # type: ignore[arg-type]
        (
            lambda: pt.attention(Q, Q, Q, path="flash3"),
            "'flash3' was asked for, but the cpu backend has flash, blockwise, math",
        ),
        (lambda: pt.attention(Q, Q, Q, path="flash", dropout_p=0.1), "dropout 0.1 is not in the kernel"),
        (lambda: pt.attention(Q, Q, Q, mask="causal"), "mask='causal' was given"),  # type: ignore[arg-type]
        (lambda: pt.attention(Q, Q, Q, mask=torch.ones(5, 6).bool()), r"shape \(5, 6\)"),
        (lambda: pt.attention(Q, Q, Q, mask=torch.ones(6, 6).int()), "dtype int32"),
        (lambda: pt.attention(Q, Q, Q, mask=pt.Padding([1, 2, 3])), "batch of 2"),
        (lambda: pt.attention(Q, Q, Q, mask=pt.Document([0, 1])), "ids"),
        (lambda: pt.attention(Q, Q, Q, mask=pt.ALiBi(torch.ones(3))), "slopes"),
        (lambda: pt.attention(Q, Q, Q, mask=pt.PrefixLM(1) & pt.PrefixLM(2)), "given twice"),
        (lambda: pt.SlidingWindow(-1), "left=-1"),
        (lambda: pt.Padding(torch.ones(2)), "Padding was given lengths"),
        (lambda: pt.PrefixLM(-2), "n=-2"),
        (lambda: pt.ALiBi(torch.ones(2).int()), "slopes"),
        (lambda: pt.alibi_slopes(0), "0 heads"),
    ],
)
def test_bad_calls_are_one_clear_error(call: Any, words: str) -> None:
    with pytest.raises(pt.ConfigurationError, match=words):
        call()


# -- math is not silent --------------------------------------------------------------------------------------------------------


def test_math_warns_once_for_each_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from portable import selection
    from portable.attn import common

    backend = selection.find("cpu")
    monkeypatch.setattr(type(backend), "attention_paths", lambda self, request: (common.MATH,))
    monkeypatch.setattr(policy, "_seen", set())
    select.forget()
    with caplog.at_level(logging.WARNING, logger="portable"):
        for _ in range(3):
            pt.attention(Q, Q, Q)
    (record,) = caplog.records
    assert "math path" in record.message and "test_attention.py" in record.message
    before = pt.attention_policy("error")
    try:
        with pytest.raises(pt.ConfigurationError, match="attention_policy"):
            pt.attention(Q, Q, Q)
    finally:
        pt.attention_policy(before)
        select.forget()
    with pytest.raises(pt.ConfigurationError, match="'loud'"):
        pt.attention_policy("loud")  # type: ignore[arg-type]


# -- explanations without the device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "chosen", "words"),
    [
        (("--mask", "causal"), "flash", ""),
        (("--mask", "causal", "--dropout", "0.1"), "blockwise", "dropout 0.1"),
        (("--backend", "ascend", "--generation", "Ascend910B2", "--mask", "causal"), "fused_infer", ""),
        (("--backend", "ascend", "--generation", "Ascend910B2", "--mask", "causal", "--train"), "fusion_attention", "backward"),
        (("--backend", "ascend", "--generation", "Ascend910A", "--mask", "causal"), "blockwise", "no fused attention kernel"),
        (("--backend", "ascend", "--generation", "Ascend910B2", "--mask", "additive"), "fusion_attention", "not boolean"),
        (("--backend", "neuron", "--generation", "trn2", "--mask", "causal", "--shape", "1,8,2000,64"), "nki_flash", "2048"),
        (("--backend", "neuron", "--generation", "trn2", "--mask", "padding"), "blockwise", "closes its gate"),
        (("--backend", "cuda", "--generation", "8.0", "--mask", "causal"), "flash", "older than sm_90"),
        (("--backend", "cuda", "--generation", "8.0", "--mask", "boolean"), "efficient", "guard empty rows"),
        (("--backend", "cuda", "--generation", "7.5", "--dtype", "fp16", "--mask", "causal"), "efficient", "older than sm_80"),
    ],
)
def test_explain_command(options: tuple[str, ...], chosen: str, words: str) -> None:
    from typer.testing import CliRunner

    from portable.cli import app

    done = CliRunner().invoke(app, ["explain", "attention", "--json", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [v["path"] for v in found["verdicts"] if v["chosen"]] == [chosen]
    assert words in done.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--shape", "1,2,3"), "four sizes"),
        (("--shape", "a,b,c,d"), "four numbers"),
        (("--dtype", "fp8"), "dtype 'fp8'"),
        (("--mask", "diagonal"), "mask 'diagonal'"),
        (("--backend", "cuda", "--generation", "12.7"), "generation '12.7'"),
        (("--backend", "tpu"), "'tpu'"),
    ],
)
def test_explain_refuses(options: tuple[str, ...], words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "portable", "explain", "attention", *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_module_trains_with_it() -> None:
    """Ten steps of a small attention layer equal those with PyTorch's own function."""

    class Layer(nn.Module):
        def __init__(self, own: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.qkv, self.own = nn.Linear(16, 48), own

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).view(2, 10, 3, 4, 4).permute(2, 0, 3, 1, 4)
            if self.own:
                return pt.attention(q, k, v, mask=pt.Causal())
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    losses = []
    for own in (True, False):
        layer = Layer(own)
        opt = torch.optim.SGD(layer.parameters(), lr=0.5)
        x = torch.linspace(-1, 1, 320).view(2, 10, 16)
        losses.append([])
        for _ in range(10):
            opt.zero_grad()
            loss = (layer(x) - 1).square().mean()
            loss.backward()
            opt.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
