"""Checkpoints of the demo: complete after a kill at any moment, and clear about what is wrong with a file."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import time
import zipfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    CheckpointMismatch,
    DamagedCheckpoint,
    only_user,
    read,
    require_same,
)

# Children that start from a process of one thread: forking this one would copy locks that PyTorch's threads hold.
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["torch"])
NUMBERS = 1_000_000


def content(step: int) -> dict:
    """A checkpoint of about 4 MB whose every part tells its step."""
    return {"step": step, "model": {"w": torch.full((NUMBERS,), float(step))}, "names": ["a", {"b": (1, 2.5)}]}


def whole(found: dict) -> bool:
    return bool((found["model"]["w"] == found["step"]).all()) and found["model"]["w"].numel() == NUMBERS


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_content_comes_back(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).save({**content(7), "bf16": torch.tensor([1.5], dtype=torch.bfloat16)})
    found, path = CheckpointFolder(tmp_path).load()  # type: ignore[misc]
    assert path == tmp_path / "checkpoint.pt"
    assert whole(found)
    assert found["step"] == 7
    assert found["names"] == ["a", {"b": (1, 2.5)}]
    assert found["bf16"].dtype is torch.bfloat16
    assert found["bf16"].item() == 1.5


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path).load() is None
    with pytest.raises(CheckpointError, match=r"checkpoint\.prev\.pt does not exist.*--fresh"):
        CheckpointFolder(tmp_path).load(previous=True)


@pytest.mark.parametrize("links", [True, False])
def test_the_one_before_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def no_links(*_: object) -> None:
        raise OSError("hard links are not supported")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        folder.save(content(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.prev.pt", "checkpoint.pt"]
    assert read(folder.newest)["step"] == 3
    assert read(folder.previous)["step"] == 2
    assert folder.load(previous=True)[0]["step"] == 2  # type: ignore[index]
    folder.newest.unlink()  # what a kill between the two renames leaves where there are no links
    assert folder.load()[0]["step"] == 2  # type: ignore[index]


def _save_for_ever(folder: str, first: int, report: Connection) -> None:
    checkpoints = CheckpointFolder(Path(folder))
    report.send(first - 1)
    for step in range(first, first + 1_000_000):
        checkpoints.save(content(step))
        report.send(step)


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(1)
    folder = CheckpointFolder(tmp_path)
    folder.save(content(0))
    step, in_the_middle = 0, 0
    for _ in range(25):
        here, there = CHILDREN.Pipe(duplex=False)
        child = CHILDREN.Process(target=_save_for_ever, args=(str(tmp_path), step + 1, there))
        child.start()
        there.close()
        assert here.poll(60)
        acknowledged = here.recv()
        time.sleep(chance.uniform(0.0, 0.08))
        child.kill()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        try:
            while here.poll():
                acknowledged = here.recv()
        except EOFError:
            pass
        in_the_middle += bool(list(tmp_path.glob(".checkpoint-*")))
        found, path = folder.load()  # type: ignore[misc]
        assert path == folder.newest
        assert whole(found)
        # Every save that returned counts, and the one after it may have been finished.
        assert found["step"] in (acknowledged, acknowledged + 1)
        if folder.previous.exists():
            assert whole(read(folder.previous))
        step = found["step"]
    assert in_the_middle > 0, "no kill fell into a save, so this run showed nothing; lengthen the saves"
    assert step > 0
    folder.save(content(step + 1))
    assert not list(tmp_path.glob(".checkpoint-*")), "a save clears away what killed ones left"


@pytest.mark.parametrize("kept", [0, 1, 30, 0.5, 0.99, -1])
def test_a_file_cut_off_is_reported_and_left_alone(tmp_path: Path, kept: float) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(content(1))
    folder.save(content(2))
    size = folder.newest.stat().st_size
    cut = int(kept * size) if isinstance(kept, float) else kept % size
    folder.newest.unlink()
    folder.newest.write_bytes(folder.previous.read_bytes()[:cut])
    before = bytes_of(tmp_path)
    with pytest.raises(DamagedCheckpoint) as caught:
        folder.load()
    message = str(caught.value)
    assert str(folder.newest) in message
    assert f"{cut:,} bytes" in message
    assert ("cut off" if cut > 4 else "not a checkpoint") in message
    assert "step 1" in message
    assert "--from-previous" in message
    assert bytes_of(tmp_path) == before
    assert folder.load(previous=True)[0]["step"] == 1  # type: ignore[index]


def test_a_flipped_bit_in_a_weight_is_reported(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(content(1))
    with zipfile.ZipFile(folder.newest) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    data = bytearray(folder.newest.read_bytes())
    data[largest.header_offset + largest.file_size // 2] ^= 1
    folder.newest.write_bytes(data)
    unnoticed = torch.load(folder.newest, weights_only=True)
    assert not whole(unnoticed), "torch.load itself takes the wrong weight, which is why the checksums are checked"
    with pytest.raises(DamagedCheckpoint, match=r"checksum of its part .* does not match.*no sound earlier one.*--fresh"):
        folder.load()


class Malicious:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (os.mkdir, (self.path,))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    torch.save({"format": "portable-example-gpt", "version": 1, "step": Malicious(str(trace))}, tmp_path / "checkpoint.pt")
    with pytest.raises(DamagedCheckpoint, match="objects other than tensors"):
        CheckpointFolder(tmp_path).load()
    assert not trace.exists()
    pickle.loads(pickle.dumps(Malicious(str(trace))))
    assert trace.exists(), "the file would have run code"


def test_files_of_other_programs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    folder = CheckpointFolder(tmp_path)
    torch.save({"model": torch.zeros(3)}, path)
    with pytest.raises(DamagedCheckpoint, match="saved by another one"):
        folder.load()
    torch.save(torch.zeros(3), path)
    with pytest.raises(DamagedCheckpoint, match="saved by another one"):
        folder.load()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no checkpoint")
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        folder.load()
    path.write_text("no checkpoint at all\n")
    with pytest.raises(DamagedCheckpoint, match="is not a checkpoint: its 21 bytes"):
        folder.load()
    torch.save({"format": "portable-example-gpt", "version": 99}, path)
    with pytest.raises(DamagedCheckpoint, match=r"version 99 .* reads version 1"):
        folder.load()


def test_going_on_from_the_one_before_keeps_the_damaged_file(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(content(1))
    folder.save(content(2))
    folder.newest.unlink()
    folder.newest.write_bytes(b"damaged")
    assert folder.set_newest_aside() == tmp_path / "checkpoint.aside-1.pt"
    assert folder.load()[0]["step"] == 1  # type: ignore[index]
    folder.save(content(2))
    folder.save(content(3))
    assert (tmp_path / "checkpoint.aside-1.pt").read_bytes() == b"damaged"
    assert folder.set_newest_aside() == tmp_path / "checkpoint.aside-2.pt"
    assert folder.set_newest_aside() is None


def test_every_difference_is_listed() -> None:
    require_same(Path("x.pt"), {"a": 1, "b": "y"}, {"b": "y", "a": 1}, "")
    with pytest.raises(CheckpointMismatch) as caught:
        require_same(Path("x.pt"), {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 4}, "Do this.")
    assert caught.value.differences == {"b": (2, 5), "c": (3, "nothing"), "d": ("nothing", 4)}
    assert str(caught.value) == (
        "x.pt belongs to another run. b: asked 2, found 5; c: asked 3, found nothing; d: asked nothing, found 4. Do this."
    )


def _save_without_room(folder: str, report: Connection) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        CheckpointFolder(Path(folder)).save(content(2))
        report.send("it was written")
    except CheckpointError as error:
        report.send(str(error))


def test_a_write_that_fails_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(content(1))
    before = bytes_of(tmp_path)
    here, there = CHILDREN.Pipe(duplex=False)
    child = CHILDREN.Process(target=_save_without_room, args=(str(tmp_path), there))
    child.start()
    assert here.poll(60)
    message = here.recv()
    child.join(60)
    assert "was to be written" in message
    assert f"is kept: {folder.newest}" in message
    assert "--out" in message
    assert bytes_of(tmp_path) == before


def _hold(folder: str, report: Connection) -> None:
    with only_user(Path(folder)):
        report.send("held")
        time.sleep(600)


def test_a_folder_has_one_user_until_it_is_killed(tmp_path: Path) -> None:
    here, there = CHILDREN.Pipe(duplex=False)
    child = CHILDREN.Process(target=_hold, args=(str(tmp_path), there))
    child.start()
    assert here.poll(60)
    assert here.recv() == "held"
    with pytest.raises(CheckpointError, match="another run is writing to it"), only_user(tmp_path):
        pass
    child.kill()
    child.join(60)
    with only_user(tmp_path):
        pass
