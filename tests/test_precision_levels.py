"""Precision levels: what they turn, and that everything is taken back exactly, in whatever order."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import fakes
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from portable_cpu.facts import GENERATIONS as CPUS
from portable_cuda.backend import CudaBackend

import portable as pt
from portable import fp32_settings as tree
from portable import levels
from portable.switches import LEVELS

pytestmark = pytest.mark.usefixtures("on_cpu", "clean")

NODES = (tree._ROOT, *tree._PARENTS, *tree._LEAVES)
C: Any = torch._C


def reset() -> None:
    while levels._open:  # an example that failed
        levels.leave(levels._open[-1])
    torch.set_float32_matmul_precision("highest")
    for node in NODES:
        tree.write(node, "none")
    torch.backends.cudnn.allow_tf32 = True


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    left = levels.in_force()
    while levels._open:
        levels.leave(levels._open[-1])
    reset()
    assert left is None, "a test left a level set"


def fingerprint() -> Any:
    """Everything that can be seen of the tree: what is in force at each node under every choice of the nodes above, and the
    older field. Two trees that agree in this behave alike whatever the program does next."""
    own = dict.fromkeys((tree._ROOT, *tree._PARENTS))
    own[tree._ROOT] = tree.read(tree._ROOT)
    tree.write(tree._ROOT, "none")
    for node in tree._PARENTS:
        own[node] = tree.read(node)
    seen = []
    for root, parent in itertools.product(("none", "ieee", "tf32"), repeat=2):
        tree.write(tree._ROOT, root)
        for node in tree._PARENTS:
            tree.write(node, parent)
        seen.append(tuple(tree.read(node) for node in NODES))
    for node, value in own.items():
        tree.write(node, value)
    try:
        older = C._get_float32_matmul_precision()
    except RuntimeError:
        older = "mixed"
    return own, seen, older


def now() -> dict[Any, str]:
    return {node: tree.read(node) for node in NODES}


_SETTINGS = st.one_of(
    st.tuples(st.just("node"), st.sampled_from(NODES), st.sampled_from(("none", "ieee", "tf32"))),
    st.tuples(st.just("node"), st.sampled_from([n for n in NODES if n[0] != "cuda"]), st.just("bf16")),
    st.tuples(st.just("older"), st.just(""), st.sampled_from(("highest", "high", "medium"))),
    st.tuples(st.just("allow"), st.just(""), st.sampled_from((True, False))),
)
HYPOTHESIS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _set(kind: str, node: Any, value: Any) -> None:
    if kind == "node":
        tree.write(node, value)
    elif kind == "older":
        torch.set_float32_matmul_precision(value)
    else:
        torch.backends.cuda.matmul.allow_tf32 = value


@HYPOTHESIS
@given(st.lists(_SETTINGS, max_size=5), st.sampled_from(LEVELS), st.lists(_SETTINGS, max_size=2))
def test_whatever_was_set_comes_back(before: list[Any], level: Any, inside: list[Any]) -> None:
    reset()
    for setting in before:
        _set(*setting)
    visible = now()
    was = fingerprint()
    with pt.precision(level):
        if level == "strict":
            assert set(now().values()) == {"ieee"}
        # What Dynamo's guards and Inductor ask for may not raise under a level.
        assert C._get_float32_matmul_precision() == ("high" if level == "fast" else "highest")
        assert C._get_cublas_allow_tf32() is (level == "fast")
        for setting in inside:
            _set(*setting)
    assert now() == visible
    if not inside:
        assert fingerprint() == was


@HYPOTHESIS
@given(st.lists(_SETTINGS, max_size=4), st.lists(st.sampled_from(LEVELS), min_size=2, max_size=4), st.randoms())
def test_blocks_end_in_any_order(before: list[Any], asked: list[Any], random: Any) -> None:
    reset()
    for setting in before:
        _set(*setting)
    was = fingerprint()
    opened = []
    for level in asked:
        block = pt.precision(level)
        block.__enter__()
        opened.append((level, block))
    while opened:
        level, block = opened.pop(random.randrange(len(opened)))
        block.__exit__(None, None, None)
        assert levels.in_force() == (opened[-1][0] if opened else None)
        if opened and opened[-1][0] == "strict":
            assert set(now().values()) == {"ieee"}
        elif opened:
            assert C._get_cublas_allow_tf32() is (opened[-1][0] == "fast")
    assert fingerprint() == was


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    kept = {key: value for key, value in os.environ.items() if key not in (levels.VARIABLE, "ONEDNN_DEFAULT_FPMATH_MODE")}
    env = {**kept, "PORTABLE_BACKEND": "cpu", **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_the_start_value_of_cudnns_nodes_survives() -> None:
    """No setter takes it: written back as what it reads, a later torch.backends.fp32_precision = "ieee" would not reach it."""
    done = run(
        """
