"""What `portable run` does: run a script or module as Python itself would, with CUDA redirected.

The script's own exit code, traceback, arguments and ``__main__`` are kept; frames of `portable` and of runpy do not show.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import os
import runpy
import sys
import traceback
import zipfile
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from portable.compat import children
from portable.compat.engine import cuda_compat
from portable.compat.report import Recorder

USAGE = 2  # exit code for a script that cannot be read, as python's own
INTERRUPTED = 130
FULL = "PORTABLE_FULL_TRACEBACK"
"""Environment variable: 1 leaves the frames of `portable` in tracebacks."""

_OURS = str(Path(__file__).parent) + os.sep


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
    problem = None if module else _unreadable(target)
    if problem:
        print(f"portable run: {problem}. Name an existing script, or a module with -m.", file=sys.stderr)
        return USAGE
    mode = cuda_compat(backend, Recorder())
    mode.__enter__()
    if mode.replaces:
        children.expect(mode.recorder)
    # The program may change the current folder.
    file = report.absolute() if report else None
    close = partial(_close, mode.recorder, mode.backend.spec.name, mode.replaces, file, quiet, os.getpid())
    if not leave:
        atexit.register(close)  # these run in the reverse order, so it comes after all that the program registers
        _become(target, args, module)
        return _execute(target, module)
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    try:
        _become(target, args, module)
        return _execute(target, module)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before
        close()
        mode.__exit__(None, None, None)


def _unreadable(target: str) -> str | None:
    path = Path(target)
    if not path.exists():
        return f"no script {target!r} in {Path.cwd()}"
    if path.is_file():
        try:
            path.open("rb").close()
        except OSError as error:
            return f"the script {target!r} cannot be read: {error.strerror}"
    return None


def _become(target: str, args: list[str], module: bool) -> None:
    """Make the program's ``__main__``, ``sys.argv`` and ``sys.path`` what they are when Python starts it.

    They stay so, because threads, exit handlers and pickles look for them later.
    """
    sys.argv = ["-m" if module else target, *args]  # runpy puts the module's file there when it has found it
    if not getattr(sys.flags, "safe_path", False):  # with python -P nothing was put in front
        # Python puts the script's folder first, the current folder with -m; what started `portable` itself goes.
        resolved = Path(target).resolve()
        sys.path[0] = str(Path.cwd() if module else resolved.parent if resolved.is_file() and _is_code(target) else resolved)
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __cached__=None, __file__=None)
    sys.modules["__main__"] = main


def _is_code(target: str) -> bool:
    """Whether a file is a script or compiled code rather than an archive to import from."""
    return Path(target).is_file() and not zipfile.is_zipfile(target)


def _run(target: str, module: bool) -> None:
    if module or not _is_code(target):
        # What the interpreter itself calls for -m, folders and archives (Modules/main.c, pymain_run_module).
        runpy._run_module_as_main(target if module else "__main__", alter_argv=module)  # type: ignore[attr-defined]
        return
    file = f"{Path.cwd()}{os.sep}{target}" if not Path(target).is_absolute() else target  # as Python makes it absolute
    with io.open_code(file) as stream:
        source = stream.read()
    if b"\0" in source:
        runpy.run_path(target, run_name="__main__")  # compiled code
        return
    names = sys.modules["__main__"].__dict__
    names.update(__file__=file, __loader__=SourceFileLoader("__main__", file))
    exec(compile(source, file, "exec", dont_inherit=True), names)


def _execute(target: str, module: bool) -> int:
    try:
        _run(target, module)
    except SystemExit as stop:
        return _exit_code(stop)
    except KeyboardInterrupt as interrupt:
        _print_traceback(interrupt)
        return INTERRUPTED
    except BaseException as error:
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
    """The traceback without the frames of `portable` and runpy."""
    if os.environ.get(FULL) == "1":
        return trace
    kept: list[TracebackType] = []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((_OURS, "<frozen runpy>")) and file != runpy.__file__:
            kept.append(trace)
        trace = trace.tb_next
    chain: TracebackType | None = None
    for item in reversed(kept):
        chain = TracebackType(chain, item.tb_frame, item.tb_lasti, item.tb_lineno)
    return chain


def _print_traceback(error: BaseException) -> None:
    """Print as Python would, through the hook that the program may have set."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _own_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception:
        traceback.print_exception(type(error), error, error.__traceback__)


def _close(recorder: Recorder, backend: str, replaced: bool, report: Path | None, quiet: bool, process: int) -> None:
    if os.getpid() != process:  # a forked child that ends by itself has inherited the exit handler
        return
    children.gather(recorder)
    if os.environ.get("RANK", "0") != "0":
        return
    with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, which the interpreter reports itself
        sys.stdout.flush()
    if report is not None:
        try:
            recorder.write(report, backend)
        except OSError as error:
            print(f"portable run: the report could not be written to {report}: {error}", file=sys.stderr)
    if not quiet:
        try:
            recorder.show(backend, replaced)
        except Exception as error:  # a program may have emptied sys.path, or have a rich.py of its own
            print(f"portable run: the table could not be printed ({error}); --report FILE writes it as JSON", file=sys.stderr)
