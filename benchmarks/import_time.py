"""What `import portable` adds to `import torch`, and how long the command line takes to show its help.

Every sample is a fresh process. Goals: `import portable` at most 10 ms over `import torch`; help in at most 150 ms.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial

from common import Sample, interleaved, spread, statement, table

IMPORTS = {
    "nothing": "",
    "import portable": "import portable",
    "import torch": "import torch",
    "import torch, portable": "import torch, portable",
    "import torch, portable; portable.device()": "import torch, portable; portable.device()",
}
COMMANDS = {"portable --help": ["--help"], "portable info --help": ["info", "--help"], "portable --version": ["--version"]}


def wall(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def script() -> list[str]:
    """The console script next to this interpreter, or the module where it is not installed."""
    from pathlib import Path

    path = Path(sys.executable).with_name("portable")
    return [str(path)] if path.exists() else [sys.executable, "-m", "portable"]


def loads_torch(arguments: list[str]) -> bool:
    code = (
        f"import sys; sys.argv = ['portable', *{arguments!r}]\n"
        "from portable.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return result.stdout.splitlines()[-1] == "True"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    statement()
    found = interleaved({name: partial(wall, [sys.executable, "-c", code]) for name, code in IMPORTS.items()}, rounds)
    table(("process", "median ms", "p20", "p80"), [(name, *spread(sample, 1e-3)) for name, sample in found.items()])
    for name, base in (("import portable", "nothing"), ("import torch, portable", "import torch")):
        differences = Sample(tuple(a - b for a, b in zip(found[name].times, found[base].times, strict=True)))
        middle, low, high = spread(differences, 1e-3)
        print(f"{name!r} over {base!r}, paired by round: median {middle} ms (p20 {low}, p80 {high})")
    print()
    helps = interleaved({name: partial(wall, [*script(), *arguments]) for name, arguments in COMMANDS.items()}, rounds)
    rows = [(name, *spread(sample, 1e-3), loads_torch(COMMANDS[name])) for name, sample in helps.items()]
    table(("command", "median ms", "p20", "p80", "imports torch"), rows)


if __name__ == "__main__":
    main()
