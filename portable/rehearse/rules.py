"""Every kind of finding, as one table: id, severity, what it costs, what to do.

The words here hold for any device. What a vendor's own documents add stands in that vendor's package and goes first
(`portable.rehearse.costs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from portable.rehearse.result import Severity


@dataclass(frozen=True)
class Rule:
    """One kind of finding.

    Attributes:
        group: what it belongs to, for a vendor's words.
        severity: how bad it is. Of what repeats (``eases``), if it happens in every step; in some steps only it is minor, and
            info if it happens at the start or the end only.
        title: a short name.
        cost: what it costs.
        fix: what to do.
        eases: see ``severity``.
    """

    group: str
    severity: Severity
    title: str
    cost: str
    fix: str
    eases: bool = False


_WAIT = "The host waits until the device has done all that is queued, and queues nothing meanwhile."
_SIZE = " The size of the result depends on the data, so the host must know the data before it can go on."
_OTHER_NUMBER = "The number differs from PyTorch's on CPU and CUDA, and nothing says so."

RULES: Mapping[str, Rule] = {
    "REH-REFUSED-DTYPE": Rule(
        "refused", "blocker", "dtype refused", "The device raises an error here.",
        "Use a dtype that the device has (complex numbers as pairs of real ones: torch.view_as_real), or do this on the CPU.",
    ),
    "REH-REFUSED": Rule(
        "refused", "blocker", "refused by the device", "The device raises an error here.",
        "Do as the message says, or do this on the CPU.",
    ),
    "REH-OOM": Rule(
        "memory", "blocker", "out of memory", "The device raises an error here.",
        "Use a smaller batch or shorter sequences, activation checkpointing, sharding over several devices, or a device "
        "with more memory.",
    ),
    "REH-UNSUPPORTED": Rule(
        "unsupported", "blocker", "no equivalent", "The device has nothing that this could become; the call raises an error.",
        "Do as the message says, or guard the call by a question to the device.",
    ),
    "REH-DEVICE": Rule(
        "device", "blocker", "no such device", "The device does not exist; the call raises an error.",
        "Start one process per device with torchrun, or ask for fewer devices.",
    ),
    "REH-WRONG-FLOAT64": Rule(
        "wrong", "wrong", "float64 in 32 bits", _OTHER_NUMBER,
        "Use float32 where it is enough; where it is not, do this on the CPU: tensor.cpu().double().",
    ),
    "REH-WRONG-INT64": Rule(
        "wrong", "wrong", "int64 in 32 bits", _OTHER_NUMBER,
        "Keep the values below 2^31 (take the remainder after each step of a hash), or do this on the CPU.",
    ),
    "REH-WRONG-INTEGER-MATMUL": Rule(
        "wrong", "wrong", "integer matrix product in float32", _OTHER_NUMBER,
        "Keep the results below 2^24, split the product into parts that do, or multiply on the CPU.",
    ),
    "REH-WRONG-COLLECTIVE": Rule(
        "wrong", "wrong", "integer collective in float32", _OTHER_NUMBER,
        "Send large integers (seeds, sizes, counters) through a gloo group: torch.distributed.new_group(backend='gloo').",
    ),
    "REH-WRONG-ATTENTION": Rule(
        "wrong", "wrong", "attention may differ", "Depending on the path, another mask may be applied, and nothing says so.",
        "Pass an explicit boolean mask, or give queries and keys one length.",
    ),
    "REH-WRONG": Rule(
        "wrong", "wrong", "silently wrong", _OTHER_NUMBER, "Do as the detail says, or do this on the CPU.",
    ),
    "REH-ATTENTION-MATH": Rule(
        "attention", "major", "attention without a fused kernel",
        "All scores, queries times keys, are written to memory and read again, forward and backward; memory grows with the "
        "square of the length.",
        "Take away what the reason names, where the model allows it.", eases=True,
    ),
    "REH-FALLBACK": Rule(
        "fallback", "major", "computed by the CPU",
        "The tensors are copied to the CPU and the result back, silently, and the device waits.",
        "Compose the operator of others that the device has, or move it out of the training loop.", eases=True,
    ),
    "REH-COMPILE-EVERY-STEP": Rule(
        "compile", "major", "new shapes in every step", "Each new shape is compiled before it runs; the step waits for it.",
        "Give tensors the same shapes in every step: pad to a few fixed lengths (buckets), drop_last=True in the loader, "
        "static caches, torch.where instead of boolean indexing.",
    ),
    "REH-COMPILE-LATE": Rule(
        "compile", "minor", "new shapes in later steps", "Each new shape is compiled before it runs; those steps wait for it.",
        "Pad to the shape of the other steps (drop_last=True for a last batch, a fixed length for a growing context), or run "
        "each shape once before timing starts.",
    ),
    "REH-COMPILE-FIRST": Rule(
        "compile", "info", "compiled once", "Compiled before it runs the first time; a cache may keep it for the next start.",
        "Nothing, unless the start takes too long: then fewer different shapes, or torch.compile for whole layers.",
    ),
    "REH-SYNC-ITEM": Rule(
        "sync", "major", ".item()", _WAIT,
        "Keep the value on the device (accumulate loss.detach()), and read it every 10 or 100 steps; "
        "torch.where instead of `if tensor:`.", eases=True,
    ),
    "REH-SYNC-PRINT": Rule(
        "sync", "major", "printing a tensor", _WAIT + " Printing reads and compares every element, in several operators.",
        "Print every 10 or 100 steps, or print tensor.cpu().", eases=True,
    ),
    "REH-SYNC-SAVE": Rule(
        "sync", "major", "saving to a file", _WAIT,
        "A checkpoint has to be copied: save every so many steps, or with torch.distributed.checkpoint.async_save.", eases=True,
    ),
    "REH-SYNC-COPY": Rule(
        "sync", "major", "copy to the CPU", _WAIT,
        "Compute on the device; collect results there and copy them once, in one tensor.", eases=True,
    ),
    "REH-SYNC-BOOLEAN-INDEX": Rule(
        "sync", "major", "boolean indexing", _WAIT + _SIZE,
        "torch.where(mask, x, 0) instead of x[mask], torch.where(mask, value, x) or masked_fill instead of x[mask] = value; a "
        "mean over the mask as (x * mask).sum() / mask.sum().", eases=True,
    ),
    "REH-SYNC-NONZERO": Rule(
        "sync", "major", "nonzero", _WAIT + _SIZE,
        "torch.where with three arguments, topk or argsort with a fixed count, or torch.nonzero_static(size=).", eases=True,
    ),
    "REH-SYNC-MASKED-SELECT": Rule(
        "sync", "major", "masked_select", _WAIT + _SIZE, "torch.where(mask, x, 0) keeps the shape.", eases=True,
    ),
    "REH-SYNC-UNIQUE": Rule(
        "sync", "major", "unique", _WAIT + _SIZE, "Do it on the CPU before the data goes to the device, or sort and compare.",
        eases=True,
    ),
    "REH-SYNC-BINCOUNT": Rule(
        "sync", "major", "bincount", _WAIT + _SIZE, "zeros(n).scatter_add_(0, x, ones) has a fixed size.", eases=True,
    ),
    "REH-SYNC-REPEAT-INTERLEAVE": Rule(
        "sync", "major", "repeat_interleave", _WAIT + _SIZE, "Pass output_size=, or repeat by an int.", eases=True,
    ),
    "REH-SYNC-COMPARE": Rule(
        "sync", "major", "equal or allclose", _WAIT, "Compare on the device and read the answer rarely, or in tests only.",
        eases=True,
    ),
    "REH-SYNC-EXPLICIT": Rule(
        "sync", "minor", "synchronize()", _WAIT, "Needed around timings only; leave it out of the training loop.", eases=True,
    ),
    "REH-SYNC": Rule("sync", "major", "host waits", _WAIT, "Move it out of the training loop.", eases=True),
    "REH-GRAPH-RECOMPILE": Rule(
        "graph", "major", "torch.compile compiles again", "The whole graph is compiled again for other shapes or values.",
        "Give the function the same shapes and Python values each time (a step counter as an argument differs each time).",
        eases=True,
    ),
    "REH-GRAPH-BREAKS": Rule(
        "graph", "minor", "torch.compile breaks the graph", "The function became several graphs, with Python between them.",
        "torch.compile(fullgraph=True) names the first place; take .item(), print and data-dependent branches out.",
    ),
    "REH-MEMORY-FULL": Rule(
        "memory", "minor", "little memory left",
        "The peak is above nine tenths of the device's memory; compiled programs and workspaces need some too.",
        "Use a smaller batch or shorter sequences, activation checkpointing, or sharding.",
    ),
    "REH-COMPAT-NONE": Rule(
        "compat", "major", "no equivalent", "The call raised an error; the program went on without.",
        "Do as the detail says, or guard the call.",
    ),
    "REH-COMPAT-CHANGED": Rule(
        "compat", "info", "changed for this device", "Dropped or replaced by what does the same here.",
        "Leave it out, or ask portable for the options of the device.",
    ),
    "REH-COMPAT-REDIRECTED": Rule(
        "compat", "info", "written for CUDA", "Nothing: the same on this device.",
        "For a program that runs without portable run: device = pt.device().",
    ),
}  # fmt: skip

SYNCS: Mapping[str, str] = {
    "item": "REH-SYNC-ITEM",
    "printing": "REH-SYNC-PRINT",
    "saving": "REH-SYNC-SAVE",
    "copy to the CPU": "REH-SYNC-COPY",
    "boolean indexing": "REH-SYNC-BOOLEAN-INDEX",
    "nonzero": "REH-SYNC-NONZERO",
    "masked_select": "REH-SYNC-MASKED-SELECT",
    "unique": "REH-SYNC-UNIQUE",
    "bincount": "REH-SYNC-BINCOUNT",
    "repeat_interleave": "REH-SYNC-REPEAT-INTERLEAVE",
    "equal": "REH-SYNC-COMPARE",
    "allclose": "REH-SYNC-COMPARE",
    "synchronize": "REH-SYNC-EXPLICIT",
}
"""Name of a synchronisation (`portable.rehearsal.observing`) to its rule; others take REH-SYNC."""

WRONG: Mapping[str, str] = {
    "float64 computed in float32": "REH-WRONG-FLOAT64",
    "int64 computed in int32": "REH-WRONG-INT64",
    "integer matrix product through float32": "REH-WRONG-INTEGER-MATMUL",
    "integer collective through float32": "REH-WRONG-COLLECTIVE",
    "attention": "REH-WRONG-ATTENTION",
    "refused": "REH-REFUSED",
}
"""Kind of a recorder's finding to its rule; others take REH-WRONG."""

COMPAT: Mapping[str, str] = {
    "no equivalent": "REH-COMPAT-NONE",
    "changed": "REH-COMPAT-CHANGED",
    "redirected": "REH-COMPAT-REDIRECTED",
}
