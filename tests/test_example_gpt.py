"""The demo: baselines, data order, model, learning, resuming, artefacts, and what it says to bad input."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train_gpt
from data.make_extract import extract
from gpt.checkpoint import read
from gpt.data import Corpus, EndlessShuffle, TextError, Windows, decode, encode, entropies, validation_batches
from gpt.display import Screen
from gpt.model import GPT, GPTConfig, rotary_tables, rotate
from gpt.sampling import generate
from gpt.training import Budget, Trainer, learning_rate_factor

EXAMPLES = Path(train_gpt.__file__).parent
SHIPPED = EXAMPLES / "data" / "kjv_extract.txt"
OPTIONS = {"width": 32, "layers": 2, "heads": 2, "context": 16, "batch": 16, "learning-rate": 1e-2, "dropout": 0.1}
TINY = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
STEPS = 120


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small is fastest on one thread, and several on busy cores wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(SHIPPED.read_text(encoding="utf-8")[:40_000], encoding="utf-8")
    return path


def arguments(text: Path, out: Path, *more: object) -> list[str]:
    length = () if "--minutes" in more or "--steps" in more else ("--steps", STEPS)
    return [str(part) for part in ("--text", text, "--out", out, "--backend", "cpu", *TINY, *length, *more)]


def outcome(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of the command line, run in this process."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *argv])
    code: int | str | None = 0
    try:
        train_gpt.run()
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return (1, out, f"{err}{code}") if isinstance(code, str) else (code or 0, out, err)


def losses(out: Path) -> list[tuple[str, str, str, str]]:
    """The loss curve without the times."""
    with (out / "loss.csv").open(encoding="utf-8", newline="") as file:
        return [
            (row["step"], row["learning_rate"], row["training_loss"], row["validation_loss"]) for row in csv.DictReader(file)
        ]


def unigram(text: str) -> float:
    counts = Counter(text)
    return math.log(len(text)) - sum(count * math.log(count) for count in counts.values()) / len(text)


def bigram(text: str) -> float:
    pairs, firsts = Counter(pairwise(text)), Counter(text[:-1])
    return -sum(count * math.log(count / firsts[pair[0]]) for pair, count in pairs.items()) / (len(text) - 1)


# --- text ---------------------------------------------------------------------------------------------------------------


@given(st.text(alphabet="abcd \n", min_size=2, max_size=200))
def test_entropies_are_those_of_the_formula(text: str) -> None:
    vocabulary = "".join(sorted(set(text)))
    assert entropies(encode(text, vocabulary), len(vocabulary)) == pytest.approx((unigram(text), bigram(text)), abs=1e-9)


def test_entropies_of_known_texts() -> None:
    assert entropies(encode("abcd" * 50, "abcd"), 4) == pytest.approx((math.log(4), 0.0))
    assert entropies(encode("aaaa", "a"), 1) == pytest.approx((0.0, 0.0))


def test_corpus_keeps_the_end_for_validation() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    corpus = Corpus.from_file(SHIPPED, 64)
    assert decode(corpus.training, corpus.vocabulary) + decode(corpus.validation, corpus.vocabulary) == text
    assert len(corpus.validation) == len(text) // 20
    assert corpus.vocabulary == "".join(sorted(set(text)))
    assert corpus.digest == hashlib.sha256(SHIPPED.read_bytes()).hexdigest()


def test_shipped_text_is_what_its_readme_says() -> None:
    readme = (SHIPPED.parent / "README.md").read_text(encoding="utf-8")
    data = SHIPPED.read_bytes()
    assert hashlib.sha256(data).hexdigest() in readme
    assert f"{len(data):,} bytes" in readme
    data.decode("ascii")


def test_extract_keeps_words_and_refuses_gaps() -> None:
    listing = ["Jude1:1 Jude, the servant.\n", "Jude1:2 Mercy unto you.\n", "Rev1:1 The Revelation.\n"]
    assert list(extract(listing)) == [
        *("Jude 1", "", "Jude, the servant.", "Mercy unto you."),
        *("", "Revelation 1", "", "The Revelation."),
    ]
    with pytest.raises(ValueError, match="line 2: expected verse 2 of Jude 1, found 3"):
        list(extract(["Jude1:1 a\n", "Jude1:3 c\n"]))
    with pytest.raises(ValueError, match="line 1 is not a verse"):
        list(extract(["Ge1:1 In the beginning\n"]))


@settings(deadline=None)
@given(
    length=st.integers(50, 400), context=st.integers(1, 20), batch=st.integers(1, 30), seed=st.integers(0, 9),
    first=st.integers(0, 40),
)  # fmt: skip
def test_order_can_be_taken_up_anywhere(length: int, context: int, batch: int, seed: int, first: int) -> None:
    whole = iter(EndlessShuffle(length, context, batch, seed))
    later = iter(EndlessShuffle(length, context, batch, seed, first))
    for _ in range(first):
        next(whole)
    for _ in range(5):
        starts = next(whole)
        assert starts.shape == (batch,)
        assert torch.equal(starts, next(later))
        assert starts.min() >= 0
        assert starts.max() + context + 1 <= length


def test_an_epoch_takes_each_window_once() -> None:
    shuffle = EndlessShuffle(1000, 10, 4, 0)
    first, second = shuffle.order(0), shuffle.order(1)
    for order in (first, second):
        steps = order.sort().values.diff()
        assert len(order) == 98
        assert (steps == 10).all()
    assert not torch.equal(first, second)
    assert torch.equal(first, EndlessShuffle(1000, 10, 7, 0).order(0))
    assert not torch.equal(first, EndlessShuffle(1000, 10, 4, 1).order(0))


def test_windows_and_their_targets() -> None:
    inputs, targets = Windows(torch.arange(100), 5)[torch.tensor([0, 42])]
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [42, 43, 44, 45, 46]]
    assert targets.tolist() == [[1, 2, 3, 4, 5], [43, 44, 45, 46, 47]]


def test_validation_takes_every_whole_window_once() -> None:
    corpus = Corpus.from_text("abcdefghij" * 100, 7)
    taken = torch.cat([inputs for inputs, _ in validation_batches(corpus, 7, 3)])
    assert torch.equal(taken.flatten(), corpus.validation[: 7 * ((50 - 1) // 7)])
    assert len(torch.cat([inputs for inputs, _ in validation_batches(corpus, 7, 3, limit=4)])) == 4


# --- model --------------------------------------------------------------------------------------------------------------


def test_default_model_has_five_to_ten_million_parameters_and_starts_from_ignorance() -> None:
    config = GPTConfig(73, 64, 384, 3, 6)
    model = GPT(config)
    per_block = 4 * config.width**2 + 3 * config.width * config.hidden + 2 * config.width
    assert model.parameter_count() == 73 * config.width + 3 * per_block + config.width
    assert 5e6 < model.parameter_count() < 10e6
    torch.manual_seed(0)
    tokens = torch.randint(73, (8, 64))
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), torch.randint(73, (512,)))
    assert loss.item() == pytest.approx(math.log(73), abs=0.3)


def test_no_position_sees_the_future() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(11, 16, 32, 2, 2)).eval()
    tokens = torch.randint(11, (3, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 11
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert (before[:, 9:] - after[:, 9:]).abs().amax() > 1e-3
    torch.testing.assert_close(model(tokens[:, :5]), before[:, :5], rtol=0, atol=1e-5)


def test_rotation_depends_on_distance_alone_and_matches_complex_multiplication() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator).unbind(0)
    cos, sin = rotary_tables(32, 8)
    queries, keys = (rotate(x.expand(1, 1, 32, 8), cos, sin)[0, 0] for x in (query, key))
    scores = queries @ keys.T
    for distance in (0, 1, 7):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-5)
    turns = torch.polar(torch.ones(4, dtype=torch.float64), 5 * 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4))
    expected = torch.complex(query[0, 0, 0, :4].double(), query[0, 0, 0, 4:].double()) * turns
    torch.testing.assert_close(queries[5].double(), torch.cat((expected.real, expected.imag)), rtol=0, atol=1e-6)


def test_shapes_that_are_no_model() -> None:
    with pytest.raises(ValueError, match=r"width 30 does not divide into 4 heads .* multiple of 8"):
        GPTConfig(10, 8, 30, 1, 4)
    with pytest.raises(ValueError, match="layers must be at least 1, found 0"):
        GPTConfig(10, 8, 32, 0, 4)
    with pytest.raises(ValueError, match="at most 8 characters at a time, found 9"):
        GPT(GPTConfig(10, 8, 32, 1, 4))(torch.zeros(1, 9, dtype=torch.long))


def test_generation_follows_the_seed_and_the_likeliest_when_cold() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(11, 8, 32, 1, 2))
    prompt = torch.tensor([1, 2, 3])
    warm = generate(model, prompt, 30, 1.0, seed=5)
    assert warm.shape == (33,)
    assert torch.equal(warm[:3], prompt)
    assert torch.equal(warm, generate(model, prompt, 30, 1.0, seed=5))
    assert not torch.equal(warm, generate(model, prompt, 30, 1.0, seed=6))
    assert model.training
    cold = generate(model, prompt, 10, 1e-4, seed=5)
    model.eval()
    for position in range(3, 13):
        likeliest = model(cold[None, max(0, position - 8) : position])[0, -1].argmax()
        assert cold[position] == likeliest


def test_learning_rate_and_budget() -> None:
    assert [learning_rate_factor(share) for share in (0.0, 0.025, 0.05, 0.525, 1.0)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert Budget(steps=200).share(50, 1e9) == 0.25
    assert Budget(seconds=60).share(10**9, 15) == 0.25
    assert Budget(seconds=60).share(0, 61) == 1.0


# --- the whole program --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder, standard output) of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("finished")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_gpt.py", *arguments(text, out)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return out, done.stdout


@pytest.fixture
def copied(finished: tuple[Path, str], tmp_path: Path) -> Path:
    """A folder with the finished run's checkpoints and nothing else."""
    for path in finished[0].glob("checkpoint*.pt"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_it_learns_more_than_characters_frequencies(finished: tuple[Path, str], text: Path) -> None:
    out, printed = finished
    words = text.read_text(encoding="utf-8")
    training = words[: len(words) - len(words) // 20]
    figures = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert figures["unigram_entropy"] == pytest.approx(unigram(training), abs=1e-9)
    assert figures["bigram_entropy"] == pytest.approx(bigram(training), abs=1e-9)
    assert figures["validation_loss"] < unigram(training) - 0.4
    assert figures["tokens"] == STEPS * 16 * 16
    assert figures["steps"] == STEPS
    assert (figures["backend"], figures["execution"]) == ("cpu", "hardware") and "execution" in printed
    assert f"{figures['validation_loss']:.3f} nats" in printed
    assert f"{figures['validation_loss'] / math.log(2):.3f} bits" in printed
    assert f"{unigram(training):.3f} nats" in printed
    assert f"{unigram(training) / math.log(2):.3f} bits" in printed


def test_it_leaves_curve_sample_and_checkpoint(finished: tuple[Path, str], text: Path) -> None:
    out, printed = finished
    from PIL import Image

    with Image.open(out / "loss.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (960, 600))
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 50, "an empty picture has few colours"
    sample = (out / "sample.txt").read_text(encoding="utf-8")
    assert set(sample) <= set(text.read_text(encoding="utf-8"))
    assert len(sample) == len("\n") + 600 + len("\n")
    assert sample.strip().splitlines()[0] in printed
    curve = losses(out)
    assert [row[0] for row in curve if row[2]] == [str(step) for step in range(10, STEPS + 1, 10)]
    assert sum(bool(row[3]) for row in curve) == 10
    checkpoint = read(out / "checkpoint.pt")
    assert checkpoint["step"] == STEPS
    assert checkpoint["history"]["training"][-1][4] == pytest.approx(float(curve[-1][2]), abs=1e-6)


def test_validation_loss_is_that_of_an_independent_computation(finished: tuple[Path, str], text: Path) -> None:
    corpus = Corpus.from_file(text, 16)
    model = GPT(GPTConfig(len(corpus.vocabulary), 16, 32, 2, 2)).eval()
    model.load_state_dict(read(finished[0] / "checkpoint.pt")["model"])
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(corpus.validation) - 16, 16):
            window = corpus.validation[start : start + 17]
            logs = model(window[None, :-1])[0].double().log_softmax(-1)
            total -= sum(logs[i, window[i + 1]].item() for i in range(16))
            count += 16
    figures = json.loads((finished[0] / "summary.json").read_text(encoding="utf-8"))
    assert figures["validation_characters"] == count
    assert figures["validation_loss"] == pytest.approx(total / count, abs=1e-5)


def test_killed_at_any_moment_it_ends_with_the_same_numbers(finished: tuple[Path, str], text: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    command = [sys.executable, EXAMPLES / "train_gpt.py", *arguments(text, tmp_path, "--save-every", 0)]
    checkpoint = tmp_path / "checkpoint.pt"
    kills = 0
    printed = ""
    for _ in range(2):
        before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > before):
            time.sleep(0.001)
        time.sleep(chance.uniform(0.05, 0.5))
        process.send_signal(signal.SIGKILL)
        printed, errors = process.communicate(timeout=60)
        assert errors == ""
        kills += process.returncode == -signal.SIGKILL
        assert 0 < read(checkpoint)["step"] <= STEPS
    assert kills > 0
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "going on from" in printed + done.stdout
    assert losses(tmp_path) == losses(finished[0])
    whole, resumed = read(finished[0] / "checkpoint.pt"), read(checkpoint)
    assert whole["step"] == resumed["step"] == STEPS
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name
    assert (tmp_path / "sample.txt").read_bytes() == (finished[0] / "sample.txt").read_bytes()


def test_sigterm_writes_a_checkpoint_and_the_same_command_goes_on(
    finished: tuple[Path, str],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    progress = Screen.progress

    def terminate_at_30(self: Screen, trainer: Trainer, loss: float, rate: float) -> None:
        progress(self, trainer, loss, rate)
        if trainer.step == 30:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Screen, "progress", terminate_at_30)
        code, out, _ = outcome(arguments(text, tmp_path, "--save-every", 1000), patch, capsys)
    assert code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM at step 30" in out
    assert read(tmp_path / "checkpoint.pt")["step"] == 30
    assert signal.getsignal(signal.SIGTERM) is handler
    code, out, err = outcome(arguments(text, tmp_path), monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert "step 30" in out
    assert losses(tmp_path) == losses(finished[0])


def test_a_finished_run_is_reported_again_and_can_be_lengthened(
    copied: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (copied / "checkpoint.pt").read_bytes()
    code, out, err = outcome(arguments(text, copied), monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert "nothing to train" in out
    assert (copied / "loss.png").exists()
    code, out, err = outcome(arguments(text, copied, "--steps", STEPS + 10), monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert read(copied / "checkpoint.pt")["step"] == STEPS + 10
    assert (copied / "checkpoint.prev.pt").read_bytes() == before


def test_a_budget_of_time_is_kept(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = outcome(arguments(text, tmp_path, "--minutes", 0.02), monkeypatch, capsys)
    assert (code, err) == (0, "")
    state = read(tmp_path / "checkpoint.pt")
    assert state["elapsed"] >= 1.2
    assert state["step"] > 0
    code, out, _ = outcome(arguments(text, tmp_path, "--minutes", 0.02), monkeypatch, capsys)
    assert code == 0
    assert "nothing to train" in out
    assert read(tmp_path / "checkpoint.pt")["step"] == state["step"]


def test_without_matplotlib_the_table_is_written(
    copied: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = outcome(arguments(text, copied), monkeypatch, capsys)
    assert code == 0
    assert "matplotlib is not installed" in out
    assert losses(copied)
    assert not (copied / "loss.png").exists()


# --- bad input ----------------------------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*") if path.name != ".lock"} if folder.is_dir() else {}


def refused(argv: list[str], out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message of a command that must be refused; checks that nothing in ``out`` changed."""
    before = files(out)
    code, _, err = outcome(argv, monkeypatch, capsys)
    assert code == 1
    assert err.startswith("error: ")
    assert "\n" not in err.strip()
    assert "Traceback" not in err
    assert files(out) == before
    return err


def test_a_damaged_checkpoint(
    copied: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, previous = copied / "checkpoint.pt", copied / "checkpoint.prev.pt"
    previous.write_bytes(newest.read_bytes())
    newest.write_bytes(newest.read_bytes()[:5000])
    message = refused(arguments(text, copied), copied, monkeypatch, capsys)
    assert re.search(r"checkpoint\.pt is cut off: its 5,000 bytes.*\(step 120\), is complete: give --from-previous", message)
    code, out, err = outcome(arguments(text, copied, "--from-previous"), monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert "kept as" in out
    assert (copied / "checkpoint.aside-1.pt").stat().st_size == 5000
    previous.unlink()
    newest.write_bytes(b"")
    assert "no sound earlier one" in refused(arguments(text, copied), copied, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--width", 48), "width: asked 48, found 32"),
        (("--layers", 1, "--heads", 4), "layers: asked 1, found 2; heads: asked 4, found 2"),
        (("--learning-rate", 2e-3), "learning_rate: asked 0.002, found 0.01"),
        (("--seed", 1), "seed: asked 1, found 0"),
    ],
)
def test_a_checkpoint_of_another_model(
    copied: Path,
    text: Path,
    options: tuple,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(arguments(text, copied, *options), copied, monkeypatch, capsys)
    assert f"belongs to another run. {expected}. Give the options" in message
    assert "--fresh" in message


def test_a_checkpoint_of_another_text(
    copied: Path, tmp_path_factory: pytest.TempPathFactory, text: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    other = tmp_path_factory.mktemp("other") / "other.txt"
    other.write_text(text.read_text(encoding="utf-8").replace("God", "*"), encoding="utf-8")
    message = refused(arguments(other, copied), copied, monkeypatch, capsys)
    found = len(set(text.read_text(encoding="utf-8")))
    assert f"vocabulary: asked {found + 1}, found {found}; text (SHA-256): asked" in message


def test_starting_over_keeps_the_old_checkpoint_until_there_is_a_new_one(
    copied: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (copied / "checkpoint.pt").read_bytes()

    def crash(*_: object, **__: object) -> None:
        raise TextError("stopped before the first checkpoint")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", crash)
        refused(arguments(text, copied, "--fresh"), copied, patch, capsys)
    assert (copied / "checkpoint.pt").read_bytes() == before
    code, _, _ = outcome(arguments(text, copied, "--fresh", "--steps", 5, "--width", 16), monkeypatch, capsys)
    assert code == 0
    assert read(copied / "checkpoint.pt")["step"] == 5
    assert (copied / "checkpoint.prev.pt").read_bytes() == before


def test_a_loss_that_is_no_number_does_not_reach_the_checkpoint(
    copied: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer._one_step

    def spoilt(self: Trainer, *batch: torch.Tensor, learning_rate: float) -> None:
        with torch.no_grad():
            self.model.norm.weight.fill_(math.nan)
        step(self, *batch, learning_rate=learning_rate)

    monkeypatch.setattr(Trainer, "_one_step", spoilt)
    longer = arguments(text, copied, "--steps", STEPS + 50, "--save-every", 0)
    message = refused(longer, copied, monkeypatch, capsys)
    assert "no longer a number" in message
    assert "--learning-rate" in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--minutes", 1, "--steps", 5), "--minutes and --steps were both given"),
        (("--from-previous", "--fresh"), "--from-previous and --fresh were both given"),
        (("--width", 34, "--heads", 4), "width 34 does not divide into 4 heads"),
        (("--learning-rate", -1), "--learning-rate -1.0 was given"),
        (("--prompt", "Ω"), "'Ω' cannot be encoded"),
        (("--context", 10_000), "has 40,000 characters; with a context of 10000 at least 200,020 are needed"),
        (("--backend", "nonsense"), "'nonsense' was asked for"),
    ],
)
def test_options_that_cannot_be_used(
    text: Path,
    tmp_path: Path,
    options: tuple,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert expected in refused(arguments(text, tmp_path, *options), tmp_path, monkeypatch, capsys)


def test_texts_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    latin, out = tmp_path / "latin.txt", tmp_path / "out"
    latin.write_bytes("Ä".encode("latin-1") * 5000)
    assert "is not UTF-8 (byte 0" in refused(arguments(latin, out), out, monkeypatch, capsys)
    assert "there is no such file" in refused(arguments(tmp_path / "absent.txt", out), out, monkeypatch, capsys)
    assert "cannot be read: Is a directory" in refused(arguments(tmp_path, out), out, monkeypatch, capsys)
    latin.write_text("")
    assert "has 0 characters" in refused(arguments(latin, out), out, monkeypatch, capsys)
    assert not out.exists()


def test_a_folder_that_is_a_file(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("precious")
    message = refused(arguments(text, blocked), blocked, monkeypatch, capsys)
    assert "cannot be used: File exists" in message
    assert blocked.read_text() == "precious"


def test_the_example_asks_no_device_which_it_is() -> None:
    sources = [EXAMPLES / "train_gpt.py", *(EXAMPLES / "gpt").glob("*.py")]
    assert len(sources) > 5
    vendor = re.compile(r"torch\.(cuda|npu|neuron|xpu|mps|accelerator)\b|is_available\(|device_type|\.type\b|device\.index")
    for source in sources:
        assert not vendor.search(source.read_text(encoding="utf-8")), source
