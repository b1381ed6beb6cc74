"""Train a character-level GPT on a book, on whatever device there is.

    python examples/train_gpt.py                  # about two minutes, result in out/
    python examples/train_gpt.py --steps 2000     # by steps: repeats exactly on one machine
    python examples/train_gpt.py --minutes 10     # goes on where out/ stands

Written against `portable` only: no line here or in gpt/ asks which device it runs on.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from gpt.checkpoint import CheckpointError, CheckpointFolder, only_user
from gpt.data import Corpus, TextError, decode, encode, entropies
from gpt.display import Screen, Summary
from gpt.model import GPTConfig
from gpt.plot import write_picture, write_table
from gpt.sampling import generate
from gpt.training import Budget, Recipe, Trainer, TrainingError
from rich.console import Console

import portable as pt

HERE = Path(__file__).resolve().parent
TEXT = HERE / "data" / "kjv_extract.txt"
DEFAULT_MINUTES = 2.0
SAMPLE_CHARACTERS = 600
SAMPLE_TEMPERATURE = 0.7

console = Console(soft_wrap=True)


class UsageError(Exception):
    """Options that contradict each other or cannot be used."""


def main(
    minutes: Annotated[
        float | None,
        typer.Option(
            help=f"Train this long, earlier parts of the run included ({DEFAULT_MINUTES:g} if neither this "
            "nor --steps is given).",
            min=0.01,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Train this many steps instead; such a run repeats exactly.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="Folder of checkpoint, curve and sample.")] = Path("out"),
    text: Annotated[Path, typer.Option(help="A UTF-8 text to learn.", show_default="the extract in examples/data")] = TEXT,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh",
            help="Go on from the checkpoint in --out if there is one, or start over (the old "
            "checkpoint stays until the new run has written its own).",
        ),
    ] = True,
    from_previous: Annotated[
        bool, typer.Option("--from-previous", help="Go on from the checkpoint before the newest (if that is damaged).")
    ] = False,
    backend: Annotated[str, typer.Option(help="auto, cpu, cuda, ascend, neuron, or another plugin's backend.")] = "auto",
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the model. Off, because compiling took 24 s on two CPU cores "
            "and then saved 7 % of each step: it pays from about six minutes on.",
        ),
    ] = False,
    save_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", min=0)] = 15.0,
    seed: Annotated[int, typer.Option(help="Of weights, order of the text, and sample.", min=0, max=2**32 - 1)] = 0,
    width: Annotated[int, typer.Option(help="Size of the residual stream.", min=1)] = 384,
    layers: Annotated[int, typer.Option(help="Transformer blocks.", min=1)] = 3,
    heads: Annotated[int, typer.Option(help="Attention heads.", min=1)] = 6,
    context: Annotated[int, typer.Option(help="Characters that the model sees at a time.", min=2)] = 64,
    dropout: Annotated[float, typer.Option(help="Share of activations dropped in training.", min=0.0, max=0.9)] = 0.0,
    batch: Annotated[int, typer.Option(help="Windows of a step.", min=1)] = 4,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate of AdamW.")] = 5e-4,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of matrices.", min=0)] = 0.1,
    prompt: Annotated[str, typer.Option(help="What the sample goes on from.", show_default="a new line")] = "",
) -> None:
    """Train a character-level GPT and leave checkpoint, loss curve and a sampled text in a folder."""
    if minutes is not None and steps is not None:
        raise UsageError("--minutes and --steps were both given; a run has one budget. Give one of them.")
    if from_previous and not resume:
        raise UsageError("--from-previous and --fresh were both given; they contradict each other. Give one of them.")
    if learning_rate <= 0:
        raise UsageError(f"--learning-rate {learning_rate} was given; it must be above 0, for instance 5e-4.")
    budget = Budget(steps=steps) if steps is not None else Budget(seconds=60 * (minutes or DEFAULT_MINUTES))
    if backend != "auto":  # else PORTABLE_BACKEND decides, and then what is available
        pt.use(backend)
    corpus = Corpus.from_file(text, context)
    start = prompt or ("\n" if "\n" in corpus.vocabulary else corpus.vocabulary[0])
    opening = encode(start, corpus.vocabulary)
    try:
        config = GPTConfig(len(corpus.vocabulary), context, width, layers, heads, dropout)
    except ValueError as error:
        raise UsageError(f"{error}.") from error
    recipe = Recipe(batch, learning_rate, weight_decay, seed)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with only_user(out):
            trainer = Trainer(config, recipe, corpus, compiled)
            console.print(
                f"{trainer.model.parameter_count() / 1e6:.2f} M parameters on {pt.device()} ({pt.get_device_name()}), "
                f"{len(corpus.training):,} characters to learn from, {len(corpus.validation):,} kept for validation",
                highlight=False,
            )
            folder = CheckpointFolder(out)
            if resume:
                go_on(trainer, folder, budget, from_previous)
            train(trainer, folder, budget, save_every)
            report(trainer, out, opening_text=start, sample=decode(
                generate(trainer.model, opening, SAMPLE_CHARACTERS, SAMPLE_TEMPERATURE, seed), corpus.vocabulary
            ))  # fmt: skip
    except OSError as error:
        raise UsageError(
            f"--out {out} was given, but cannot be used: {error.strerror or error}. Choose another folder."
        ) from error


def go_on(trainer: Trainer, folder: CheckpointFolder, budget: Budget, from_previous: bool) -> None:
    """Restore the run in the folder, if there is one."""
    found = folder.load(previous=from_previous)
    if found is None:
        return
    state, path = found
    trainer.restore(state, path)
    used = budget.share(trainer.step, trainer.elapsed)
    what = f"{path} (step {trainer.step}, {trainer.elapsed:.0f} s)"
    if used < 1:
        console.print(f"going on from {what}: {used:.0%} of the budget is used", highlight=False)
    else:
        console.print(
            f"{what} has used the whole budget: nothing to train. Give more --minutes or --steps to go on, or --fresh to "
            "start over.",
            highlight=False,
        )
    if from_previous and (aside := folder.set_newest_aside()):
        console.print(f"the newest checkpoint is kept as {aside}", highlight=False)


def train(trainer: Trainer, folder: CheckpointFolder, budget: Budget, save_every: float) -> None:
    """Train to the end of the budget. Ctrl-C or SIGTERM writes a checkpoint and ends the program; a second one, at once."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        trainer.stop(signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Screen(console, budget) as screen:
            trainer.train(budget, folder, save_every, screen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if trainer.stopped:
        console.print(
            f"stopped by {trainer.stopped} at step {trainer.step}; {folder.newest} is complete. The same command goes on.",
            highlight=False,
        )
        raise typer.Exit(128 + signal.Signals[trainer.stopped])


def report(trainer: Trainer, out: Path, opening_text: str, sample: str) -> None:
    """Evaluate on the whole validation part; print and write the figures, the curve and the sample."""
    summary = Summary.of(trainer, trainer.evaluate(), *entropies(trainer.corpus.training, len(trainer.corpus.vocabulary)))
    written = {"sample": out / "sample.txt", "figures": out / "summary.json", "curve": out / "loss.csv"}
    written["sample"].write_text(sample + "\n", encoding="utf-8")
    summary.write(written["figures"])
    write_table(written["curve"], trainer.history)
    try:
        write_picture(
            out / "loss.png",
            trainer.history,
            {"unigram entropy": summary.unigram_entropy, "bigram entropy": summary.bigram_entropy},
            summary.validation_loss,
            f"Character GPT, {summary.parameters / 1e6:.1f} M parameters, {summary.seconds:.0f} s on {summary.backend}"
            + ("" if summary.execution == "hardware" else f" ({summary.execution})"),
        )
        written["picture"] = out / "loss.png"
    except ImportError:
        console.print("matplotlib is not installed: the curve is in the CSV only (pip install 'portable[demo]')")
    console.rule("sample")
    console.print(sample.strip(), markup=False, highlight=False)
    console.rule("result")
    console.print(summary.table())
    written["checkpoint"] = CheckpointFolder(out).newest
    for name, path in written.items():
        console.print(f"{name:<16} {path}", highlight=False)


def run() -> None:
    """The command line: an error that a user can mend is one message and exit code 1, without a traceback."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app()
    except (UsageError, TextError, CheckpointError, TrainingError, pt.PortableError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    run()
