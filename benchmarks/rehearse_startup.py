"""How long `portable rehearse` takes before the program's first line, over importing torch; and what a whole empty run takes.

    python benchmarks/rehearse_startup.py                      # Trainium; --ascend too, where torch_npu is at hand

Each sample is a process of its own; the variants take turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import interleaved, spread, statement, table

# The program notes when it is reached; time.monotonic() is the same clock in all processes of a machine (Linux).
PROGRAM = "import time, sys; print(time.monotonic())"


def started(command: list[str], environment: dict[str, str], whole: bool) -> Callable[[], float]:
    """Seconds from starting a process to its program's first line, or to its end."""

    def once() -> float:
        before = time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return (time.monotonic() if whole else float(done.stdout.splitlines()[-1])) - before

    return once


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ascend", action="store_true", help="also on the host ACL runtime (set PORTABLE_ASCEND_HOST)")
    arguments = parser.parse_args()
    statement()
    environment = dict(os.environ)
    plain = {**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM)
        variants = {"import torch": started([sys.executable, "-c", f"import torch; {PROGRAM}"], plain, whole=False)}
        for backend in ("neuron", "ascend") if arguments.ascend else ("neuron",):
            command = [sys.executable, "-m", "portable", "rehearse", "--backend", backend, str(program)]
            variants[f"rehearse --backend {backend}, to the first line"] = started(command, environment, whole=False)
            command = [*command[:-1], "--json", str(Path(folder) / "r.json"), command[-1]]
            variants[f"rehearse --backend {backend}, whole run with JSON"] = started(command, environment, whole=True)
        samples = interleaved(variants, arguments.rounds, warmup=1)
    base = samples["import torch"].median
    rows = [(name, *spread(sample, 1.0, 2), f"{sample.median - base:.2f}") for name, sample in samples.items()]
    table(("variant", "median s", "p20", "p80", "over import torch s"), rows)


if __name__ == "__main__":
    main()
