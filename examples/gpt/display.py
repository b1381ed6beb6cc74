"""What the demo prints: progress while it trains and the report at the end."""

from __future__ import annotations

import json
import math
import platform
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import portable as pt
from gpt.training import Budget, Trainer


class Screen:
    """A progress bar, with a line for each evaluation that stays; on a pipe or in a log file only those lines appear.

    Use as a context manager; it is the `gpt.training.Watcher` of a run.
    """

    def __init__(self, console: Console, budget: Budget) -> None:
        self.console = console
        self.budget = budget
        self.bar = Progress(
            TextColumn("step {task.fields[step]:>5}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TextColumn("{task.fields[memory]} MiB"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self.task = self.bar.add_task("", total=1.0, step=0, loss="-", speed="-", memory="-")

    def __enter__(self) -> Screen:
        self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bar.stop()

    def progress(self, trainer: Trainer, loss: float, rate: float) -> None:
        """Move the bar."""
        self.bar.update(
            self.task,
            completed=self.budget.share(trainer.step, trainer.elapsed),
            step=trainer.step,
            loss=f"{loss:.3f}",
            speed=f"{rate:,.0f}",
            memory=f"{pt.memory.allocated() / 2**20:,.0f}",
        )

    def evaluated(self, trainer: Trainer, loss: float) -> None:
        """Print a line."""
        training = f"{trainer.history.training[-1][4]:.3f}" if trainer.history.training else "-"
        self.console.print(
            f"  {trainer.elapsed:6.1f} s  step {trainer.step:>6}  {trainer.characters:>11,} tokens  "
            f"loss: training {training}, validation sample {loss:.3f}",
            highlight=False,
        )


@dataclass(frozen=True)
class Summary:
    """What a run came to. Losses and entropies in nats per character; a token is a character."""

    parameters: int
    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    validation_loss: float
    validation_characters: int
    unigram_entropy: float
    bigram_entropy: float
    peak_memory_bytes: int
    backend: str
    execution: str  # "hardware", or how the device was made without it
    device: str
    threads: int
    python: str
    torch: str
    portable: str
    command: str

    @classmethod
    def of(cls, trainer: Trainer, validation: tuple[float, int], unigram: float, bigram: float) -> Summary:
        """Take the figures of a run that has ended.

        Args:
            trainer: the run.
            validation: what `Trainer.evaluate` returned for the whole validation part.
            unigram, bigram: what `gpt.data.entropies` returned for the training part.
        """
        return cls(
            parameters=trainer.model.parameter_count(),
            steps=trainer.step,
            tokens=trainer.characters,
            seconds=trainer.elapsed,
            tokens_per_second=trainer.characters / trainer.elapsed if trainer.elapsed else 0.0,
            validation_loss=validation[0],
            validation_characters=validation[1],
            unigram_entropy=unigram,
            bigram_entropy=bigram,
            peak_memory_bytes=pt.memory.max_allocated(),
            backend=pt.active().spec.name,
            execution=pt.execution(),
            device=pt.get_device_name(),
            threads=torch.get_num_threads(),
            python=platform.python_version(),
            torch=torch.__version__,
            portable=pt.__version__,
            command=shlex.join(["python", *sys.argv]),
        )

    def write(self, path: Path) -> None:
        """Write as JSON."""
        part = path.with_suffix(".json.tmp")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        part.replace(path)

    def table(self) -> Table:
        """The figures for people."""
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column()
        table.add_column(justify="right")
        table.add_column(overflow="fold")

        def loss(name: str, nats: float, note: str) -> None:
            table.add_row(name, f"{nats:.3f} nats", f"= {nats / math.log(2):.3f} bits per character, {note}")

        gain = self.unigram_entropy - self.validation_loss
        below = "below" if gain >= 0 else "ABOVE"
        loss("validation loss", self.validation_loss, f"{self.validation_characters:,} characters")
        loss("unigram entropy", self.unigram_entropy, "training text")
        loss("bigram entropy", self.bigram_entropy, "training text")
        table.add_row("improvement", f"{gain:.3f} nats", f"{abs(gain) / self.unigram_entropy:.0%} {below} the unigram entropy")
        table.add_row("parameters", f"{self.parameters / 1e6:.2f} M", "")
        table.add_row("tokens", f"{self.tokens:,}", f"in {self.steps:,} steps; a token is a character")
        table.add_row("speed", f"{self.tokens_per_second:,.0f} /s", f"over {self.seconds:.0f} s, all included")
        table.add_row("peak memory", f"{self.peak_memory_bytes / 2**20:,.0f} MiB", "by pt.memory.max_allocated()")
        table.add_row(
            "execution", self.execution, "" if self.execution == "hardware" else "speed and memory are not the device's"
        )
        table.add_row("device", self.backend, f"{self.device}, torch {self.torch}, CPU threads: {self.threads}")
        return table
