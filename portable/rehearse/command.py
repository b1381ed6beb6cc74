"""What `portable rehearse` does, from the checked options to the exit status."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from portable import program, selection
from portable.backend import Backend
from portable.compat import children
from portable.compat.engine import cuda_compat
from portable.compat.report import Recorder
from portable.errors import ConfigurationError
from portable.rehearsal import Rehearsal, current
from portable.rehearse import markdown, terminal
from portable.rehearse.build import Subject, build
from portable.rehearse.costs import Costs
from portable.rehearse.endings import Endings
from portable.rehearse.environment import command_line, environment
from portable.rehearse.failure import explain
from portable.rehearse.observations import Observations, merged, observe
from portable.rehearse.options import Options
from portable.rehearse.output import Output
from portable.rehearse.result import Failure, Result, Run
from portable.rehearse.steps import StepLimit, Steps
from portable.rehearse.workers import Worker, expect

FINDINGS = 3
"""Exit status when --fail-on found something."""
_INTERVAL = 5.0  # seconds between two partial files


def rehearse(options: Options) -> int:
    """Run a program on emulated devices and report.

    Returns:
        The program's exit code, or 3 if there are findings that ``fail_on`` names.

    Raises:
        PortableError: the backend, its emulation, the program or a file to write cannot be had; nothing was run.
    """
    problem = None if options.module else program.unreadable(options.target)
    if problem:
        raise ConfigurationError(f"{problem}. Name an existing script, or a module with -m")
    rank = _number("RANK", 0)
    output = Output(options.json, options.markdown, rank)
    backend = selection.find(options.backend, " by --backend")
    rehearsal = _devices(backend, options)
    os.environ[selection.VARIABLE] = backend.spec.name  # for the processes that the program starts
    mode = cuda_compat(backend.spec.name, Recorder())
    mode.__enter__()
    children.expect(mode.recorder)
    rehearsal.keep_going(not options.strict)
    return _Session(options, backend, rehearsal, mode.recorder, output, rank).run()


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def _devices(backend: Backend, options: Options) -> Rehearsal:
    count = options.devices
    if count is None:
        count = 1 if backend.one_device_per_process else max(1, _number("LOCAL_WORLD_SIZE", 1))
    there = current()
    if there is not None and there.profile.device_type != backend.spec.device_type:
        raise ConfigurationError(
            f"devices of {backend.spec.name} were asked for, but this process has {there.profile.title} already, and PyTorch "
            "has one slot for devices from outside. Use a process for each"
        )
    known = set(backend.spec.generations)
    try:
        return backend.emulate(options.generation, count, options.memory)
    except ConfigurationError as error:
        if options.generation is None or (options.generation in known and options.generation not in str(error)):
            raise
        raise ConfigurationError(
            f"--generation {options.generation!r} was asked for on {backend.spec.name}: {error} "
            f"Its generations are {', '.join(sorted(known))}."
        ) from error


class _Session:
    """One rehearsal in this process, from the first partial result to the last."""

    def __init__(
        self, options: Options, backend: Backend, rehearsal: Rehearsal, compat: Recorder, output: Output, rank: int
    ) -> None:
        generation = backend.generation()
        name = generation.name if generation else options.generation or ""
        folder = str(Path.cwd())
        costs = backend.costs or Costs()
        self._subject = Subject(backend, rehearsal, name, costs, environment(backend, command_line()), folder)
        self._options = options
        self._compat = compat
        self._output = output
        self._rank = rank
        self._failure: Failure | None = None
        self._process = os.getpid()
        self._written = False
        self._steps = Steps(rehearsal.recorder, options.steps, self._stepped)
        self._steps.finish = self._stop_now
        self._worker: Worker = expect(rehearsal, self._steps, not options.strict)
        self._done = threading.Event()
        self._begun = Run(
            target=options.target,
            arguments=options.arguments,
            module=options.module,
            ended="still running",
            exit_code=None,
            steps=0,
            asked_steps=options.steps,
            strict=options.strict,
            processes=1,
            rank=rank,
            world_size=_number("WORLD_SIZE", 1),
            started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        self._ended: Any = "the end"

    def run(self) -> int:
        """Run the program to its end; the exit status of the command."""
        self._endings = Endings(self._exited, self._signalled)
        self._partial()
        if self._output.json is not None:
            threading.Thread(target=self._watch, daemon=True, name="portable rehearse").start()
        program.become(self._options.target, list(self._options.arguments), self._options.module)
        code = program.execute(self._options.target, self._options.module, self._note_end)
        # What the interpreter does when it ends, in its order, so that threads and exit handlers belong to the rehearsal.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        ended = "the step limit" if self._steps.stopped and code == 0 else self._ended
        return self._status(self._finish(ended, code), code)

    def _stop_now(self, code: int) -> None:
        self._finish("the step limit", code)

    def _exited(self, code: int) -> int:
        return self._status(self._finish("os._exit", code), code)

    def _signalled(self) -> None:
        self._finish("a signal", None)

    def _note_end(self, error: BaseException) -> None:
        if isinstance(error, StepLimit):
            self._ended = "the step limit"
        elif isinstance(error, SystemExit):
            self._ended = "sys.exit"
        elif isinstance(error, KeyboardInterrupt):
            self._ended = "a signal"
        else:
            self._ended = "an exception"
            home = str(Path(sys.modules[type(self._subject.backend).__module__].__file__ or "").parent)
            self._failure = explain(error, self._subject.folder, home, self._subject.costs)

    def _status(self, result: Result | None, code: int) -> int:
        return FINDINGS if result is not None and self._options.fails(result.worst()) else code

    # -- results -------------------------------------------------------------------------------------------------------------

    def _result(self, ended: Any, code: int | None, others: list[Observations], complete: bool) -> Result:
        mine = observe(self._subject.rehearsal, self._steps)
        users = [seen for seen in (mine, *others) if seen.ops] or [mine]
        seen = merged([mine, *others])
        run = replace(self._begun, ended=ended, exit_code=code, steps=seen.steps, processes=len(users))
        return build(self._subject, seen, run, self._failure, self._compat.entries(), complete)

    def _stepped(self) -> None:
        if self._steps.count == 1:
            self._partial()

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL):
            self._partial()

    def _partial(self) -> None:
        if os.getpid() == self._process and not self._written and self._output.json is not None:
            with contextlib.suppress(RuntimeError):  # a counter grew while it was read; the next one will do
                self._output.partial(self._result("still running", None, [], complete=False))

    def _finish(self, ended: Any, code: int | None) -> Result | None:
        """Write and show the result, once; None in a child process, or the second time."""
        if self._written or os.getpid() != self._process:
            return None
        self._written = True
        self._done.set()
        others = []
        if ended != "a signal":
            children.gather(self._compat)
            others = list(self._worker.gather())
        try:
            result = self._result(ended, code, others, complete=True)
        except Exception as error:  # the program's own exit status is worth more than the report
            kept = f"; {self._output.json}.partial has what was known before" if self._output.json else ""
            print(f"portable rehearse: the result could not be made ({type(error).__name__}: {error}){kept}", file=sys.stderr)
            return None
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, which the interpreter reports itself
            sys.stdout.flush()
        try:
            self._output.final(result, markdown.section)
        except OSError as error:
            print(f"portable rehearse: the result could not be written: {error}", file=sys.stderr)
        if self._rank == 0:
            try:
                terminal.show(result)
            except Exception as error:  # a program may have emptied sys.path, or have a rich.py of its own
                print(f"portable rehearse: the table could not be printed ({error}); --json FILE has it all", file=sys.stderr)
        self._endings.forget()
        return result
