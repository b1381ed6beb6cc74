"""Mixed precision follows the policy; loss scaling does what the paper says."""

from __future__ import annotations

import fakes
import pytest
import torch

import portable as pt
from portable.backend import Backend

pytestmark = pytest.mark.usefixtures("on_cpu")


def declare(monkeypatch: pytest.MonkeyPatch, *autocast: str) -> None:
    """Let the CPU pass for a generation with these fast dtypes."""
    made = fakes.generation(*autocast)
    monkeypatch.setattr(type(pt.active()), "generation", lambda self, index=0: made)


def matmul_dtype() -> torch.dtype:
    return (torch.ones(4, 4) @ torch.ones(4, 4)).dtype


@pytest.mark.parametrize(
    ("fast", "expected", "scaler"),
    [
        ((), None, False),
        (("bfloat16",), "bfloat16", False),
        (("float16",), "float16", True),
        (("bfloat16", "float16"), "bfloat16", False),
    ],
)
def test_policy(monkeypatch, fast, expected, scaler):
    declare(monkeypatch, *fast)
    found = pt.precision_policy()
    assert (found.autocast, found.scaler) == (expected, scaler)
    assert "Fake 1" in found.reason
    with pt.autocast():
        assert matmul_dtype() == getattr(torch, expected or "float32")
    assert pt.GradScaler().is_enabled() is scaler


def test_policy_of_an_unknown_generation(plugged):
    plugged(fakes.Fake())
    found = pt.precision_policy()
    assert (found.autocast, found.scaler) == (None, False)
    assert "not known" in found.reason


def test_policy_of_another_backend_and_index(plugged):
    class Mixed(fakes.Fake):
        def generation(self, index=0):
            return fakes.generation("bfloat16" if index else "float16")

    plugged()
    backend: Backend = Mixed()
    assert [pt.precision_policy(backend, index).autocast for index in (0, 1)] == ["float16", "bfloat16"]


def test_a_given_dtype_overrides_the_policy(monkeypatch):
    declare(monkeypatch)
    with pt.autocast(torch.bfloat16):
        assert matmul_dtype() == torch.bfloat16
    with pt.autocast(torch.bfloat16, enabled=False):
        assert matmul_dtype() == torch.float32


def test_enabled_false_overrides_the_policy(monkeypatch):
    declare(monkeypatch, "bfloat16")
    with pt.autocast(enabled=False):
        assert matmul_dtype() == torch.float32


def test_autocast_nests_and_ends_with_an_exception(monkeypatch):
    declare(monkeypatch, "bfloat16")
    with pt.autocast():
        with pt.autocast(enabled=False):
            assert matmul_dtype() == torch.float32
        assert matmul_dtype() == torch.bfloat16
    with pytest.raises(KeyError), pt.autocast():
        raise KeyError
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_as_a_decorator(monkeypatch):
    declare(monkeypatch, "bfloat16")
    assert pt.autocast()(matmul_dtype)() == torch.bfloat16


def test_autocast_keeps_sums_in_float32(monkeypatch):
    """Products run in bfloat16 (8 bits of mantissa), reductions of float32 stay exact."""
    declare(monkeypatch, "bfloat16")
    x = torch.full((64, 64), 1 / 3)
    with pt.autocast():
        product = x @ x
    assert product.dtype == torch.bfloat16
    assert 0 < fakes.rel_error(product, x.double() @ x.double()) < 2**-7


@pytest.mark.parametrize("form", ["inside", "decorator", "given dtype"])
def test_autocast_inside_a_compiled_function(monkeypatch, plugged, form):
    """Traced whole, even where nothing has chosen a backend before."""
    plugged()
    torch.compiler.reset()
    import portable_cpu.backend

    made = fakes.generation("bfloat16")
    monkeypatch.setattr(portable_cpu.backend.CpuBackend, "generation", lambda self, index=0: made)
    x = torch.randn(8, 8)

    def inside(x):
        with pt.autocast():
            return x @ x

    def given(x):
        with pt.autocast(torch.float16):
            return x @ x

    function = {"inside": inside, "given dtype": given, "decorator": None}[form] or pt.autocast()(lambda x: x @ x)
    result = torch.compile(function, fullgraph=True, backend="eager")(x)
    dtype = torch.float16 if form == "given dtype" else torch.bfloat16
    assert result.dtype == dtype
    assert torch.equal(result, x.to(dtype) @ x.to(dtype))


def test_a_compiled_function_follows_use(monkeypatch, plugged):
    import portable_cpu.backend

    torch.compiler.reset()
    made = fakes.generation("bfloat16")
    monkeypatch.setattr(portable_cpu.backend.CpuBackend, "generation", lambda self, index=0: made)
    plugged(fakes.Fake(fakes.spec("plain", device_type="cpu"), count=1, generation=fakes.generation()))

    @torch.compile(fullgraph=True, backend="eager")
    def product(x):
        with pt.autocast():
            return x @ x

    x = torch.ones(4, 4)
    for name, dtype in (("cpu", torch.bfloat16), ("plain", torch.float32), ("cpu", torch.bfloat16)):
        pt.use(name)
        assert product(x).dtype == dtype


