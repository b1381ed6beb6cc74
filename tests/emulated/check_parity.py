"""What is computed on the emulated device equals the CPU, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CPU = torch.device("cpu")


class SmallGPT(nn.Module):
    """Two transformer blocks with shared embedding and output weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.position = nn.Embedding(16, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(5))
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.drop = nn.Dropout(dropout)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        batch, time = tokens.shape
        x = self.embed(tokens) + self.position(torch.arange(time, device=tokens.device))
        for i in range(2):
            q, k, v = self.qkv[i](self.norms[2 * i](x)).view(batch, time, 3, 4, 8).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
            x = x + self.drop(self.out[i](y.transpose(1, 2).reshape(batch, time, 32)))
            x = x + self.drop(self.mlp[i](self.norms[2 * i + 1](x)))
        return self.head(self.norms[4](x))


def train(
    device: torch.device, optimizer: Callable[[Any], torch.optim.Optimizer], dropout: float = 0.0, steps: int = 20
) -> list[Tensor]:
    """Losses, gradients and parameters of a training run, on the CPU."""
    torch.manual_seed(0)
    model = SmallGPT(dropout).to(device)
    opt = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=steps + 1, cycle_momentum=False)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 50, (4, 17), generator=draw).to(device)

        def closure(tokens: Tensor = tokens) -> Tensor:
            opt.zero_grad()
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        loss = opt.step(closure) if isinstance(opt, torch.optim.LBFGS) else closure()
        if not isinstance(opt, torch.optim.LBFGS):
            opt.step()
        schedule.step()
        losses.append(loss.detach().cpu())
    grads = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    return [torch.stack(losses), *grads, *(p.detach().cpu() for p in model.parameters())]


def same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), f"differs by {(a.double() - b.double()).abs().max()}"


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_twenty_steps_of_adamw(dev: torch.device, dropout: float) -> None:
    """The device draws from the CPU's generator, so that the dropout masks are the same."""
    for options in ({}, {"fused": True}):
        make = lambda p, options=options: torch.optim.AdamW(p, lr=1e-3, **options)  # noqa: E731
        here, there = train(CPU, make, dropout), train(dev, make, dropout)
        same(here, there)
        assert here[0][-1] < here[0][0], "the run trains"


OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.1, "momentum": 0.9, "nesterov": True}],
    "Adam": [{"amsgrad": True}],
    "AdamW": [{}],
    "NAdam": [{}],
    "RAdam": [{}],
    "Adagrad": [{}],
    "Adadelta": [{}],
    "Adamax": [{}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Rprop": [{}],
    "ASGD": [{}],
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(dev: torch.device, name: str, foreach: bool) -> None:
    for options in OPTIMIZERS[name]:
        make = lambda p, options=options: getattr(torch.optim, name)(p, foreach=foreach, **options)  # noqa: E731
        same(train(CPU, make, steps=4), train(dev, make, steps=4))


@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])  # AdamW above
def test_fused_optimizers(dev: torch.device, name: str) -> None:
    make = lambda p: getattr(torch.optim, name)(p, lr=1e-2, fused=True)  # noqa: E731
    same(train(CPU, make, steps=4), train(dev, make, steps=4))


def test_optimizers_without_foreach(dev: torch.device) -> None:
    same(train(CPU, torch.optim.LBFGS, steps=2), train(dev, torch.optim.LBFGS, steps=2))
    assert {n for n in dir(torch.optim) if isinstance(getattr(torch.optim, n), type) and n not in ("Optimizer",)} <= {
        *OPTIMIZERS, "LBFGS", "SparseAdam", "Muon", "Adafactor",
    }  # fmt: skip
    same(train(CPU, torch.optim.Adafactor, steps=3), train(dev, torch.optim.Adafactor, steps=3))


