"""PyTorch's own operator samples (OpInfo), emulated device against CPU: answers and gradients must be equal to the bit.

``python tests/emulated/operators.py [--samples N] [--dtype float32] [NAME ...]`` runs all operators and prints what differs;
check_operators.py keeps a part of it in the tests.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

# Values are not a function of the inputs, or are read by position in memory that nobody wrote.
UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
# They answer Python objects of the device itself (dtype promotions, devices), or test PyTorch's own inner workings.
OTHER = {"to", "item", "tolist"}
# Refused: complex numbers, sparse tensors.
REFUSED = re.compile("whose devices have none|dense tensors only|[Ss]parse")
# In evaluation the CPU's out= kernel leaves two of the outputs unwritten.
UNWRITTEN = {"native_batch_norm", "_native_batch_norm_legit"}
# PyTorch itself differs between devices.
KNOWN = {
    "tensor_split": "takes its indices from the CPU on every device",
    "unravel_index": "the samples need integers beyond 32 bits",
    "linalg.lstsq": "LAPACK's gelsy on the CPU, gels elsewhere",
    "nn.functional.linear_cross_entropy": "the chunked form accumulates in another dtype on the CPU",
    "addr": "taken apart into products and sums on a device without a kernel of its own, which round once more",
    "renorm": "the gradient is accumulated in float64 on the CPU, in float32 elsewhere (toAccumulateType)",
}


@dataclass(frozen=True)
class Difference:
    """One sample that went differently."""

    operator: str
    variant: str
    sample: int
    what: str

    def __str__(self) -> str:
        return f"{self.operator} [{self.variant} {self.sample}]: {self.what}"


def _move(value: Any, device: torch.device) -> Any:
    """A copy on a device, with strides kept, and leaves that need gradients as new leaves."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            kept = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
            if 0 in leaf.stride():  # elements that share memory cannot be written one by one
                kept = leaf.detach().to(device)
            else:
                kept.copy_(leaf.detach())
            return kept.requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu"):
            return device if isinstance(leaf, torch.device) else device.type
        return leaf

    return tree_map(one, value)


