"""A training step of the example GPT on an emulated device against the plain CPU, in one interleaved run; and start-up.

Both sides are float32, eager, AdamW fused, one process. The ratio of medians is what the emulation costs: passing each operator
through Python and counting it. Goals: at most 5; start-up at most 5 s over importing torch.

    python benchmarks/emulated.py                                                    # Trainium
    PORTABLE_ASCEND_HOST=1,path=.vendor python benchmarks/emulated.py --backend ascend
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from common import interleaved, spread, statement, table
from gpt.model import GPT, GPTConfig
from torch.nn import functional as F

from portable import selection

VOCABULARY = 65
SHAPES = {  # width, layers, heads, context, batch
    "example GPT (train_gpt.py's defaults)": (384, 3, 6, 64, 4),
    "small GPT": (64, 2, 4, 64, 4),
}


def stepper(device: torch.device, shape: tuple[int, int, int, int, int]) -> Callable[[], float]:
    """A function that takes one training step and answers its seconds."""
    width, layers, heads, context, batch = shape
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCABULARY, context, width, layers, heads)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draw = torch.Generator().manual_seed(1)

    def step() -> float:
        tokens = torch.randint(VOCABULARY, (batch, context + 1), generator=draw)
        started = time.perf_counter()
        x, y = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        step.loss = loss.item()  # type: ignore[attr-defined]
        return time.perf_counter() - started

    return step


def start_up(code: str) -> float:
    """Seconds that a statement takes in a fresh process that has imported torch."""
    program = f"import torch, time\nstarted = time.perf_counter()\n{code}\nprint(time.perf_counter() - started)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", default="neuron", help="neuron or ascend; a process has devices of one kind")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    statement()
    backend = selection.find(options.backend)
    backend.emulate()
    for name, shape in SHAPES.items():
        plain, emulated = stepper(torch.device("cpu"), shape), stepper(torch.device(backend.spec.device_type), shape)
        found = interleaved({"plain CPU": plain, "emulated": emulated}, options.rounds, warmup=3)
        print(f"{name}: width, layers, heads, context, batch = {shape}; {options.threads} thread(s)\n")
        table(("step", "median ms", "p20", "p80"), [(side, *spread(sample, 1e-3, 2)) for side, sample in found.items()])
        same = plain.loss == emulated.loss  # type: ignore[attr-defined]
        print(f"ratio of medians: {found['emulated'].median / found['plain CPU'].median:.2f}; last losses equal: {same}\n")
    codes = {
        "import portable": "import portable",
        "import portable and start the emulated device": (
            f"from portable import selection\nselection.find({options.backend!r}).emulate()\n"
            f"torch.ones(1, device={backend.spec.device_type!r}) + 1"
        ),
    }
    variants = {name: lambda code=code: start_up(code) for name, code in codes.items()}
    found = interleaved(variants, 7, warmup=1)
    table(("after import torch", "median ms", "p20", "p80"), [(name, *spread(s, 1e-3)) for name, s in found.items()])


if __name__ == "__main__":
    main()
