"""Counting optimizer steps, and what a device's counters did in each: PyTorch's hook for all optimizers is the clock.

A step ends when an optimizer has made its update. Of several optimizers, as a GAN has, the one with the most steps counts.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import optimizer

from portable.rehearsal import Recorder

_PATIENCE = 3  # how often the program may catch the stop before the process is ended without its help


@dataclass
class Spread:
    """How a count is spread over the steps.

    Attributes:
        first: before the end of the last of the ``warmup`` steps.
        later: in the steps after those.
        after: after the last step.
        later_steps: in how many of the later steps there was at least one.
    """

    first: int = 0
    later: int = 0
    after: int = 0
    later_steps: int = 0

    @property
    def total(self) -> int:
        return self.first + self.later + self.after


class Spreads:
    """Follows one counter of the recorder from step to step."""

    def __init__(self, read: Callable[[], Mapping[Any, int]], warmup: int) -> None:
        self._read = read
        self._warmup = warmup
        self._before: dict[Hashable, int] = {}
        self._spreads: dict[Hashable, Spread] = {}

    def restart(self) -> None:
        """Forget everything."""
        self._before, self._spreads = {}, {}

    def step(self, number: int) -> None:
        """The step of this number, from 1, has ended."""
        self._add(self._spreads, "first" if number <= self._warmup else "later")

    def now(self, steps: int) -> dict[Any, Spread]:
        """The spreads up to now; what came since the last step is after it, or first if there was none."""
        copies = {key: Spread(s.first, s.later, s.after, s.later_steps) for key, s in list(self._spreads.items())}
        self._add(copies, "after" if steps else "first", keep=False)
        return copies

    def _add(self, spreads: dict[Hashable, Spread], where: str, keep: bool = True) -> None:
        found = dict(self._read())
        for key, count in found.items():
            more = count - self._before.get(key, 0)
            if more > 0:
                spread = spreads.setdefault(key, Spread())
                setattr(spread, where, getattr(spread, where) + more)
                spread.later_steps += where == "later"
        if keep:
            self._before = found


class Steps:
    """The clock of one process.

    Args:
        recorder: whose counters are followed.
        limit: after how many steps to stop the program, None for never.
        listener: called after each step.

    Attributes:
        count: steps so far.
        stop: what was raised to end the program, None before the limit is reached.
    """

    def __init__(self, recorder: Recorder, limit: int | None = None, listener: Callable[[], None] | None = None) -> None:
        self.count = 0
        self.stop: SystemExit | None = None
        self.limit = limit
        self.finish: Callable[[int], None] | None = None  # what to do if the program does not let itself be stopped
        self._listener = listener
        self._lock = threading.RLock()
        self._each: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._caught = 0
        # The first compilation of each shape cannot be avoided; AdamW's own states come with step 1, so a loop is only
        # repeating itself from step 3 on.
        self.compiles = Spreads(lambda: recorder.compiles, warmup=2)
        self.syncs = Spreads(lambda: recorder.syncs, warmup=1)
        self.fallbacks = Spreads(lambda: recorder.fallbacks, warmup=1)
        self.attention = Spreads(lambda: recorder.attention, warmup=1)
        self.recompiles = Spreads(lambda: {name: again for name, (_, again) in list(recorder.graphs.items())}, warmup=2)
        self._all = (self.compiles, self.syncs, self.fallbacks, self.attention, self.recompiles)
        self._handle = optimizer.register_optimizer_step_post_hook(self._stepped)

    def restart(self) -> None:
        """In a forked child: count from nothing."""
        self._lock = threading.RLock()
        self.count, self._listener = 0, None
        self._each.clear()
        for spreads in self._all:
            spreads.restart()

    def _stepped(self, which: Any, args: Any, kwargs: Any) -> None:
        with self._lock:
            mine = self._each[which] = self._each.get(which, 0) + 1
            if mine > self.count:
                self.count = mine
                for spreads in self._all:
                    spreads.step(mine)
                if self._listener is not None and (self.limit is None or mine < self.limit):
                    self._listener()
        if self.limit is not None and self.count >= self.limit:
            self._stop()

    def _stop(self) -> None:
        self._caught += 1
        if self._caught > _PATIENCE and self.finish is not None:
            print("portable rehearse: the program caught its end several times; it is ended without its help", file=sys.stderr)
            atexit._run_exitfuncs()
            self.finish(0)
            sys.stdout.flush()
            os._exit(0)
        # As sys.exit: what handles errors does not catch it. No class of our own: threads end silently by SystemExit only.
        self.stop = SystemExit(0)
        raise self.stop
