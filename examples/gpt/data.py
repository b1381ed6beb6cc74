"""Text: reading, vocabulary, entropies, and windows in an order that can be taken up anywhere."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

VALIDATION_SHARE = 0.05


class TextError(Exception):
    """A text that cannot be used; the message says what was asked, what was found and what to do."""


@dataclass(frozen=True)
class Corpus:
    """A text as numbers, divided in two: training first, then its contiguous end for validation.

    Attributes:
        vocabulary: the characters in the order of their numbers; those of the whole text, so that the validation part
            cannot hold an unknown one.
        training, validation: int64, one number a character.
        digest: SHA-256 of the text in UTF-8.
    """

    vocabulary: str
    training: Tensor
    validation: Tensor
    digest: str

    @classmethod
    def from_file(cls, path: Path, context: int) -> Corpus:
        """Read a UTF-8 text.

        Args:
            path: the file.
            context: characters that a window holds; each part must hold at least one window and its next character.

        Raises:
            TextError: the file is missing, is not UTF-8, or is too short.
        """
        try:
            text = path.read_bytes().decode("utf-8")
        except FileNotFoundError as error:
            raise TextError(f"the text {path} was asked for, but there is no such file. Check --text.") from error
        except OSError as error:
            raise TextError(f"the text {path} was asked for, but cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise TextError(
                f"the text {path} was asked for, but is not UTF-8 (byte {error.start}: {error.reason}). "
                "Convert it, for instance with `iconv -t utf-8`."
            ) from error
        return cls.from_text(text, context, str(path))

    @classmethod
    def from_text(cls, text: str, context: int, name: str = "the text") -> Corpus:
        """Divide a text. See `from_file`."""
        validation = int(len(text) * VALIDATION_SHARE)
        if validation <= context:
            need = math.ceil((context + 1) / VALIDATION_SHARE)
            raise TextError(
                f"{name} has {len(text):,} characters; with a context of {context} at least {need:,} are needed "
                f"({VALIDATION_SHARE:.0%} of them are kept for validation). Use a longer text or a smaller --context."
            )
        vocabulary = "".join(sorted(set(text)))
        numbers = encode(text, vocabulary)
        return cls(vocabulary, numbers[:-validation], numbers[-validation:], hashlib.sha256(text.encode("utf-8")).hexdigest())


def encode(text: str, vocabulary: str) -> Tensor:
    """Numbers of the characters, int64 of shape (len(text),).

    Raises:
        TextError: a character is not in the vocabulary.
    """
    number = {character: index for index, character in enumerate(vocabulary)}
    unknown = sorted(set(text) - set(number))
    if unknown:
        raise TextError(
            f"{', '.join(map(repr, unknown))} cannot be encoded: the text has only the characters {vocabulary!r}. Use these."
        )
    return torch.tensor([number[character] for character in text], dtype=torch.int64)


def decode(numbers: Tensor, vocabulary: str) -> str:
    """The text of numbers of shape (n,); the inverse of `encode`."""
    return "".join(vocabulary[index] for index in numbers.tolist())


def entropies(numbers: Tensor, vocabulary_size: int) -> tuple[float, float]:
    """Two baselines in nats per character: of single characters, and of a character given the one before it.

    The entropy H(X) = -sum p(x) ln p(x) of the characters' frequencies is the least loss of a model that ignores context;
    the conditional entropy H(Y|X) = H(X,Y) - H(X) over neighbouring pairs is the least of one that sees one character
    (Shannon 1951, Prediction and Entropy of Printed English, equation 1 for N = 1 and 2). Both are of this text itself: on
    other text such a model does worse.

    Args:
        numbers: int64 of shape (n,) with n >= 2.
        vocabulary_size: numbers lie below it.
    """
    pairs = numbers[:-1] * vocabulary_size + numbers[1:]
    pair_entropy = _entropy(torch.bincount(pairs))
    return _entropy(torch.bincount(numbers)), pair_entropy - _entropy(torch.bincount(numbers[:-1]))


def _entropy(counts: Tensor) -> float:
    share = counts[counts > 0].double() / counts.sum()
    return -(share * share.log()).sum().item()


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: given start positions, inputs and targets one further, each int64 (batch, context).

    The index is a whole batch of starts (``DataLoader(batch_size=None)``), so that a batch is gathered at once.
    """

    def __init__(self, numbers: Tensor, context: int) -> None:
        self.numbers = numbers
        self.context = context

    def __getitem__(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        window = self.numbers[starts[:, None] + torch.arange(self.context + 1)]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


class EndlessShuffle(Sampler[Tensor]):
    """Batches of start positions without end, each epoch in a new order, from any position on.

    An epoch cuts the text into windows that do not overlap, at an offset of its own, and takes each once. The order depends
    on seed and epoch alone: what a run has consumed is told by one number, the batches taken so far.

    Args:
        length: characters of the text.
        context: characters of a window.
        batch: windows of a batch.
        seed: of the orders.
        first: batches to leave out at the start.
    """

    def __init__(self, length: int, context: int, batch: int, seed: int, first: int = 0) -> None:
        self.length = length
        self.context = context
        self.batch = batch
        self.seed = seed
        self.first = first
        # One window less than fit, which leaves room for the offset and for the character after the last window.
        self.windows = max(1, (length - 1) // context - 1)

    def order(self, epoch: int) -> Tensor:
        """Start positions of one epoch, int64 of shape (windows,)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        room = self.length - 1 - self.windows * self.context
        offset = int(torch.randint(min(self.context, room) + 1, (), generator=generator))
        return offset + self.context * torch.randperm(self.windows, generator=generator)

    def __iter__(self) -> Iterator[Tensor]:
        epoch, taken = divmod(self.first * self.batch, self.windows)
        rest = self.order(epoch)[taken:]
        while True:
            while len(rest) < self.batch:
                epoch += 1
                rest = torch.cat((rest, self.order(epoch)))
            yield rest[: self.batch]
            rest = rest[self.batch :]


def training_batches(corpus: Corpus, context: int, batch: int, seed: int, first: int) -> DataLoader[tuple[Tensor, Tensor]]:
    """Endless loader of (inputs, targets), each int64 (batch, context), without its first ``first`` batches."""
    sampler = EndlessShuffle(len(corpus.training), context, batch, seed, first)
    # The generator is given because a loader without one draws from PyTorch's global generator when it starts, which
    # would move the dropout of a resumed run.
    return DataLoader(
        Windows(corpus.training, context), sampler=sampler, batch_size=None, generator=torch.Generator().manual_seed(seed)
    )


def validation_batches(corpus: Corpus, context: int, batch: int, limit: int | None = None) -> DataLoader[tuple[Tensor, Tensor]]:
    """Loader over the validation part in windows that do not overlap, in batches of ``batch`` windows.

    Args:
        corpus, context, batch: see `training_batches`. The last batch may be smaller.
        limit: most windows to take, spread evenly over the part; all that fit if None.
    """
    fit = (len(corpus.validation) - 1) // context
    count = fit if limit is None else min(fit, limit)
    starts = torch.linspace(0, fit - 1, count, dtype=torch.float64).round().long() * context
    return DataLoader(
        Windows(corpus.validation, context),
        sampler=list(starts.split(batch)),  # any iterable of indices serves as a sampler
        batch_size=None,
        generator=torch.Generator(),
    )
