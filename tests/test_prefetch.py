"""pt.prefetch: values, order and errors; and on a device that records what happens, the order of copies and hand-overs."""

from __future__ import annotations

from collections import namedtuple
from contextlib import contextmanager

import fakes
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import portable as pt
from portable.spec import Choice
from portable.support import emulated

Pair = namedtuple("Pair", "x y")
DEVICE = torch.device("fpga:0")


class Recorded(torch.Tensor):
    """A tensor that pretends to be on a device, and writes down what is done with it."""

    log: list[tuple]

    @staticmethod
    def make(value: float, log: list[tuple], where: torch.device | None = None, pinned: bool = False) -> Recorded:
        made = torch.full((2,), float(value)).as_subclass(Recorded)
        made.log, made.where, made.pinned = log, where or torch.device("cpu"), pinned
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:
        return self.where

    @property
    def number(self) -> int:
        return int(self.as_subclass(torch.Tensor)[0])

    def is_pinned(self) -> bool:
        return self.pinned

    def pin_memory(self) -> Recorded:
        self.log.append(("pin", self.number))
        return Recorded.make(self.number, self.log, pinned=True)

    def to(self, device: torch.device, non_blocking: bool = False) -> Recorded:
        self.log.append(("copy", self.number, device, self.pinned, non_blocking, Clock.stream))
        return Recorded.make(self.number, self.log, device)

    def record_stream(self, stream: object) -> None:
        self.log.append(("record", self.number, stream))


class Clock:
    """The stream that is current on the recording device."""

    stream: object = None


class RecordedStream:
    def __init__(self, name: str, log: list[tuple]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: RecordedStream) -> None:
        self.log.append(("wait", self.name, other.name))

    def __repr__(self) -> str:
        return self.name


@pytest.fixture
def recording(plugged):
    """A device with pinned memory and streams; yields its log, its main stream and its side streams."""
    log: list[tuple] = []
    main, sides = RecordedStream("main", log), []
    Clock.stream = main

    def make(device):
        assert device == DEVICE
        sides.append(RecordedStream(f"side{len(sides)}", log))
        return sides[-1]

    @contextmanager
    def enter(stream):
        before, Clock.stream = Clock.stream, stream
        try:
            yield
        finally:
            Clock.stream = before

    table = {"Stream": make, "stream": enter, "current_stream": lambda device: Clock.stream}
    plugged(fakes.Fake(table={name: emulated(function, "recorded") for name, function in table.items()}))
    pt.use("fake")
    return log, main, sides


# -- where nothing overlaps --------------------------------------------------------------------------------------------------


@pytest.fixture
def cpu(on_cpu):
    return on_cpu


def test_structures_come_back_as_they_were(cpu):
    batch = {"a": [torch.ones(2), ("text", 3)], "b": Pair(torch.zeros(1), None), "c": {1, 2}}
    (found,) = pt.prefetch([batch])
    assert type(found) is dict
    assert torch.equal(found["a"][0], torch.ones(2))
    assert found["a"][1] == ("text", 3)
    assert type(found["b"]) is Pair
    assert found["b"].y is None
    assert found["c"] == {1, 2}


