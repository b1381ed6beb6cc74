"""Running a script or module as Python itself would.

The script's own exit code, traceback, arguments and ``__main__`` are kept; frames of `portable` and of runpy do not show.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import traceback
import zipfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

USAGE = 2
"""Exit code for a script that cannot be read, as python's own."""
INTERRUPTED = 130
FULL = "PORTABLE_FULL_TRACEBACK"
"""Environment variable: 1 leaves the frames of `portable` in tracebacks."""

_OURS = str(Path(__file__).parent) + os.sep


def unreadable(target: str) -> str | None:
    """Why a script cannot be run, None if it can be."""
    path = Path(target)
    if not path.exists():
        return f"no script {target!r} in {Path.cwd()}"
    if path.is_file():
        try:
            path.open("rb").close()
        except OSError as error:
            return f"the script {target!r} cannot be read: {error.strerror}"
    return None


def become(target: str, args: list[str], module: bool) -> None:
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


def execute(target: str, module: bool, ended: Callable[[BaseException], None] | None = None) -> int:
    """Run the program to its end.

    Args:
        target: path of a script, folder or archive, or a module's name.
        module: which of them.
        ended: told what ended the program if that was an exception (SystemExit included), before it is printed.

    Returns:
        The exit code, as Python would end: 0, what was given to sys.exit, 1 after an uncaught exception, 130 after Ctrl-C.
    """
    try:
        _run(target, module)
    except BaseException as error:
        if ended is not None:
            ended(error)
        if isinstance(error, SystemExit):
            return _exit_code(error)
        _print_traceback(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
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