import torch, portable as pt
read = torch._C._get_fp32_precision_getter
def under(value):
    torch.backends.fp32_precision = value
    found = [read("cuda", op) for op in ("conv", "rnn")]
    torch.backends.fp32_precision = "none"
    return found
start = [read("cuda", "conv"), under("ieee"), torch.backends.cudnn.allow_tf32]
for level in ("strict", "default", "fast"):
    with pt.precision(level), pt.precision("strict"):
        pass
    assert [read("cuda", "conv"), under("ieee"), torch.backends.cudnn.allow_tf32] == start, level
print(start)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['tf32', ['ieee', 'ieee'], True]"


def test_sixteen_bit_sums(on_cpu: Any) -> None:
    """The GPU's flags exist in every build of PyTorch; (allowed, split-K) comes back whole."""
    C._set_cublas_allow_bf16_reduced_precision_reduction(False, False)
    C._set_cublas_allow_fp16_accumulation(True)
    C._set_math_sdp_allow_fp16_bf16_reduction(True)

    def flags() -> list[Any]:
        return [
            C._get_cublas_allow_bf16_reduced_precision_reduction(),
            C._get_cublas_allow_fp16_reduced_precision_reduction(),
            C._get_cublas_allow_fp16_accumulation(),
            C._get_math_sdp_allow_fp16_bf16_reduction(),
        ]

    try:
        start = flags()
        assert start == [(False, False), (True, True), True, True]
        entry = levels.enter("strict", CudaBackend())  # its generation is not asked: there is no GPU here
        assert flags() == [(False, False), (False, True), False, False]
        inner = levels.enter("default", CudaBackend())
        assert flags() == [(True, True), (True, True), False, False]
        levels.leave(inner)
        levels.leave(entry)
        assert flags() == start
    finally:
        C._set_cublas_allow_bf16_reduced_precision_reduction(True, True)
        C._set_cublas_allow_fp16_accumulation(False)
        C._set_math_sdp_allow_fp16_bf16_reduction(False)


def test_an_error_while_a_level_is_set_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(levels.Control):
        key = "broken"

        def apply(self, level: Any, ask: Any) -> Any:
            raise OSError("no device")

    backend = pt.active()
    torch.set_float32_matmul_precision("high")
    was = fingerprint()
    working = backend.precision_controls()
    monkeypatch.setattr(type(backend), "precision_controls", lambda self: (*working, Broken()))
    with pytest.raises(OSError, match="no device"):
        pt.precision("strict").keep()
    assert fingerprint() == was and levels.in_force() is None


def test_threads() -> None:
    """Strict blocks in other threads come and go; a thread inside one never sees anything less."""
    torch.set_float32_matmul_precision("medium")
    was = fingerprint()
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(60):
            with pt.precision("strict"):
                for node in NODES:
                    if tree.read(node) != "ieee":
                        wrong.append((node, tree.read(node)))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong and fingerprint() == was


# -- ways of using a level ----------------------------------------------------------------------------------------------------