# -- loss scaling ----------------------------------------------------------------------------------------------------------


def scaled_step(scaler: torch.amp.GradScaler, weight: torch.nn.Parameter, factor: float) -> torch.Tensor:
    """One SGD step of rate 1 on ``factor * weight``; the gradient is ``factor``."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(factor * weight.sum()).backward()
    found = weight.grad.clone()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return found


def test_disabled_scaler_passes_everything_through(monkeypatch):
    declare(monkeypatch, "bfloat16")
    scaler = pt.GradScaler()
    loss = torch.tensor(0.1)
    assert scaler.scale(loss) is loss
    assert scaler.get_scale() == 1.0
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    assert scaled_step(scaler, weight, 0.25).item() == 0.25
    assert weight.item() == 0.75
    scaled_step(scaler, weight, float("inf"))  # nothing protects the weight
    assert weight.item() == -float("inf")


def test_enabled_scaler_scales_and_unscales():
    scaler = pt.GradScaler(enabled=True, init_scale=1024.0)
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    assert scaled_step(scaler, weight, 0.25).item() == 256.0
    assert weight.item() == 0.75
    assert scaler.get_scale() == 1024.0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_overflow_skips_the_step_and_halves_the_scale(bad):
    scaler = pt.GradScaler(enabled=True, init_scale=1024.0, growth_interval=2)
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    scaled_step(scaler, weight, bad)
    assert weight.item() == 1.0
    assert scaler.get_scale() == 512.0
    scaled_step(scaler, weight, 0.5)
    assert (weight.item(), scaler.get_scale()) == (0.5, 512.0)
    scaled_step(scaler, weight, 0.25)
    assert (weight.item(), scaler.get_scale()) == (0.25, 1024.0)  # doubled after growth_interval good steps


def test_policy_with_float16_turns_scaling_on(monkeypatch):
    """A gradient below float16's smallest number (6e-8) survives with scaling, and vanishes without."""
    declare(monkeypatch, "float16")
    for scaler, expected in ((pt.GradScaler(), 1e-9), (pt.GradScaler(enabled=False), 0.0)):
        weight = torch.nn.Parameter(torch.ones(1))
        loss = (weight.half() * 1.0).sum().float() * 1e-9
        scaler.scale(loss).backward()
        scaler.unscale_(torch.optim.SGD([weight], lr=1.0))
        assert weight.grad.item() == pytest.approx(expected, rel=1e-3)


# -- custom autograd functions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", [pt, pt.cuda], ids=["portable", "portable.cuda"])
def test_custom_functions(monkeypatch, namespace):
    declare(monkeypatch, "bfloat16")
    seen: dict[str, object] = {}

    class Square(torch.autograd.Function):
        @staticmethod
        @namespace.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            seen["forward"] = (x.dtype, torch.is_autocast_enabled("cpu"))
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @namespace.custom_bwd
        def backward(ctx, grad):
            seen["backward"] = torch.is_autocast_enabled("cpu")
            return 2 * ctx.saved_tensors[0] * grad

    class Doubled(torch.autograd.Function):
        @staticmethod
        @namespace.custom_fwd
        def forward(ctx, x):
            seen["plain forward"] = torch.is_autocast_enabled("cpu")
            return 2 * x

        @staticmethod
        @namespace.custom_bwd()
        def backward(ctx, grad):
            seen["plain backward"] = torch.is_autocast_enabled("cpu")
            return 2 * grad

    x = torch.tensor([3.0], dtype=torch.bfloat16, requires_grad=True)
    with pt.autocast():
        y = Square.apply(x)
        z = Doubled.apply(x)
    y.backward()
    assert x.grad.item() == 6.0
    z.backward()  # outside the block, but with the forward's state
    assert seen == {"forward": (torch.float32, False), "backward": False, "plain forward": True, "plain backward": True}


def test_decorating_does_not_choose_a_backend(plugged):
    plugged(fakes.Fake())

    @pt.custom_fwd
    def forward(ctx, x):
        """Doc."""
        return 2 * x

    from portable import selection

    assert selection._active is None
    assert (forward.__name__, forward.__doc__) == ("forward", "Doc.")


def test_a_device_without_autocast_gets_a_context_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses torch.autocast on such a device even with enabled=False."""
    from types import SimpleNamespace

    from portable import amp

    monkeypatch.setattr(amp, "active", lambda: SimpleNamespace(spec=SimpleNamespace(device_type="privateuseone")))
    monkeypatch.setattr(amp, "precision_policy", lambda: SimpleNamespace(autocast=None))
    with pytest.raises((AssertionError, RuntimeError)):
        torch.autocast("privateuseone", dtype=torch.bfloat16, enabled=False)
    with pt.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