def _outcome(function: Any, sample: Any, device: torch.device, backward: bool, inplace: bool) -> Any:
    """(answer, gradients) on the CPU, or the exception's type."""
    try:
        given, args, kwargs = (_move(value, device) for value in (sample.input, sample.args, sample.kwargs))
        torch.default_generator.manual_seed(7)
        first = given.clone() if inplace else given
        out = function(first, *args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        return error
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    grads: list[Any] = []
    if backward:
        inputs = [t for t in tree_leaves((given, args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        outs = [t for t in leaves if t.requires_grad]
        if inputs and outs:
            try:
                seeds = [torch.ones_like(t) for t in outs]
                grads = list(torch.autograd.grad(outs, inputs, seeds, allow_unused=True))
            except (RuntimeError, NotImplementedError) as error:
                grads = [str(type(error))]
    return (
        [t.detach().cpu() for t in leaves],
        [leaf for leaf in tree_leaves(out) if isinstance(leaf, (int, float, bool))],
        [g.cpu() if isinstance(g, torch.Tensor) else g for g in grads],
    )


def _same(a: Any, b: Any, close: bool) -> str:
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return f"{type(a).__name__} and {type(b).__name__}: {a if not isinstance(a, torch.Tensor) else b}"
    if not isinstance(a, torch.Tensor):
        return "" if a == b or (a != a and b != b) else f"{a} and {b}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    if a.layout != b.layout:
        return f"{a.layout} and {b.layout}"
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.dtype == torch.complex32:  # which the CPU cannot compare
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    if close and a.is_floating_point():
        return "" if torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True) else f"differs by {(a - b).abs().max():.2e}"
    if torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()):
        return ""
    return f"differs by {(a.to(torch.float64) - b.to(torch.float64)).abs().nan_to_num(0).max():.2e}"


def _out_of(function: Any) -> Any:
    """The operator writing into tensors: the first and third columns of wider ones, so strided; then into empty ones."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            plain = function(*args, **kwargs)
            several = isinstance(plain, tuple)
            parts = tuple(plain) if several else (plain,)
            if not all(isinstance(t, torch.Tensor) for t in parts):
                return plain
            strided = tuple(torch.full((*t.shape, 2), 1, dtype=t.dtype, device=t.device)[..., 0] for t in parts)
            empty = tuple(torch.empty(0, dtype=t.dtype, device=t.device) for t in parts)
            function(*args, **kwargs, out=strided if several else strided[0])
            function(*args, **kwargs, out=empty if several else empty[0])
            return (*strided, *empty)

    return call


def compare(op: Any, device: torch.device, samples: int, dtype: torch.dtype = torch.float32) -> Iterator[Difference]:
    """Differences between the CPU and the device for one operator of ``op_db``."""
    backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    variants = [("function", op.op)]
    if op.inplace_variant is not None and op.inplace_variant is not op.op:
        variants.append(("in place", op.inplace_variant))
    if op.supports_out and op.name not in UNWRITTEN:
        variants.append(("out=", _out_of(op.op)))
    torch.default_generator.manual_seed(1)
    # Not op.sample_inputs, which looks for the running test on the stack, once a sample, for longer than all operators take.
    for number, plain in enumerate(islice(op.sample_inputs_func(op, "cpu", dtype, backward), samples)):
        strided = number % 2 and plain.input.__class__ is torch.Tensor and plain.input.layout == torch.strided
        # as_strided reads memory between the elements, which a copy does not have.
        sample = plain.noncontiguous() if strided and not op.name.startswith("as_strided") else plain
        for variant, function in variants:
            inplace = variant == "in place"
            if inplace and (sample.broadcasts_input or not isinstance(sample.input, torch.Tensor)):
                continue
            cpu = _outcome(function, sample, torch.device("cpu"), backward, inplace)
            there = _outcome(function, sample, device, backward, inplace)
            if isinstance(cpu, Exception) or isinstance(there, Exception):
                if type(cpu) is not type(there) and not REFUSED.search(str(there)):
                    bad = there if isinstance(there, Exception) else cpu
                    side = "device" if bad is there else "CPU"
                    yield Difference(op.formatted_name, variant, number, f"{side} {type(bad).__name__}: {str(bad)[:150]}")
                continue
            flat = [[leaf for part in side for leaf in part] for side in (cpu, there)]
            if len(flat[0]) != len(flat[1]):
                yield Difference(op.formatted_name, variant, number, f"{len(flat[0])} and {len(flat[1])} answers")
                continue
            # The device computes float64 in float32.
            close = any(isinstance(a, torch.Tensor) and a.dtype == torch.float64 for a in flat[0])
            for place, (a, b) in enumerate(zip(*flat, strict=True)):
                what = _same(a, b, close)
                if what:
                    kind = "answer" if place < len(cpu[0]) else "gradient"
                    yield Difference(op.formatted_name, variant, number, f"{kind} {place}: {what}")
                    break


def operators(dtype: torch.dtype) -> list[Any]:
    """All operators with samples of a dtype whose numbers are defined."""
    return [
        op
        for op in op_db
        if dtype in op.supported_dtypes("cpu")
        and not op.name.startswith("jiterator")
        and op.name not in UNDEFINED | OTHER | KNOWN.keys()
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    import portable as pt

    warnings.simplefilter("ignore")
    pt.use("neuron")
    dtype = getattr(torch, options.dtype)
    found = [op for op in operators(dtype) if not options.names or op.name in options.names]
    bad = 0
    for number, op in enumerate(found[options.start :], options.start):
        print(f"\r{number} {op.formatted_name}", end=" " * 40, file=sys.stderr, flush=True)
        for difference in islice(compare(op, torch.device("neuron"), options.samples, dtype), 2):
            bad += 1
            print(difference, flush=True)
    print(f"\n{len(found)} operators, {bad} differences")
    return bad > 0


if __name__ == "__main__":
    sys.exit(main())