def test_decorators() -> None:
    @pt.precision("strict")
    def function(x: int) -> Any:
        """Doc."""
        return x, levels.in_force()

    @pt.precision("strict")
    def generator() -> Iterator[Any]:
        yield levels.in_force()
        yield levels.in_force()

    @pt.precision("fast")
    async def coroutine() -> Any:
        await asyncio.sleep(0)
        return levels.in_force()

    assert function.__doc__ == "Doc." and function(2) == (2, "strict")
    running = generator()
    assert next(running) == "strict" and levels.in_force() is None and next(running) == "strict"
    assert asyncio.run(coroutine()) == "fast" and levels.in_force() is None
    with pytest.raises(pt.ConfigurationError, match=r"not a function\. Decorate"):
        pt.precision("strict")(dict)
    with pytest.raises(pt.ConfigurationError, match="asynchronous generator"):

        @pt.precision("strict")
        async def values() -> Any:
            yield 1


def test_one_object_for_several_blocks() -> None:
    strict = pt.precision("strict")
    with strict, strict:
        assert levels.in_force() == "strict"
    with strict:
        assert set(now().values()) == {"ieee"}
    assert levels.in_force() is None and repr(strict) == "precision('strict')"


def test_a_level_that_is_not_used_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="portable")
    pt.precision("strict")
    gc.collect()
    assert [r.getMessage() for r in caplog.records] == [
        "pt.precision('strict') changed nothing: use it in a with statement, as a decorator, or call its keep()."
    ]


def test_keep_lasts() -> None:
    code = """
import torch, portable as pt
pt.precision("strict").keep()
torch.set_float32_matmul_precision
with pt.precision("fast"):
    assert pt.precision().level == "fast"
print(pt.precision().level, torch._C._get_fp32_precision_getter("cuda", "conv"))
"""
    assert run(code).stdout.split() == ["strict", "ieee"]


def test_a_compiled_function_under_a_level() -> None:
    torch.compiler.reset()
    x = torch.randn(4, 4)
    function = torch.compile(lambda x: x @ x, backend="eager", fullgraph=True)
    right = x @ x
    for level in LEVELS:
        with pt.precision(level):
            assert torch.equal(function(x), right)


def test_a_level_inside_a_compiled_function() -> None:
    """It is in force at each run, whether Dynamo traces what stands inside or not, and not for the rest of the function."""
    torch.compiler.reset()
    seen: list[Any] = []

    def watch() -> None:
        seen.append(levels.in_force())

    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        with pt.precision("strict"):
            torch._dynamo.disable(watch)()
            y = y @ x
        torch._dynamo.disable(watch)()
        return y * 2

    for _ in range(3):
        assert torch.equal(function(torch.ones(2, 2)), torch.full((2, 2), 8.0))
    assert seen == ["strict", None] * 3


# -- bad input -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["nonsense", "", 3, True, ("strict",)])
def test_unknown_levels(bad: Any) -> None:
    with pytest.raises(pt.ConfigurationError, match="Use one of 'strict', 'default', 'fast'"):
        pt.precision(bad)


