"""PyTorch's own float32 precision settings, taken back exactly.

PyTorch keeps them as a tree (aten/src/ATen/Context.cpp, 2.13): ``generic.all`` above ``cuda.all`` and ``mkldnn.all`` (cuDNN and
cuBLAS; oneDNN), each above ``matmul``, ``conv`` and ``rnn``. A node is ``ieee``, ``tf32``, ``bf16``, or ``none``: then the one
above decides. Three things make an exact restoration harder than reading and writing back:

- reading a node answers what is in force, not what is stored: written back, an inherited value would become the node's own;
- ``cuda.conv`` and ``cuda.rnn`` start with a stored value that allows TF32 unless a node above says otherwise. No setter takes
  it, so such a node must not be written at all;
- the older ``torch.set_float32_matmul_precision`` and ``allow_tf32`` keep a field of their own beside the tree, and raise where
  the two disagree. Setting the field writes two nodes.

So a level sets the nodes above first, and of the others only those that still say something else: these have a value of their
own, which is what was read. A switch to ``strict`` never passes through a state with less precision than before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from portable.spec import Generation
from portable.switches import LEVELS, Ask, Control, Flag, Level, Setting, State, describe, to

Node = tuple[str, str]

_ROOT: Node = ("generic", "all")
_PARENTS: tuple[Node, ...] = (("cuda", "all"), ("mkldnn", "all"))
_MATMULS: tuple[Node, ...] = (("cuda", "matmul"), ("mkldnn", "matmul"))
_OTHERS: tuple[Node, ...] = (("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "conv"), ("mkldnn", "rnn"))
_LEAVES = (*_MATMULS, *_OTHERS)
_NODES = (_ROOT, *_PARENTS, *_LEAVES)
_FULL = ("ieee", "none")
GOVERNS = {"matmul": "matrix products", "conv": "convolutions", "rnn": "recurrent layers"}
# What a leaf says at a level. TF32 for cuDNN is PyTorch's default (docs: CUDA semantics, "TensorFloat-32").
_SHIPPED: Mapping[Node, str] = {("cuda", "conv"): "tf32", ("cuda", "rnn"): "tf32"}


def read(node: Node) -> str:
    """What is in force at a node."""
    return str(torch._C._get_fp32_precision_getter(*node))


def write(node: Node, value: str) -> None:
    """Store a value at a node."""
    torch._C._set_fp32_precision_setter(*node, value)


def _older() -> str:
    """ "highest", "high" or "medium"; may be asked only while no matrix product is reduced, or it can raise."""
    return str(torch._C._get_float32_matmul_precision())


def _set_older(value: str) -> tuple[Node, ...]:
    """Set the older field; answers the nodes that PyTorch wrote with it."""
    if value == "medium":
        torch._C._set_float32_matmul_precision(value)
        return _MATMULS
    torch._C._set_cublas_allow_tf32(value == "high")
    return _MATMULS[:1]


def _wanted(node: Node, level: Level) -> str:
    if level == "strict":
        return "ieee"
    return "tf32" if level == "fast" else _SHIPPED.get(node, "none")


@dataclass(frozen=True)
class Saved:
    """What was there.

    Attributes:
        visible: what was in force at each node.
        stored: each node's own value as far as it can be told.
        unsure: nodes of which it cannot: see `_own`.
        older: the older field.
        written: nodes that the level wrote.
        after: what was in force once the level was set.
        above: what the level wrote to the nodes above.
    """

    visible: Mapping[Node, str]
    stored: Mapping[Node, str]
    unsure: frozenset[Node]
    older: str
    written: frozenset[Node]
    after: Mapping[Node, str]
    above: str


class TorchFloat32(Control):
    """The whole tree and the older field.

    Args:
        shown: the nodes that the backend's devices follow, and how each is written in code.
        source: where it stands what a value does there.
        veto: why no float32 input is rounded whatever the nodes say; None if nothing forbids it.
    """

    key = "torch float32 precision"

    def __init__(self, shown: Mapping[Node, str], source: str = "", veto: Callable[[], str | None] = lambda: None) -> None:
        self._shown = shown
        self._source = source
        self._veto = veto

    def states(self, generation: Generation | None) -> Sequence[State]:
        found = []
        for node, name in self._shown.items():
            value, veto = read(node), self._veto()
            bits, meaning = describe(None if veto or value in _FULL else value, generation)
            default = _SHIPPED.get(node, "none")
            found.append(State(name, GOVERNS[node[1]], value, default, bits, veto or meaning, self._source))
        return found

    def documented(self) -> Sequence[Setting]:
        found = []
        for node, name in self._shown.items():
            at = {level: _wanted(node, level) for level in LEVELS}
            formats = {level: None if value in _FULL else value for level, value in at.items()}
            found.append(Setting(name, GOVERNS[node[1]], _SHIPPED.get(node, "none"), at, formats, self._source))
        return found

    def apply(self, level: Level, ask: Ask) -> Saved:
        above = "ieee" if level == "strict" else "none"
        before = {node: read(node) for node in _NODES}
        stored = {_ROOT: before[_ROOT]}
        unsure = set()
        written: set[Node] = set()

        def put(node: Node, value: str) -> None:
            if read(node) != value:
                write(node, value)
                written.add(node)

        def learn(node: Node) -> None:
            stored[node], sure = _own(node, before[node], read(node), above)
            if not sure:
                unsure.add(node)

        put(_ROOT, above)
        for node in _PARENTS:
            learn(node)
            put(node, above)
        for node in _LEAVES:
            learn(node)
        for node in _MATMULS:  # so that the older field can be read
            if read(node) not in _FULL:
                put(node, "ieee")
        older = _older()
        wanted = "high" if level == "fast" else "highest"
        if older != wanted:
            written.update(_set_older(wanted))
        for node in _LEAVES:
            goal = _wanted(node, level)
            if goal not in _FULL or read(node) not in _FULL:
                put(node, goal)
        after = {node: read(node) for node in _NODES}
        return Saved(before, stored, frozenset(unsure), older, frozenset(written), after, above)

    def restore(self, saved: Saved) -> None:
        """Nodes that cannot be told are written only if the level wrote them, or if they differ from how it left them."""

        def put(node: Node, value: str, always: bool) -> None:
            if always or node not in saved.unsure or node in saved.written or read(node) != saved.after[node]:
                write(node, value)

        write(_ROOT, saved.above)
        for node in _PARENTS:
            if read(node) != saved.above:
                write(node, saved.above)
        clobbered: tuple[Node, ...] = ()
        changed = {node for node in _LEAVES if read(node) != saved.after[node]}
        for node in _MATMULS:
            if read(node) not in _FULL:
                write(node, "ieee")
                changed.add(node)
        if _older() != saved.older:
            clobbered = _set_older(saved.older)
        for node in _LEAVES:
            put(node, saved.stored[node], node in changed or node in clobbered)
        for node in _PARENTS:
            put(node, saved.stored[node], False)
        write(_ROOT, saved.stored[_ROOT])
        for node in (*_PARENTS, *_LEAVES):  # what the program wrote meanwhile and the level hid
            if read(node) != saved.visible[node]:
                write(node, saved.visible[node])

    def merge(self, below: Saved, above: Saved) -> Saved:
        # What the earlier level did not write, the later one found as it was before both, and may have read more surely.
        earlier = below.written | above.unsure
        return replace(
            above,
            visible=below.visible,
            stored={node: (below if node in earlier else above).stored[node] for node in _NODES},
            unsure=below.unsure & earlier,
            older=below.older,
            written=below.written | above.written,
        )


def common(
    shown: Mapping[Node, str] | None = None, source: str = "", veto: Callable[[], str | None] = lambda: None
) -> tuple[Control, ...]:
    """What a level turns on every backend: the tree (for the CPU's part of the work too), and attention by plain products.

    Args:
        shown, source, veto: see `TorchFloat32`.
    """
    return TorchFloat32(shown or {}, source, veto), _ATTENTION


_ATTENTION = Flag(
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",  # the name says cuda, the function is every device's
    "16-bit sums",
    False,
    "torch: aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math",
    get=lambda: torch._C._get_math_sdp_allow_fp16_bf16_reduction(),
    set=lambda value: torch._C._set_math_sdp_allow_fp16_bf16_reduction(value),
    levels={"strict": to(False), "default": to(False), "fast": to(False)},
    words={
        "False": "attention on the math path computes 16-bit inputs in float32",
        "True": "attention on the math path computes 16-bit inputs in 16 bits",
    },
)


def _own(node: Node, before: str, now: str, above: str) -> tuple[str, bool]:
    """A node's stored value, and whether that is sure, from what was in force before and after the nodes above were set.

    Not sure are two: a node that says ``ieee`` where those above do too may as well hold ``none``; cuDNN's nodes may hold the
    start value, which no setter takes.
    """
    if now != above:
        return now, not (above == "none" and node in _SHIPPED)
    if above == "none" or before != now:
        return "none", node not in _SHIPPED
    return now, False
