"""Ways to end that pass by the end of the program: os._exit and signals. The result is written first, then they end it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_WAIT = 10.0  # seconds for the result to be written, after a signal


class Endings:
    """Watches for them in this process; children go on as if it were not there.

    Args:
        by_exit: called with the code given to os._exit; answers the code to end with.
        by_signal: called before a signal ends the process.
    """

    def __init__(self, by_exit: Callable[[int], int], by_signal: Callable[[], None]) -> None:
        self._process = os.getpid()
        self._by_signal = by_signal
        leave = os._exit

        def leave_with_result(status: int) -> Any:
            # A name that a library has kept from before is not reached; multiprocessing's children call this one.
            if os.getpid() == self._process:
                status = by_exit(status)
            leave(status)

        self._leave = leave
        os._exit = leave_with_result  # type: ignore[assignment]
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == self._process:
            # In a thread of its own: the program may have been interrupted while it held a lock that the result needs.
            writer = threading.Thread(target=self._by_signal, daemon=True)
            writer.start()
            writer.join(_WAIT)
        os.kill(os.getpid(), number)

    def forget(self) -> None:
        """The result has been written; from here on everything ends as usual."""
        os._exit = self._leave
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) == self._signalled:
                    signal.signal(number, signal.SIG_DFL)