def test_a_level_is_for_the_active_backend() -> None:
    with pytest.raises(pt.ConfigurationError, match="leave the level out to describe another one"):
        pt.precision("strict", backend="cuda")  # type: ignore[call-overload]
    assert pt.precision(" STRICT ").level == "strict"  # type: ignore[call-overload]
    pt.precision("strict")._used = True


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "tpu"}, pt.BackendNotFound, "'tpu' was asked for by pt.precision"),
        ({"backend": "cuda"}, pt.ConfigurationError, "no such device is here.*Name a generation: sm_70"),
        (
            {"backend": "cuda", "generation": "9.9"},
            pt.ConfigurationError,
            "'9.9' was asked for, but the cuda backend knows",
        ),
        ({"backend": "ascend", "generation": "H100"}, pt.ConfigurationError, "knows Ascend910A"),
        ({"backend": "neuron", "generation": ""}, pt.ConfigurationError, "knows trn1"),
        ({"generation": 7.5}, pt.ConfigurationError, "is a float, not a name"),
        ({"index": 1}, pt.ConfigurationError, "device 1 was asked for; there are 1"),
    ],
)
def test_unknown_backends_and_generations(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        pt.precision(**arguments)


@pytest.mark.parametrize(
    ("backend", "asked", "name"),
    [
        ("cuda", "7.5", "sm_75"), ("cuda", "sm_90", "sm_90"), ("gpu", "NVIDIA H200", "H200"), ("cuda", "t4", "T4"),
        ("cuda", "GFX942", "gfx942"), ("ascend", "910B2", "Ascend910B2"), ("npu", "Ascend910_9391", "Ascend910C"),
        ("ascend", "Huawei Ascend 910A", "Ascend910A"), ("neuron", "TRN2", "trn2"), ("cpu", "amx", "amx"),
    ],
)  # fmt: skip
def test_what_people_call_a_generation(backend: str, asked: str, name: str) -> None:
    assert pt.precision(backend=backend, generation=asked).generation == name


# -- the environment ----------------------------------------------------------------------------------------------------------

SHOW = "import portable as pt; pt.use('cpu'); f = pt.precision(); print(f.level, f.switches[0].value)"


def test_the_variable() -> None:
    assert run(SHOW, PORTABLE_PRECISION=" Strict ").stdout.split() == ["strict", "ieee"]
    assert run(SHOW, PORTABLE_PRECISION="fast").stdout.split() == ["fast", "tf32"]
    assert run(SHOW, PORTABLE_PRECISION="").stdout.split() == ["None", "none"]
    wrong = run(SHOW, PORTABLE_PRECISION="nonsense")
    assert wrong.returncode == 1
    message = wrong.stderr.strip().splitlines()[-1]
    assert "the environment variable PORTABLE_PRECISION asks for the precision level 'nonsense'. Use one of 'strict'" in message


def test_the_variable_follows_the_choice_of_backend(monkeypatch: pytest.MonkeyPatch, plugged: Any) -> None:
    plugged(fakes.Fake(fakes.spec("plain", device_type="cpu"), count=1, generation=fakes.generation()))
    monkeypatch.setenv(levels.VARIABLE, "strict")
    was = fingerprint()
    with pt.use("cpu"):
        assert set(now().values()) == {"ieee"}
        with pt.use("plain"):
            assert set(now().values()) == {"ieee"} and len(levels._open) == 1
        monkeypatch.setenv(levels.VARIABLE, "wrong")
        with pytest.raises(pt.ConfigurationError, match="'wrong'"):
            pt.use("plain")
        assert pt.active().spec.name == "cpu" and levels.in_force() == "strict"
        monkeypatch.delenv(levels.VARIABLE)
    assert fingerprint() == was and levels.in_force() is None


@pytest.mark.parametrize("variable", ["ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"])
def test_what_was_fixed_at_the_start_rules_strict_out(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "BF16")
    was = fingerprint()
    monkeypatch.setattr(type(pt.active()), "generation", lambda self, index=0: CPUS["avx2"])
    with pt.precision("strict"):  # nothing there that could round
        assert pt.precision().matmul_bits == 24
    monkeypatch.setattr(type(pt.active()), "generation", lambda self, index=0: CPUS["amx"])
    assert (pt.precision().matmul_bits, pt.precision().conv_bits) == (8, 8)
    with pytest.raises(pt.ConfigurationError, match=f"'strict' cannot be had: {variable}='BF16'.*Unset {variable} and start"):
        pt.precision("strict").keep()
    assert fingerprint() == was and levels.in_force() is None
    monkeypatch.setenv(variable, "STRICT")
    with pt.precision("strict"):
        assert pt.precision().matmul_bits == 24


# -- the command line --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--backend cuda --generation 7.5", 0, "no bfloat16 matrix units"),
        ("--backend ascend --generation 910A", 0, "whatever the switch says"),
        ("--backend tpu", 2, "portable explain precision: backend 'tpu' was asked for"),
        ("--backend neuron", 2, "Name a generation: trn1, trn2, trn3"),
        ("--backend cuda --generation 1.0", 2, "generation '1.0' was asked for"),
    ],
)
def test_the_command(words: str, code: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from portable.cli import app

    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["explain", "precision", *words.split()])
    assert done.exit_code == code and text in " ".join((done.output + done.stderr).split())
