"""What `portable run` does: run a script or module as Python itself would, with CUDA redirected.

The script's own exit code, traceback, arguments and ``__main__`` are kept; frames of `portable` and of runpy do not show.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from portable.compat.engine import cuda_compat
from portable.compat.report import Recorder

USAGE = 2  # exit code for a script that cannot be run, as python's own
INTERRUPTED = 130


def run_script(
    target: str,
    args: list[str],
    *,
    module: bool = False,
    backend: str | None = None,
    report: Path | None = None,
    quiet: bool = False,
) -> int:
    """Run a program written for CUDA on another backend.

    Args:
        target: path of a script or of a folder with ``__main__.py``, or a module's name.
        args: the program's own arguments.
        module: ``target`` names a module, as after ``python -m``.
        backend: where to run; None for the active backend.
        report: JSON file for what was redirected; written even if the program fails.
        quiet: print no table at the end. Under torchrun only rank 0 prints and writes.

    Returns:
        The program's exit code: 0, what it gave to sys.exit, 1 after an uncaught exception, 130 after Ctrl-C, 2 if the script
        does not exist.

    Raises:
        BackendNotFound, BackendUnavailable: before anything is run.
    """
    if not module and not Path(target).exists():
        where = Path.cwd()
        print(f"portable run: no script {target!r} in {where}. Name an existing file, or a module with -m.", file=sys.stderr)
        return USAGE
    mode = cuda_compat(backend, Recorder())
    with mode, _as_main(target, args, module):
        name = mode.backend.spec.name
        try:
            code = _execute(target, module)
        finally:
            if os.environ.get("RANK", "0") == "0":
                _close(mode.recorder, name, report, quiet)
    return code


@contextmanager
def _as_main(target: str, args: list[str], module: bool) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [target, *args]
    # Python puts the script's folder first, the current folder with -m; what starts `portable` itself goes.
    first = "" if module else str(Path(target).resolve().parent if Path(target).is_file() else Path(target).resolve())
    sys.path[0] = first
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path


def _execute(target: str, module: bool) -> int:
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except SystemExit as stop:
        return _exit_code(stop)
    except KeyboardInterrupt as interrupt:
        _print_traceback(interrupt)
        return INTERRUPTED
    except BaseException as error:
        if module and isinstance(error, ImportError) and not _own_frames(error.__traceback__):
            print(f"portable run: no module {target!r} can be run: {error}", file=sys.stderr)
            return 1
        _print_traceback(error)
        return 1
    return 0


def _exit_code(stop: SystemExit) -> int:
    """As Python treats it: None is 0, a number is itself, anything else is printed and means 1."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first frame on."""
    ours = str(Path(__file__).parent) + os.sep
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((ours, "<frozen runpy>")) and file != runpy.__file__:
            return trace
        trace = trace.tb_next
    return None


def _print_traceback(error: BaseException) -> None:
    own = _own_frames(error.__traceback__)
    # A syntax error in the script itself has no frame of the script; Python shows it without any, too.
    traceback.print_exception(type(error), error, own)


def _close(recorder: Recorder, backend: str, report: Path | None, quiet: bool) -> None:
    sys.stdout.flush()
    if not quiet:
        recorder.show(backend)
    if report is not None:
        try:
            recorder.write(report, backend)
        except OSError as error:
            print(f"portable run: the report could not be written to {report}: {error}", file=sys.stderr)
