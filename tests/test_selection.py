"""Which backend is used: order of precedence, messages, nesting, threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import fakes
import pytest
import torch

import portable as pt
from portable import selection
from portable.spec import Availability

ABSENT = Availability(False, "no driver answers", "install the driver")


def states(message: str, *parts: str) -> bool:
    """Every part occurs in the message, which is a single paragraph."""
    return "\n" not in message and all(part in message for part in parts)


def test_best_available_is_the_default(plugged):
    plugged(fakes.Fake(fakes.spec("low", priority=10)), fakes.Fake(fakes.spec("high", priority=50)))
    assert pt.active().spec.name == "high"


def test_unavailable_ones_are_passed_over(plugged):
    plugged(fakes.Fake(fakes.spec("high", priority=50), answer=ABSENT), fakes.Fake(fakes.spec("low", priority=10)))
    assert pt.active().spec.name == "low"


def test_equal_priorities_go_by_name(plugged):
    plugged(fakes.Fake(fakes.spec("b")), fakes.Fake(fakes.spec("a")))
    assert pt.active().spec.name == "a"


def test_environment_variable(plugged, monkeypatch):
    plugged(fakes.Fake())
    monkeypatch.setenv("PORTABLE_BACKEND", " CPU ")
    assert pt.active().spec.name == "cpu"


@pytest.mark.parametrize("value", ["", "auto"])
def test_environment_variable_that_leaves_the_choice(plugged, monkeypatch, value):
    plugged(fakes.Fake())
    monkeypatch.setenv("PORTABLE_BACKEND", value)
    assert pt.active().spec.name == "fake"


def test_use_wins_over_the_environment(plugged, monkeypatch):
    plugged(fakes.Fake())
    monkeypatch.setenv("PORTABLE_BACKEND", "fake")
    pt.use("cpu")
    assert pt.active().spec.name == "cpu"


def test_wrong_environment_variable_names_it(plugged, monkeypatch):
    plugged()
    monkeypatch.setenv("PORTABLE_BACKEND", "gpu")
    with pytest.raises(pt.BackendNotFound) as caught:
        pt.active()
    assert states(str(caught.value), "'gpu'", "PORTABLE_BACKEND", "cpu", "portable info")


def test_use_as_a_call_stays(plugged):
    plugged(fakes.Fake())
    pt.use("cpu")
    assert pt.device() == torch.device("cpu")
    pt.use("fake")
    assert pt.device() == torch.device("fpga:0")


def test_use_as_context_manager_nests_and_restores(plugged):
    plugged(fakes.Fake(fakes.spec("one")), fakes.Fake(fakes.spec("two")))
    pt.use("one")
    with pt.use("two") as two:
        assert two.spec.name == pt.active().spec.name == "two"
        with pt.use("cpu"):
            assert pt.active().spec.name == "cpu"
        assert pt.active().spec.name == "two"
    assert pt.active().spec.name == "one"


def test_use_restores_after_an_exception(plugged):
    plugged(fakes.Fake())
    pt.use("fake")
    with pytest.raises(KeyError), pt.use("cpu"):
        raise KeyError("x")
    assert pt.active().spec.name == "fake"


def test_use_object_can_be_entered_again(plugged):
    plugged(fakes.Fake())
    pt.use("fake")
    choice = pt.use("cpu")
    with choice:
        pass
    assert pt.active().spec.name == "fake"
    with choice:
        assert pt.active().spec.name == "cpu"
    assert pt.active().spec.name == "fake"


def test_use_before_any_choice_goes_back_to_none(plugged):
    plugged(fakes.Fake())
    with pt.use("cpu"):
        pass
    assert selection._active is None
    assert pt.active().spec.name == "fake"


def test_alias_and_case(plugged):
    plugged(fakes.Fake(fakes.spec("fake", aliases=("Pretend",))))
    assert pt.use("PRETEND").backend.spec.name == "fake"


def test_unknown_name(plugged):
    plugged(fakes.Fake())
    pt.use("cpu")
    with pytest.raises(pt.BackendNotFound) as caught:
        pt.use("tpu")
    assert states(str(caught.value), "'tpu'", "pt.use", "cpu, fake", "install the plugin")
    assert pt.active().spec.name == "cpu"
    assert isinstance(caught.value, LookupError)


def test_unavailable_name(plugged):
    plugged(fakes.Fake(answer=ABSENT))
    with pytest.raises(pt.BackendUnavailable) as caught:
        pt.use("fake")
    assert states(str(caught.value), "'fake'", "no driver answers", "install the driver")
    with pt.use("cpu"):  # a failed use() leaves nothing behind
        assert pt.active().spec.name == "cpu"


def test_none_available_lists_every_reason(plugged):
    plugged(fakes.Fake(fakes.spec("a"), answer=ABSENT), fakes.Fake(fakes.spec("b"), answer=ABSENT), cpu=False)
    with pytest.raises(pt.BackendUnavailable, match=r"a: no driver answers; b: no driver answers"):
        pt.active()


@pytest.mark.parametrize("name", [3, 1.5, b"cpu", torch.device("cpu")])
def test_a_name_must_be_a_string(plugged, name):
    plugged()
    with pytest.raises(pt.ConfigurationError) as caught:
        pt.use(name)
    assert states(str(caught.value), type(name).__name__, "cpu")


def test_failing_probe_is_a_reason_not_a_crash(plugged):
    class Broken(fakes.Fake):
        def probe(self):
            raise OSError("libfake.so: cannot open")

    plugged(Broken())
    answer = pt.backends()["fake"]
    assert not answer.available
    assert "libfake.so" in answer.reason
    assert pt.active().spec.name == "cpu"


def test_probe_that_returns_nonsense(plugged):
    plugged(fakes.Fake(answer=True))  # type: ignore[arg-type]
    assert "not an Availability" in pt.backends()["fake"].reason


def test_vendor_package_that_fails_to_start(plugged):
    plugged(fakes.Fake(load_error=ImportError("undefined symbol")))
    pt.use("cpu")
    with pytest.raises(pt.BackendUnavailable) as caught:
        pt.use("fake")
    assert states(str(caught.value), "'fake'", "undefined symbol", "PORTABLE_BACKEND=cpu")
    assert isinstance(caught.value.__cause__, ImportError)
    assert pt.active().spec.name == "cpu"


def test_backends_lists_all(plugged):
    plugged(fakes.Fake(answer=ABSENT))
    assert {name: answer.available for name, answer in pt.backends().items()} == {"cpu": True, "fake": False}


def test_threads_see_one_backend_or_the_other(plugged):
    """Choosing and calling at once never gives a half-changed state: device type and count always belong together."""
    plugged(fakes.Fake(count=7))
    failures: list[BaseException] = []
    stop = threading.Event()

    def choose(name: str) -> None:
        while not stop.is_set():
            with pt.use(name):
                pass

    def look() -> None:
        try:
            for _ in range(3000):
                assert selection.call("device_count")() in (1, 7)
                assert pt.active().spec.name in ("cpu", "fake")
        except BaseException as error:
            failures.append(error)

    choosers = [threading.Thread(target=choose, args=(name,)) for name in ("cpu", "fake")]
    lookers = [threading.Thread(target=look) for _ in range(3)]
    for thread in choosers + lookers:
        thread.start()
    for thread in lookers:
        thread.join()
    stop.set()
    for thread in choosers:
        thread.join()
    assert not failures


def test_a_call_holds_its_choice(plugged, monkeypatch):
    """Another thread that takes the choice back just after it was made has to wait until the call has found its function."""
    plugged()
    choose, others = selection.active, []

    def chosen_and_taken_back():
        backend = choose()
        others.append(threading.Thread(target=selection._activate, args=(None,)))
        others[-1].start()
        others[-1].join(0.2)  # long enough to get in, if nothing keeps it out
        return backend

    monkeypatch.setattr(selection, "active", chosen_and_taken_back)
    assert selection.call("device_count")() == 1
    others[-1].join()


# -- devices ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, 0, "cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_device_on_cpu(on_cpu, asked):
    found = pt.device(asked)
    assert found == torch.device("cpu")
    assert found.index is None


def test_device_takes_numpy_integers(on_cpu):
    numpy = pytest.importorskip("numpy", reason="NumPy is not installed")
    assert pt.device(numpy.int64(0)) == torch.device("cpu")


@pytest.mark.parametrize("asked", [1, -1, 2**70, "cpu:1", "cpu:256", "cpu:65536", torch.device("cpu", 3)])
def test_index_out_of_range(on_cpu, asked):
    with pytest.raises(pt.DeviceIndexError) as caught:
        pt.device(asked)
    assert states(str(caught.value), "cpu backend has 1 device", "0 to 0")
    assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("asked", ["cuda", "cuda:1", "meta", torch.device("cuda:1")])
def test_device_of_another_backend(on_cpu, asked):
    with pytest.raises(pt.ConfigurationError) as caught:
        pt.device(asked)
    assert states(str(caught.value), str(asked), "active backend is cpu", "pt.use()")


@pytest.mark.parametrize("asked", ["", " cpu", "cpu ", "cpu:", "cpu:-1", "cpu:x", "cpu:0:0", ":0", "gpu", "1"])
def test_string_that_names_no_device(on_cpu, asked):
    with pytest.raises(pt.ConfigurationError) as caught:
        pt.device(asked)
    assert states(str(caught.value), repr(asked), "pt.device()")


@pytest.mark.parametrize("asked", [True, False, 1.0, [0], b"cpu", torch.zeros(1)])
def test_argument_that_is_no_device(on_cpu, asked):
    with pytest.raises(pt.ConfigurationError, match=type(asked).__name__):
        pt.device(asked)


def test_device_on_an_accelerator(plugged):
    fake = fakes.Fake(count=3)
    plugged(fake)
    assert pt.device() == pt.device("fpga") == torch.device("fpga:0")
    pt.set_device(2)
    assert pt.device() == pt.device("fpga") == torch.device("fpga:2")  # always with its ordinal, as tensors have it
    assert pt.device(1) == pt.device("fpga:1") == torch.device("fpga:1")
    assert pt.device("cpu") == pt.device("cpu:0") == torch.device("cpu")
    for wrong in (3, "fpga:3", "fpga:256"):  # torch.device would turn 256 into 0
        with pytest.raises(pt.DeviceIndexError, match="fake backend has 3 devices"):
            pt.device(wrong)
    with pytest.raises(pt.DeviceIndexError, match="CPU is one device"):
        pt.device("cpu:1")


def test_set_device_on_an_accelerator(plugged):
    fake = fakes.Fake(count=3)
    plugged(fake)
    pt.set_device("fpga:1")
    assert fake.current == 1
    pt.set_device(-1)  # torch.cuda.set_device: a negative ordinal does nothing
    assert fake.current == 1
    for wrong, error in ((3, pt.DeviceIndexError), (True, pt.ConfigurationError), ("cpu", pt.ConfigurationError)):
        with pytest.raises(error):
            pt.set_device(wrong)
    assert fake.current == 1


def test_a_device_that_was_checked_for_one_backend_is_checked_again_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from portable import devices, selection

    with pt.use("cpu"):
        assert devices.ordinal(torch.device("cpu")) == 0
        monkeypatch.setattr(selection, "remembered", {**selection.remembered, torch.device("cuda", 3): 3})
        assert devices.ordinal(torch.device("cuda", 3)) == 3, "the memory is what answers"
        with pt.use("cpu"), pytest.raises(pt.ConfigurationError):
            devices.ordinal(torch.device("cuda", 3))


# -- what numbers come from --------------------------------------------------------------------------------------------------


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> str:
    """A process whose devices of type fpga were made by portable.rehearsal."""
    import portable.rehearsal.session as session

    made = SimpleNamespace(execution="emulated", profile=SimpleNamespace(device_type="fpga"))
    monkeypatch.setattr(session, "_current", made)
    return "fpga"


def test_a_probe_cannot_pass_an_emulated_device_for_hardware(plugged, rehearsed):
    claims = Availability(True, "2 devices", device_count=2, execution="hardware")
    plugged(fakes.Fake(answer=claims), fakes.Fake(fakes.spec("other", device_type="xla"), answer=claims))
    found = pt.backends()
    assert {name: answer.execution for name, answer in found.items()} == {
        "fake": "emulated", "other": "hardware", "cpu": "hardware",
    }  # fmt: skip
    for name in found:
        with pt.use(name):
            assert pt.execution() == found[name].execution


def test_a_backend_is_asked_again_when_its_device_has_been_emulated(plugged, monkeypatch):
    import portable.rehearsal.session as session

    fake = fakes.Fake(answer=ABSENT)
    plugged(fake)
    monkeypatch.setattr(session, "_current", None)
    assert pt.backends()["fake"] == ABSENT
    fake.answer = Availability(True, "1 device", device_count=1)
    assert pt.backends()["fake"] == ABSENT, "asked once, as long as nothing was emulated"
    made = SimpleNamespace(execution="emulated", profile=SimpleNamespace(device_type="fpga"))
    monkeypatch.setattr(session, "_current", made)
    assert pt.use("fake").backend is fake and pt.execution() == "emulated"


def test_an_execution_that_does_not_exist_is_the_plugins_fault(plugged):
    plugged(fakes.Fake(answer=Availability(True, "1 device", device_count=1, execution="real")))  # type: ignore[arg-type]
    found = pt.backends()["fake"]
    assert not found.available
    assert states(found.reason, "execution='real'", "hardware", "vendor-package-on-host", "emulated")
