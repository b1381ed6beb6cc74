"""How much of the emulated device's memory is in use.

Each storage on the device is a block. It counts from the moment it is made until the last tensor over it is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class Block:
    """One allocation; gives its bytes back when it is collected. It hangs on the CPU tensor that owns the memory."""

    __slots__ = ("_freed", "size")

    def __init__(self, size: int, freed: deque[int]) -> None:
        self.size = size
        self._freed = freed

    def __del__(self) -> None:
        # Appending to a deque takes no lock, so it is safe wherever the interpreter collects garbage.
        self._freed.append(self.size)


class Memory:
    """The memory of one device.

    Args:
        total: bytes that it has.
        rounding: (granule, limit): sizes below the limit are rounded up to the granule.
        name: the device's name, for messages.
        refuse: called with "memory" and the error when there is not enough; if it returns, the memory is given all the same.
        where: answers the line of the program that runs.
    """

    def __init__(
        self,
        total: int,
        rounding: tuple[int, int],
        name: str,
        refuse: Callable[[str, Exception], None],
        where: Callable[[], str],
    ) -> None:
        self.total = total
        self._refuse = refuse
        self._where = where
        self.name = name
        self._granule, self._limit = rounding
        self.freed: deque[int] = deque()  # sizes given back, not yet taken from `used`
        self._used = 0
        self.peak = 0
        self.peak_line: str | None = None
        self._noted = 0  # the peak when the line was taken; taking it costs more than an allocation, so not for every byte
        self.allocations = 0

    @property
    def used(self) -> int:
        """Bytes in use now."""
        while True:
            try:
                self._used -= self.freed.popleft()
            except IndexError:
                return self._used

    def round(self, size: int) -> int:
        """What an allocation of this many bytes takes."""
        return size if size >= self._limit else -(-size // self._granule) * self._granule

    def check(self, size: int) -> int:
        """Whether this many bytes fit; answers what they take.

        Raises:
            torch.OutOfMemoryError: they do not.
        """
        size = self.round(size)
        used = self.used
        if used + size > self.total:
            self._refuse(
                "memory",
                torch.OutOfMemoryError(
                    f"{self.name} (emulated) out of memory: {size:,} bytes were asked for, {used:,} of {self.total:,} are in "
                    "use. Use a smaller batch, shorter sequences, activation checkpointing, or a device with more memory."
                ),
            )
        return size

    def block(self, size: int) -> Block:
        """Take memory.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """
        size = self.check(size)
        self._used += size
        self.allocations += 1
        if self._used > self.peak:
            self._new_peak(self._used)
        return Block(size, self.freed)

    def transient(self, size: int) -> None:
        """Memory that a kernel takes while it runs: it must fit, and counts for the peak."""
        size = self.check(size)
        if self._used + size > self.peak:
            self._new_peak(self._used + size)

    def _new_peak(self, size: int) -> None:
        self.peak = size
        if size > 1.01 * self._noted:
            self._noted = size
            self.peak_line = self._where()

    def reset_peak(self) -> None:
        """Let the peak start from what is in use now."""
        self.peak = self._noted = self.used
        self.peak_line = None
