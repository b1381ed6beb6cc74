"""The training loop: budget, learning rate, steps, evaluation, and everything that a checkpoint must hold."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import portable as pt
from gpt.checkpoint import CheckpointFolder, require_same
from gpt.data import Corpus, training_batches, validation_batches
from gpt.model import GPT, GPTConfig

WARMUP = 0.05  # share of the budget over which the learning rate rises from 0
BETAS = (0.9, 0.99)  # the second is below PyTorch's 0.999, whose average spans more steps than a short run has
CLIP = 1.0  # largest norm of the gradient
REPORT_EVERY = 10  # steps between readings of the loss; each waits for the device
EVALUATIONS = 10  # evaluations during a run, at equal shares of the budget
EVALUATION_CHARACTERS = 4096  # of the validation part, spread over it, for these; the final one takes all


class TrainingError(Exception):
    """Training that cannot go on; the message says what was found and what to do."""


@dataclass(frozen=True)
class Recipe:
    """How to train. Together with the model's configuration and the text it determines a run.

    Attributes:
        batch: windows of a step.
        learning_rate: its peak.
        weight_decay: of matrices; vectors have none.
        seed: of weights, dropout and order of the text.
    """

    batch: int
    learning_rate: float
    weight_decay: float
    seed: int


@dataclass(frozen=True)
class Budget:
    """How long to train: ``seconds`` or ``steps``, the other None.

    With seconds the learning rate follows the clock, so that it is down at the end on fast and slow machines alike. With
    steps a run repeats exactly.
    """

    seconds: float | None = None
    steps: int | None = None

    def share(self, step: float, elapsed: float) -> float:
        """Share of the budget used, 0 to 1, after ``step`` steps and ``elapsed`` seconds."""
        used = step / self.steps if self.steps is not None else elapsed / (self.seconds or math.inf)
        return min(1.0, used)


def learning_rate_factor(share: float) -> float:
    """Share of the peak learning rate at a share of the budget: a linear rise over `WARMUP`, then linear to 0.

    Decay to zero does better than to a tenth for short runs (Bergsma et al. 2025, arXiv:2502.15938).
    """
    return min(share / WARMUP, (1 - share) / (1 - WARMUP))


@dataclass
class History:
    """What the loss curve shows. Losses in nats per character.

    Attributes:
        training: rows (step, seconds, characters seen, learning rate, mean loss since the row before).
        validation: rows (step, seconds, characters seen, loss).
    """

    training: list[tuple[int, float, int, float, float]] = field(default_factory=list)
    validation: list[tuple[int, float, int, float]] = field(default_factory=list)


class Watcher(Protocol):
    """Who is told about progress."""

    def progress(self, trainer: Trainer, loss: float, rate: float) -> None:
        """A new mean training loss, and characters per second since the one before."""

    def evaluated(self, trainer: Trainer, loss: float) -> None:
        """A new validation loss."""


class Trainer:
    """A run: model, optimizer, position in the text, clock.

    Args:
        config, recipe, corpus: what to train, how, and on what.
        compiled: whether to train through `pt.compile`.
    """

    def __init__(self, config: GPTConfig, recipe: Recipe, corpus: Corpus, compiled: bool = False) -> None:
        self.config = config
        self.recipe = recipe
        self.corpus = corpus
        pt.seed_everything(recipe.seed)
        self.model = GPT(config).to(pt.device())
        self.forward: nn.Module = pt.compile(self.model) if compiled else self.model
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=recipe.learning_rate,
            betas=BETAS,
            **pt.optimizer_options("AdamW"),
        )
        self.scaler = pt.GradScaler()
        self.step = 0
        self.elapsed = 0.0
        self.evaluations = 0
        self.history = History()
        self._unread: list[Tensor] = []
        self._stop = ""

    @property
    def characters(self) -> int:
        """Characters trained on so far."""
        return self.step * self.recipe.batch * self.config.context

    def stop(self, reason: str) -> None:
        """Ask `train` to return after the present step (safe in a signal handler)."""
        self._stop = reason

    @property
    def stopped(self) -> str:
        """The reason given to `stop`, empty if none was."""
        return self._stop

    def train(self, budget: Budget, folder: CheckpointFolder, save_every: float, watcher: Watcher) -> None:
        """Train until the budget is used or `stop` is called; write a checkpoint now and then and at the end.

        Args:
            budget: counted from the beginning of the run, not of this call. Evaluations and checkpoints count as well.
            folder: where checkpoints go.
            save_every: seconds between checkpoints, 0 for one at each step.
            watcher: told about losses.

        Raises:
            TrainingError: the loss is no longer a number; the last checkpoint is from before.
            CheckpointError: a checkpoint could not be written.
        """
        self.forward.train()
        started = time.perf_counter() - self.elapsed
        saved, saved_at = time.perf_counter(), self.step
        computing, reported_at = 0.0, self.step
        batches = self._batches()
        while not self._stop and budget.share(self.step, self.elapsed) < 1:
            began = time.perf_counter()
            # Half a step on, so that where steps are counted neither the first nor the last has a rate of 0.
            rate = learning_rate_factor(budget.share(self.step + 0.5, self.elapsed))
            self._one_step(*next(batches), learning_rate=rate * self.recipe.learning_rate)
            loss = self._read_losses() if self.step % REPORT_EVERY == 0 else None
            self.elapsed = time.perf_counter() - started
            computing += time.perf_counter() - began
            if loss is not None:
                new = (self.step - reported_at) * self.recipe.batch * self.config.context
                watcher.progress(self, loss, new / computing)
                computing, reported_at = 0.0, self.step
            share = budget.share(self.step, self.elapsed)
            if share * EVALUATIONS >= self.evaluations + 1:
                self.evaluations = int(share * EVALUATIONS)
                loss, _ = self.evaluate(EVALUATION_CHARACTERS)
                self.history.validation.append((self.step, self.elapsed, self.characters, loss))
                watcher.evaluated(self, loss)
            if time.perf_counter() - saved >= save_every:
                folder.save(self.state())
                saved, saved_at = time.perf_counter(), self.step
            self.elapsed = time.perf_counter() - started
        if self.step > saved_at:
            folder.save(self.state())

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        loader = training_batches(self.corpus, self.config.context, self.recipe.batch, self.recipe.seed, first=self.step)
        return iter(pt.prefetch(loader))

    def _one_step(self, inputs: Tensor, targets: Tensor, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with pt.autocast():
            loss = F.cross_entropy(self.forward(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._unread.append(loss.detach())
        self.step += 1

    def _check_losses(self) -> list[float]:
        losses: list[float] = torch.stack(self._unread).tolist() if self._unread else []
        if not all(map(math.isfinite, losses)):
            raise TrainingError(
                f"the training loss is no longer a number (found at step {self.step}); the last checkpoint is from before "
                "that and is kept. Start over with --fresh and a lower --learning-rate."
            )
        return losses

    def _read_losses(self) -> float:
        losses = self._check_losses()
        self._unread.clear()
        mean = sum(losses) / len(losses)
        rate = self.optimizer.param_groups[0]["lr"]
        self.history.training.append((self.step, self.elapsed, self.characters, rate, mean))
        return mean

    @torch.no_grad()
    def evaluate(self, characters: int | None = None) -> tuple[float, int]:
        """Mean loss over the validation part in nats per character, and the number of characters it is the mean of.

        Args:
            characters: about how many to take, spread evenly over the part; all of its whole windows if None.
        """
        limit = None if characters is None else max(1, characters // self.config.context)
        loader: DataLoader[tuple[Tensor, Tensor]] = validation_batches(
            self.corpus, self.config.context, max(1, EVALUATION_CHARACTERS // self.config.context), limit
        )
        # The plain model, not the compiled one: other shapes would make it compile again.
        self.model.eval()
        sums, count = [], 0
        for inputs, targets in pt.prefetch(loader):
            with pt.autocast():
                logits = self.model(inputs)
            sums.append(F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum"))
            count += targets.numel()
        self.model.train()
        return sum(torch.stack(sums).tolist()) / count, count

    def description(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued: model, recipe, text; a flat dict of plain values."""
        return {
            **asdict(self.config),
            **asdict(self.recipe),
            "text (SHA-256)": self.corpus.digest,
        }

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, as tensors and plain containers."""
        return {
            "description": self.description(),
            "characters": self.corpus.vocabulary,
            "backend": pt.active().spec.name,
            "step": self.step,  # also the position in the text: one batch a step
            "elapsed": self.elapsed,
            "evaluations": self.evaluations,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "cpu_generator": torch.get_rng_state(),
            "device_generators": pt.get_rng_state_all(),
            "unread": self._check_losses(),
            "history": asdict(self.history),
        }

    def restore(self, state: dict[str, Any], path: Path) -> None:
        """Go on where `state` was taken.

        Args:
            state: what `CheckpointFolder.load` returned.
            path: its file, for messages.

        Raises:
            CheckpointMismatch: it belongs to another model, recipe or text. The trainer is then not changed.
        """
        advice = "Give the options and the text of that run to continue it, another --out to keep it, or --fresh to start over."
        require_same(path, self.description(), state["description"], advice)
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
        require_same(path, shapes, found, advice)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.elapsed = state["elapsed"]
        self.evaluations = state["evaluations"]
        self.history = History(
            [tuple(row) for row in state["history"]["training"]], [tuple(row) for row in state["history"]["validation"]]
        )
        self._unread = [torch.tensor(loss, device=pt.device()) for loss in state["unread"]]
        torch.set_rng_state(state["cpu_generator"])
        if state["backend"] == pt.active().spec.name and len(state["device_generators"]) == pt.device_count():
            pt.set_rng_state_all(state["device_generators"])