def test_muon(dev: torch.device) -> None:
    def run(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(8, 6, bias=False).to(device)
        opt = torch.optim.Muon(layer.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            layer(torch.ones(2, 8, device=device)).square().sum().backward()
            opt.step()
        return [layer.weight.detach().cpu()]

    same(run(CPU), run(dev))


def test_sparse_gradients_are_refused_clearly(dev: torch.device) -> None:
    embed = nn.Embedding(10, 4, sparse=True).to(dev)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"[Ss]parse"):
        embed(torch.tensor([1, 2], device=dev)).sum().backward()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=4),
            nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2), nn.ConvTranspose2d(8, 4, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(16, 5),
        ),
        lambda: (torch.randn(2, 3, 16, 16),),
    ),
    "conv1d and conv3d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Unflatten(1, (1, 4, 1)), nn.Conv3d(1, 2, (2, 1, 3)), nn.Flatten(),
        ),
        lambda: (torch.randn(2, 2, 8),),
    ),
    "embedding bag": (lambda: nn.EmbeddingBag(20, 8), lambda: (torch.randint(0, 20, (3, 5)),)),
    "attention": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2),
        lambda: (torch.randn(2, 6, 16),),
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0), 1),
        lambda: (torch.randn(6, 2, 16), torch.randn(5, 2, 16)),
    ),
    "instance norm, rms norm, prelu": (
        lambda: nn.Sequential(nn.InstanceNorm1d(4, affine=True), nn.RMSNorm(6), nn.PReLU(), nn.Softmax(-1)),
        lambda: (torch.randn(3, 4, 6),),
    ),
    "bilinear": (lambda: nn.Bilinear(3, 4, 5), lambda: (torch.randn(2, 3), torch.randn(2, 4))),
}  # fmt: skip


def outcome(make: Callable[[], nn.Module], inputs: Callable[[], tuple[Tensor, ...]], device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    model, given = make(), inputs()
    model = model.to(device)
    given = tuple(t.to(device).requires_grad_(t.is_floating_point()) for t in given)
    out = model(*given)
    out = out[0] if isinstance(out, tuple) else out
    out.square().sum().backward()
    grads = [t.grad.cpu() for t in (*given, *model.parameters()) if t.grad is not None]
    evaluated = model.eval()(*given)
    evaluated = evaluated[0] if isinstance(evaluated, tuple) else evaluated
    return [out.detach().cpu(), evaluated.detach().cpu(), *grads, *(b.cpu() for b in model.buffers())]


@pytest.mark.parametrize("name", MODELS)
def test_layers(dev: torch.device, name: str) -> None:
    same(outcome(*MODELS[name], CPU), outcome(*MODELS[name], dev))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(dev: torch.device, kind: type[nn.Module]) -> None:
    """Where PyTorch's own composition for devices would differ from the CPU's kernels in the last bit."""
    make, inputs = (lambda: kind(4, 8, num_layers=2, bidirectional=True)), (lambda: (torch.randn(8, 3, 4),))
    same(outcome(make, inputs, CPU), outcome(make, inputs, dev))
    packed = lambda: (torch.randn(7, 4),)  # noqa: E731 - rows of three sequences of 4, 2 and 1 steps

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(4, 8, dropout=0.0, num_layers=2)

        def forward(self, rows: Tensor) -> Tensor:
            sizes = torch.tensor([3, 2, 1, 1])
            return self.layer(nn.utils.rnn.PackedSequence(rows, sizes))[0].data

    same(outcome(Packed, packed, CPU), outcome(Packed, packed, dev))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(dev: torch.device, kind: type[nn.Module]) -> None:
    same(
        outcome(lambda: kind(4, 8), lambda: (torch.randn(3, 4),), CPU),
        outcome(lambda: kind(4, 8), lambda: (torch.randn(3, 4),), dev),
    )


@pytest.mark.parametrize("mask", ["none", "bool", "float", "learned", "causal", "grouped", "dropout", "value size"])
def test_attention(dev: torch.device, mask: str) -> None:
    def run(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        q, k, v = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
        if mask == "grouped":
            k, v = k[:, :2], v[:, :2]
        if mask == "value size":
            v = torch.randn(2, 4, 8, 24)
        extra: dict[str, Any] = {}
        bias = torch.randn(8, 8)
        if mask == "bool":
            extra["attn_mask"] = (bias > -1).to(device)
        elif mask in ("float", "learned"):
            extra["attn_mask"] = bias.to(device).requires_grad_(mask == "learned")
        extra["is_causal"] = mask == "causal"
        extra["enable_gqa"] = mask == "grouped"
        extra["dropout_p"] = 0.3 if mask == "dropout" else 0.0
        given = [t.clone().to(device).requires_grad_() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*given, **extra)
        out.square().sum().backward()
        grads = [t.grad.cpu() for t in given]
        if mask == "learned":
            grads.append(extra["attn_mask"].grad.cpu())
        return [out.detach().cpu(), *grads]

    same(run(CPU), run(dev))


def test_gradient_functions(dev: torch.device) -> None:
    """Checkpointing, hooks, higher derivatives, in-place operations on views, double use, accumulation."""
    from torch.utils.checkpoint import checkpoint

    def run(device: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()).to(device)
        x = torch.randn(4, 6).to(device).requires_grad_()
        seen: list[Tensor] = []
        x.register_hook(lambda g: seen.append(g.detach().cpu().clone()))
        layer[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].cpu().clone()))
        for reentrant in (False, True):
            checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g.square().sum(), x)
        y = x.clone()
        y[1:, ::2] *= 3
        y.t()[0].add_(1.0)
        y.view(-1)[3] = 7.0
        (z,) = torch.autograd.grad(y.sin().sum(), x)
        jac = torch.func.jacrev(lambda t: (t * t).sum(0))(x.detach())
        return [
            x.grad.cpu(),
            gg.cpu(),
            z.cpu(),
            jac.cpu(),
            y.detach().cpu(),
            *seen,
            *(p.grad.cpu() for p in layer.parameters()),
        ]

    same(run(CPU), run(dev))


