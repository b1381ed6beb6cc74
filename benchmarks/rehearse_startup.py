"""How long `portable rehearse` takes before the program's first line, over importing torch; and what a whole empty run takes.

    python benchmarks/rehearse_startup.py                      # Trainium; --ascend too, where torch_npu is at hand

Each sample is a process of its own; the variants take turns. Wall time grows when others use the cores, processor time not.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import interleaved, spread, statement, table

# The program notes when it is reached; time.monotonic() is the same clock in all processes of a machine (Linux).
PROGRAM = "import time, sys; print(time.monotonic(), time.process_time())"


def started(command: list[str], environment: dict[str, str], whole: bool, processor: list[float]) -> Callable[[], float]:
    """Seconds from starting a process to its program's first line, or to its end; its processor time is added to a list."""

    def once() -> float:
        used, before = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        ended, seconds = map(float, done.stdout.splitlines()[-1].split())
        if whole:
            ended, after = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        processor.append(seconds)
        return ended - before

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
        processor: dict[str, list[float]] = {}
        variants: dict[str, Callable[[], float]] = {}

        def add(name: str, command: list[str], environment: dict[str, str], whole: bool) -> None:
            variants[name] = started(command, environment, whole, processor.setdefault(name, []))

        add("import torch", [sys.executable, "-c", f"import torch; {PROGRAM}"], plain, whole=False)
        for backend in ("neuron", "ascend") if arguments.ascend else ("neuron",):
            command = [sys.executable, "-m", "portable", "rehearse", "--backend", backend, str(program)]
            add(f"rehearse --backend {backend}, to the first line", command, environment, whole=False)
            command = [*command[:-1], "--json", str(Path(folder) / "r.json"), command[-1]]
            add(f"rehearse --backend {backend}, whole run with JSON", command, environment, whole=True)
        samples = interleaved(variants, arguments.rounds, warmup=1)
    busy = {name: statistics.median(times[1:]) for name, times in processor.items()}  # without the warm-up
    rows = [
        (
            name,
            *spread(sample, 1.0, 2),
            f"{sample.median - samples['import torch'].median:.2f}",
            f"{busy[name]:.2f}",
            f"{busy[name] - busy['import torch']:.2f}",
        )
        for name, sample in samples.items()
    ]
    table(("variant", "median s", "p20", "p80", "over import torch s", "processor s", "over import torch s"), rows)


if __name__ == "__main__":
    main()
