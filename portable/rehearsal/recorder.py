"""What happened on a device: counts that mean the same on an emulated device and on the real one.

Every count carries the line of the user's program that caused it (`portable.rehearsal.sources`). Nothing here is a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

from portable.rehearsal import sources


class _PerThread(threading.local):
    """State of one thread; the counter is read by all."""

    def __init__(self, counters: list[Counter[str]]) -> None:
        self.ops: Counter[str] = Counter()
        self.paused = 0
        counters.append(self.ops)


class Recorder:
    """Counters of one device, safe to use from several threads (the autograd engine has its own).

    Attributes:
        compiles: (operator, line) to how many new signatures (shapes, dtypes, options) the line brought.
        syncs: (what, line): times that the host waited for the device ("item", "nonzero", "copy to the CPU").
        fallbacks: (operator, line): calls of operators without a kernel, which the CPU computes.
        findings: (kind, operator, line) to [count, detail of the worst case]: results that are silently wrong, hazards.
        attention: (path, reasons, shapes, line) to how many calls.
        copies: "to the device" / "to the CPU" to [count, bytes].
        graphs: name of a compiled function to [graphs, recompilations].
        collectives: operation to how many calls.
        lenient: whether `refuse` records instead of raising.
        peak, peak_line: functions that answer the peak of the memory in use (bytes) and the line that brought it there, if the
            device knows them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._counters: list[Counter[str]] = []
        self._mine = _PerThread(self._counters)
        self.lenient = False  # see `refuse`
        self.peak: Any = None  # a function that answers the peak of memory in bytes
        self.peak_line: Any = None  # a function that answers the line of the program that brought memory to (about) its peak
        self._clear()

    def _clear(self) -> None:
        self.seen: set[Hashable] = set()
        self.compiles: Counter[tuple[str, str]] = Counter()
        self.syncs: Counter[tuple[str, str]] = Counter()
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.findings: dict[tuple[str, str, str], list[Any]] = {}
        self.attention: Counter[tuple[str, tuple[str, ...], str, str]] = Counter()
        self.copies: dict[str, list[int]] = {}
        self.graphs: dict[str, list[int]] = {}
        self.collectives: Counter[str] = Counter()

    def reset(self) -> None:
        """Forget everything, the signatures already compiled too."""
        with self._lock:
            for counter in self._counters:
                counter.clear()
            self._clear()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing that this thread does inside the block."""
        self._mine.paused += 1
        try:
            yield
        finally:
            self._mine.paused -= 1

    @property
    def paused(self) -> bool:
        """Whether this thread records nothing at the moment."""
        return self._mine.paused > 0

    def op(self, name: str) -> None:
        """An operator ran."""
        self._mine.ops[name] += 1

    @property
    def ops(self) -> Counter[str]:
        """Operator to how often it ran, over all threads."""
        with self._lock:
            total: Counter[str] = Counter()
            for counter in list(self._counters):
                total.update(dict(counter))
            return total

    def signature(self, name: str, key: Hashable) -> None:
        """An operator was called with this signature; a compilation if it is new."""
        if key in self.seen:
            return
        with self._lock:
            if key not in self.seen:
                self.seen.add(key)
                self.compiles[name, sources.line()] += 1

    def sync(self, what: str) -> None:
        """The host waited for the device."""
        with self._lock:
            self.syncs[sources.purpose() or what, sources.line()] += 1

    def fallback(self, name: str) -> None:
        """An operator without a kernel ran on the CPU."""
        with self._lock:
            self.fallbacks[name, sources.line()] += 1

    def finding(self, kind: str, name: str, detail: str, size: float = 0.0) -> None:
        """A result that is silently wrong, or may be. Of several at one line the detail of the largest ``size`` is kept."""
        with self._lock:
            entry = self.findings.setdefault((kind, name, sources.line()), [0, detail, size])
            entry[0] += 1
            if size > entry[2]:
                entry[1:] = [detail, size]

    def refuse(self, name: str, error: Exception) -> None:
        """The real device refuses this call: raise, or in lenient mode record a finding "refused" and let it be computed.

        Args:
            name: the operator or function.
            error: what the device says.

        Raises:
            Exception: ``error``, unless lenient.
        """
        if not self.lenient:
            try:
                raise error
            finally:
                del error  # or the frame and its traceback would hold each other, and the tensors of the callers, after that
        if not self.paused:
            self.finding("refused", name, str(error))

    def attention_call(self, path: str, reasons: tuple[str, ...], shapes: str) -> None:
        """A call of scaled_dot_product_attention took this path, for these reasons if not the fused one."""
        with self._lock:
            self.attention[path, reasons, shapes, sources.line()] += 1

    def copy(self, direction: str, size: int) -> None:
        """Bytes crossed between host and device."""
        with self._lock:
            entry = self.copies.setdefault(direction, [0, 0])
            entry[0] += 1
            entry[1] += size

    def graph(self, name: str, first: bool) -> None:
        """torch.compile handed over a graph of this function; not the ``first`` at the same place is a recompilation."""
        with self._lock:
            entry = self.graphs.setdefault(name, [0, 0])
            entry[0] += 1
            entry[1] += not first

    def collective(self, name: str) -> None:
        """A collective operation ran."""
        with self._lock:
            self.collectives[name] += 1

    @property
    def compile_count(self) -> int:
        """Compilations by eager operators and by graphs together."""
        return sum(self.compiles.values()) + sum(entry[0] for entry in self.graphs.values())

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists and dictionaries for JSON, most frequent first."""
        with self._lock:
            return {
                "ops": dict(self.ops.most_common()),
                "compiles": [{"op": op, "line": line, "count": n} for (op, line), n in self.compiles.most_common()],
                "compile_count": self.compile_count,
                "graphs": [{"function": f, "graphs": n, "recompilations": r} for f, (n, r) in self.graphs.items()],
                "syncs": [{"what": what, "line": line, "count": n} for (what, line), n in self.syncs.most_common()],
                "fallbacks": [{"op": op, "line": line, "count": n} for (op, line), n in self.fallbacks.most_common()],
                "findings": [
                    {"kind": kind, "op": op, "line": line, "count": entry[0], "detail": entry[1]}
                    for (kind, op, line), entry in self.findings.items()
                ],
                "attention": [
                    {"path": path, "reasons": list(why), "shapes": shapes, "line": line, "count": n}
                    for (path, why, shapes, line), n in self.attention.most_common()
                ],
                "copies": {name: {"count": n, "bytes": size} for name, (n, size) in self.copies.items()},
                "collectives": dict(self.collectives),
                "peak_memory": self.peak() if self.peak else None,
                "peak_memory_line": self.peak_line() if self.peak_line else None,
            }