def test_aliasing(dev: torch.device) -> None:
    x = torch.arange(12.0, device=dev).view(3, 4)
    row, part = x[1], x.t()[::2]
    row.fill_(-1.0)
    part.mul_(2)
    assert x.tolist() == [[0, 1, 4, 3], [-2, -1, -2, -1], [16, 9, 20, 11]]
    assert x.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
    assert row._is_view() and row._base is not None
    x.data = torch.ones(2, 2, device=dev)
    assert x.tolist() == [[1, 1], [1, 1]]
    x.transpose_(0, 1).unsqueeze_(0)
    assert x.shape == (1, 2, 2)
    x.resize_(3, 2).fill_(5)
    assert x.tolist() == [[5, 5]] * 3
    a, b = torch.zeros(2, device=dev), torch.ones(3, device=dev)
    torch.utils.swap_tensors(a, b)
    assert a.tolist() == [1, 1, 1]
    out = torch.empty(0, device=dev)
    assert torch.add(a, 1, out=out) is out and out.tolist() == [2, 2, 2]
    values, indices = torch.empty(0, device=dev), torch.empty(0, dtype=torch.int64, device=dev)
    torch.max(torch.tensor([[1.0, 3.0], [5.0, 2.0]], device=dev), 1, out=(values, indices))
    assert values.tolist() == [3, 5] and indices.tolist() == [1, 0]


@pytest.mark.parametrize("start", [0, 2, 4])
def test_an_empty_view_with_room_is_written_in_place(dev: torch.device, start: int) -> None:
    """As on the CPU, where ``out=`` is sized within the memory that it is a view of. torch.fft.fftfreq is made of that."""
    found = []
    for device in ("cpu", dev):
        x = torch.arange(6.0, device=device)
        view = x[start:start]
        assert torch.arange(-2, 0, out=view) is view
        found.append((x.tolist(), view.tolist(), view.storage_offset()))
    assert found[0] == found[1] and found[0][1] == [-2, -1]
    assert torch.equal(torch.fft.fftfreq(5, device=dev).cpu(), torch.fft.fftfreq(5))
    assert torch.equal(torch.fft.rfftfreq(6, device=dev).cpu(), torch.fft.rfftfreq(6))


def test_moving_average_and_copies(dev: torch.device) -> None:
    model = nn.Linear(3, 3).to(dev)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    twin = copy.deepcopy(model)
    before = twin.weight.detach().cpu().clone()
    with torch.no_grad():
        model.weight.zero_()
    average.update_parameters(model)
    assert torch.equal(average.module.weight.cpu(), before * 0.5)
    assert torch.equal(twin.weight.cpu(), before) and twin.weight.device.type == "neuron"
    assert isinstance(twin.weight, nn.Parameter) and type(model.weight) is nn.Parameter


def test_dtypes_arrive_whole(dev: torch.device) -> None:
    """Copies to and from the device keep every bit, of every dtype that it has."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn):
        x = torch.linspace(-3, 3, 7, dtype=torch.float64).to(dtype)
        assert torch.equal(x.to(dev).cpu().double(), x.double()) and x.to(dev).dtype == dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool):
        x = torch.tensor([0, 1, 100]).to(dtype)
        assert torch.equal(x.to(dev).cpu(), x)
    big = torch.tensor([2**62 + 1])
    assert torch.equal(big.to(dev).cpu(), big)
