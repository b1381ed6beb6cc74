"""What `portable run` does: run a script or module as Python itself would (`portable.program`), with CUDA redirected."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from functools import partial
from pathlib import Path

from portable.backend import Backend
from portable.compat import children
from portable.compat.engine import cuda_compat
from portable.compat.report import Recorder
from portable.program import USAGE, become, execute, unreadable
from portable.provenance import execution, notice


def run_script(
    target: str,
    args: list[str],
    *,
    module: bool = False,
    backend: str | None = None,
    report: Path | None = None,
    quiet: bool = False,
    leave: bool = False,
) -> int:
    """Run a program written for CUDA on another backend.

    Args:
        target: path of a script or of a folder or archive with ``__main__.py``, or a module's name.
        args: the program's own arguments.
        module: ``target`` names a module, as after ``python -m``.
        backend: where to run; None for the active backend.
        report: JSON file for what was redirected; written even if the program fails.
        quiet: print no table at the end. Under torchrun only rank 0 prints and writes.
        leave: go back to how things were before and report at once, for a caller that goes on. Otherwise the program's
            threads and exit handlers still run on the backend, and the report comes after them, when the interpreter ends.

    Returns:
        The program's exit code: 0, what it gave to sys.exit, 1 after an uncaught exception, 130 after Ctrl-C, 2 if the script
        cannot be read.

    Raises:
        BackendNotFound, BackendUnavailable: before anything is run.
    """
    problem = None if module else unreadable(target)
    if problem:
        print(f"portable run: {problem}. Name an existing script, or a module with -m.", file=sys.stderr)
        return USAGE
    mode = cuda_compat(backend, Recorder())
    mode.__enter__()
    if mode.replaces:
        children.expect(mode.recorder)
    # The program may change the current folder.
    file = report.absolute() if report else None
    close = partial(_close, mode.recorder, mode.backend, mode.replaces, file, quiet, os.getpid())
    if not leave:
        atexit.register(close)  # these run in the reverse order, so it comes after all that the program registers
        become(target, args, module)
        return execute(target, module)
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    try:
        become(target, args, module)
        return execute(target, module)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before
        close()
        mode.__exit__(None, None, None)


def _close(recorder: Recorder, backend: Backend, replaced: bool, report: Path | None, quiet: bool, process: int) -> None:
    if os.getpid() != process:  # a forked child that ends by itself has inherited the exit handler
        return
    children.gather(recorder)
    if os.environ.get("RANK", "0") != "0":
        return
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, which the interpreter reports itself
        sys.stdout.flush()
    if report is not None:
        try:
            recorder.write(report, backend.spec.name, execution(backend))
        except OSError as error:
            print(f"portable run: the report could not be written to {report}: {error}", file=sys.stderr)
    if not quiet:
        try:
            recorder.show(backend.spec.name, replaced, notice(backend))
        except Exception as error:  # a program may have emptied sys.path, or have a rich.py of its own
            print(f"portable run: the table could not be printed ({error}); --report FILE writes it as JSON", file=sys.stderr)
