"""Operators that torch_npu takes whole, with an autograd rule of its own, and that the CPU takes apart: recurrent layers.

The CPU's own composition runs on the CPU, and its derivative is taken there in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from portable_ascend.host_acl.derivatives import differentiable
from portable_ascend.host_acl.device import HostDevice

_aten = torch.ops.aten
_WHOLE = (
    _aten.lstm.input, _aten.lstm.data, _aten.gru.input, _aten.gru.data, _aten.lstm_cell.default, _aten.gru_cell.default,
    _aten.stft.default, _aten.stft.center,
)  # fmt: skip


def register(device: HostDevice) -> torch.library.Library:
    """Give PyTorch these operators; they last as long as the library answered."""
    library = torch.library.Library("aten", "IMPL")
    for operator in _WHOLE:
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            library.impl(operator._name[6:], partial(_run, device, operator), key, allow_override=True)
    return library


def _run(device: HostDevice, operator: Any, /, *args: Any, **kwargs: Any) -> Any:
    leaves, layout = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not leaf.is_cpu]
    index = leaves[places[0]].device.index

    def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        low_args, low_kwargs = tree_unflatten(values, layout)
        out = operator(*low_args, **low_kwargs)
        return out if isinstance(out, tuple) else (out,)

    out = _Whole.apply(device, compute, index, *(leaves[place] for place in places))
    device.observer.observe(operator, args, kwargs, out)
    return out if len(operator._schema.returns) > 1 else out[0]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, device: HostDevice, compute: Callable[..., tuple[Tensor, ...]], index: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.device, ctx.compute, ctx.index = device, compute, index
        ctx.save_for_backward(*tensors)
        ctx.seed = device.random.next_seed(index)  # type: ignore[attr-defined]
        # The CPU chooses other kernels where nothing requires a gradient: it must see what the caller asks for.
        needed = ctx.needs_input_grad[3:]
        low = [device.host(t.detach()).detach().requires_grad_(need) for t, need in zip(tensors, needed, strict=True)]
        with differentiable(any(needed)), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(ctx.seed)
            return tuple(device.put(out.detach(), index) for out in compute(*low))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        device = ctx.device
        tensors = [device.host(tensor.detach()) for tensor in ctx.saved_tensors]
        with differentiable(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(ctx.seed)  # the same dropout as in the forward pass
            leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, ctx.needs_input_grad[3:], strict=True)]
            outs = ctx.compute(*leaves)
            pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None and out.requires_grad]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [out for out, _ in pairs], wanted, [device.host(grad) for _, grad in pairs], allow_unused=True
                )
            )
        answers = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return None, None, None, *tree_map_only(Tensor, lambda low: device.put(low, ctx.index), answers)
