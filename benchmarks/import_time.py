"""What `import portable` adds to `import torch`, and how long the command line takes to show its help.

Every sample is a fresh process. What is added to torch is timed inside the process, after torch has been imported, because
torch's own import varies by more than the difference. For commands both the wall time and the processor time (user and system,
from wait4) are shown: on a busy machine only the latter says what the command itself costs. Goals: `import portable` at most
10 ms over `import torch`; help in at most 150 ms.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from common import Sample, interleaved, spread, statement, table

TIMED = {
    "import torch": ("", "import torch"),
    "import portable, after torch": ("import torch", "import portable"),
    "first portable.device(), after both": ("import torch, portable", "portable.device()"),
    "import portable, alone": ("", "import portable"),
}
# As a user's process: with byte code kept between runs, whatever this shell says.
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
COMMANDS: dict[str, list[str] | None] = {
    "python -c pass": None,
    "python -c 'import typer'": None,
    "portable --help": ["--help"],
    "portable info --help": ["info", "--help"],
    "portable --version": ["--version"],
}


def inside(before: str, timed: str) -> float:
    """Seconds that a statement takes in a fresh process, after another one."""
    code = f"{before}\nimport time\nstarted = time.perf_counter()\n{timed}\nprint(time.perf_counter() - started)"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=ENVIRONMENT)
    return float(result.stdout.split()[-1])


def command(name: str) -> list[str]:
    """The console script next to this interpreter, or the module where it is not installed; or plain Python for scale."""
    arguments = COMMANDS[name]
    if arguments is None:
        return [sys.executable, *shlex.split(name)[1:]]
    script = Path(sys.executable).with_name("portable")
    return [*([str(script)] if script.exists() else [sys.executable, "-m", "portable"]), *arguments]


def process(words: list[str], processor: list[float]) -> float:
    """Wall time of a process; its processor time is appended to ``processor``."""
    started = time.perf_counter()
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    _, status, used = os.wait4(child.pid, 0)
    elapsed = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, words)
    processor.append(used.ru_utime + used.ru_stime)
    return elapsed


def loads_torch(arguments: list[str] | None) -> str:
    if arguments is None:
        return ""
    code = (
        f"import sys; sys.argv = ['portable', *{arguments!r}]\n"
        "from portable.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('yes' if 'torch' in sys.modules else 'no')"
    )
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    statement()
    found = interleaved({name: partial(inside, *code) for name, code in TIMED.items()}, rounds, warmup=1)
    table(("statement", "median ms", "p20", "p80"), [(name, *spread(sample, 1e-3)) for name, sample in found.items()])
    processor: dict[str, list[float]] = {name: [] for name in COMMANDS}
    variants = {name: partial(process, command(name), processor[name]) for name in COMMANDS}
    walls = interleaved(variants, 2 * rounds)
    rows = []
    for name, wall in walls.items():
        used = Sample(tuple(processor[name][-len(wall.times) :]))
        rows.append((name, *spread(wall, 1e-3), spread(used, 1e-3)[0], loads_torch(COMMANDS[name])))
    table(("command", "wall median ms", "p20", "p80", "processor median ms", "imports torch"), rows)


if __name__ == "__main__":
    main()