def test_order_and_length(cpu):
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=3)
    batches = pt.prefetch(loader)
    assert len(batches) == len(loader) == 4
    for _ in range(2):  # two epochs
        assert [batch[0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_generator(cpu):
    batches = pt.prefetch(torch.full((1,), float(i)) for i in range(3))
    assert [batch.item() for batch in batches] == [0, 1, 2]
    assert list(batches) == []  # used up, as the generator is
    with pytest.raises(TypeError):
        len(batches)


@pytest.mark.parametrize("device", [None, 0, "cpu", "cpu:0", torch.device("cpu")])
def test_device_forms(cpu, device):
    (batch,) = pt.prefetch([torch.ones(1)], device)
    assert batch.device == torch.device("cpu")


@pytest.mark.parametrize("device", ["cuda", 1, True, "nonsense"])
def test_wrong_device_is_found_at_once(cpu, device):
    with pytest.raises(pt.PortableError):
        pt.prefetch([], device)


def failing(good: int, make=lambda i: torch.full((1,), float(i))):
    for i in range(good):
        yield make(i)
    raise OSError("disk")


def test_error_comes_at_its_batch(cpu):
    iterator = iter(pt.prefetch(failing(2)))
    assert [next(iterator).item(), next(iterator).item()] == [0, 1]
    with pytest.raises(OSError, match="disk"):
        next(iterator)


# -- on the recording device: every property of the plain path holds, and copies overlap ---------------------------------------


def test_next_copy_is_issued_before_the_batch_is_handed_over(recording):
    log, main, sides = recording
    for batch in pt.prefetch(Recorded.make(i, log) for i in range(3)):
        assert batch.device == DEVICE
        assert Clock.stream is main
        log.append(("work", batch.number))
    (side,) = sides

    def start(i):
        return [("pin", i), ("copy", i, DEVICE, True, True, side)]

    def finish(i):
        return [("wait", "main", "side0"), ("record", i, main)]

    # The wait for batch k comes before copy k+1 is queued (or it would wait for that too), and the copy before the work on k.
    assert log == [
        *start(0),
        *finish(0), *start(1), ("work", 0),
        *finish(1), *start(2), ("work", 1),
        *finish(2), ("work", 2),
    ]  # fmt: skip


def test_what_is_pinned_or_there_already_is_not_copied_again(recording):
    log, main, _ = recording
    pinned, there = Recorded.make(1, log, pinned=True), Recorded.make(2, log, DEVICE)
    ((first, second),) = pt.prefetch([(pinned, there)])
    assert second is there
    assert first.number == 1
    assert [entry[0] for entry in log] == ["copy", "wait", "record", "record"]
    assert ("record", 2, main) in log


@pytest.mark.parametrize("device", ["fpga", "fpga:0", DEVICE, 0, None])
def test_every_form_of_the_device_records_the_stream(recording, device):
    """A device without its ordinal does not equal the tensors' own, and record_stream would be left out."""
    log, _, _ = recording
    list(pt.prefetch([Recorded.make(0, log)], device))
    assert "record" in [entry[0] for entry in log]


def test_structures_on_the_device(recording):
    log, _, _ = recording
    batch = {"a": [Recorded.make(1, log), "text"], "b": Pair(Recorded.make(2, log), None)}
    (found,) = pt.prefetch([batch])
    assert [found["a"][0].number, found["b"].x.number] == [1, 2]
    assert found["a"][0].device == found["b"].x.device == DEVICE
    assert (found["a"][1], found["b"].y, type(found["b"])) == ("text", None, Pair)


def test_batches_that_are_none_are_kept(recording):
    assert list(pt.prefetch([None, 1, None])) == [None, 1, None]


def test_empty_loader(recording):
    log, _, _ = recording
    assert list(pt.prefetch([])) == []
    assert log == []


@pytest.mark.parametrize("good", [0, 1, 3])
def test_error_comes_after_the_good_batches(recording, good):
    log, _, _ = recording
    iterator = iter(pt.prefetch(failing(good, lambda i: Recorded.make(i, log))))
    assert [next(iterator).number for _ in range(good)] == list(range(good))
    with pytest.raises(OSError, match="disk"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_failing_copy_comes_at_its_batch(recording, monkeypatch):
    log, _, _ = recording
    original = Recorded.to

    def to(self, *args, **kwargs):
        if self.number == 2:
            raise torch.OutOfMemoryError("full")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Recorded, "to", to)
    with pytest.raises(torch.OutOfMemoryError):
        list(pt.prefetch(Recorded.make(i, log) for i in range(4)))
    iterator = iter(pt.prefetch(Recorded.make(i, log) for i in range(4)))
    assert [next(iterator).number, next(iterator).number] == [0, 1]
    with pytest.raises(torch.OutOfMemoryError):
        next(iterator)


def test_early_break_closes_the_loader(recording):
    log, _, _ = recording
    closed = []

    def loader():
        try:
            for i in range(100):
                yield Recorded.make(i, log)
        finally:
            closed.append(True)

    for batch in pt.prefetch(loader()):
        if batch.number == 2:
            break
    del batch
    assert closed == [True]
    assert max(entry[1] for entry in log if entry[0] == "copy") == 3  # one ahead, not more


def test_each_epoch_has_its_own_stream(recording):
    log, _, sides = recording
    batches = pt.prefetch([Recorded.make(i, log) for i in range(2)])
    for _ in range(2):
        assert [batch.number for batch in batches] == [0, 1]
    assert len(sides) == 2


def test_objects_that_move_themselves(recording):
    class Encoding:
        def __init__(self):
            self.moved = None

        def to(self, device):
            self.moved = (device, Clock.stream)
            return self

    (found,) = pt.prefetch([{"encoding": Encoding()}])
    assert found["encoding"].moved == (DEVICE, recording[1])  # on the stream that works with it


def test_packed_sequence_keeps_its_lengths_on_the_host(cpu):
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    ((found,),) = pt.prefetch([(packed,)])
    assert torch.equal(found.data, packed.data)
    assert torch.equal(found.batch_sizes, packed.batch_sizes)


def test_tuples_that_move_themselves_are_not_taken_apart(cpu):
    class Graph(Pair):
        def to(self, device):
            return ("moved", device)

    assert list(pt.prefetch([[Graph(torch.ones(1), 2)]])) == [[("moved", torch.device("cpu"))]]


def test_without_gain_nothing_is_pinned(plugged):
    """pin_memory=False in the declaration: plain moves, no streams."""
    log: list[tuple] = []
    plugged(fakes.Fake(fakes.spec(pin_memory=Choice(False, "shared memory"))))
    pt.use("fake")
    (batch,) = pt.prefetch([Recorded.make(4, log)])
    assert batch.device == DEVICE
    assert log == [("copy", 4, DEVICE, False, False, Clock.stream)]
