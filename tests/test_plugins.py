"""Discovery of plugins: real entry points of packages written into a temporary folder, most of them broken in one way."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
from broken_plugins import BAD_PROBES, BROKEN, GOOD, PRELUDE, backend_source, probe_source, write

import portable as pt
from portable import plugins, selection
from portable.hookspecs import AttentionPath, ConformanceCase, MigrationRule, hookimpl
from portable.plugins import Registry

SHIPPED = {"ascend", "cpu", "cuda", "generic", "neuron"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path; the plugins written into it are forgotten at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("plugin_"):
            del sys.modules[name]


@pytest.fixture
def discover(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Registry]:
    """A function that looks for plugins anew; this process goes back to its own at the end."""

    def look() -> Registry:
        monkeypatch.setattr(plugins, "_registry", None)
        monkeypatch.setattr(selection, "_availability", {})
        selection._activate(None)
        return plugins.registry()

    monkeypatch.delenv(selection.VARIABLE, raising=False)
    return look


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_reported_and_breaks_no_other(site: Path, discover: Callable[[], Registry], name: str) -> None:
    source, phase, message = BROKEN[name]
    write(site, name, source)
    write(site, "a_first", backend_source("a_first", GOOD))
    write(site, "zz_last", backend_source("zz_last", GOOD))
    found = discover()
    assert set(found.backends) == {*SHIPPED, "a_first", "zz_last"}
    assert [(problem.plugin, problem.phase) for problem in found.problems] == [(f"{name} ({name}-pkg 1.0)", phase)]
    assert message in found.problems[0].message
    assert "\n" not in found.problems[0].message
    assert found.problems[0].message.split(" ... ")[-1] in found.problems[0].detail
    assert pt.use("zz_last").backend.spec.name == "zz_last"
    assert pt.use("cpu").backend.spec.name == "cpu"
    with pytest.raises(pt.BackendNotFound, match=name):
        pt.use("acme")


@pytest.mark.parametrize("name", BAD_PROBES)
def test_a_probe_that_fails_is_a_backend_that_is_not_available(site: Path, discover: Callable[[], Registry], name: str) -> None:
    write(site, name, probe_source(name))
    found = discover()
    answers = pt.backends()
    assert not answers[name].available
    assert answers[name].reason.startswith("its probe failed: ")
    assert BAD_PROBES[name][1] in answers[name].reason
    assert answers["cpu"].available
    assert pt.active().spec.name == "cpu"
    assert [(problem.phase, BAD_PROBES[name][1] in problem.message) for problem in found.problems] == [("probe", True)]
    with pytest.raises(pt.BackendUnavailable, match="its probe failed"):
        pt.use(name)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("plugin_odd:missing", "AttributeError: module 'plugin_odd' has no attribute 'missing'"),
        ("not a module!", ""),  # the text is importlib.metadata's and differs between Python versions
    ],
)
def test_an_entry_point_that_leads_nowhere(site: Path, discover: Callable[[], Registry], value: str, message: str) -> None:
    write(site, "odd", "", value=value)
    found = discover()
    assert set(found.backends) == SHIPPED
    assert [problem.phase for problem in found.problems] == ["load"]
    assert message in found.problems[0].message


def test_an_entry_point_may_name_an_object(site: Path, discover: Callable[[], Registry]) -> None:
    source = PRELUDE + "class P:\n    @hookimpl\n    def portable_backend(self): return Fake(spec('thing'))\nplugin = P()\n"
    write(site, "thing", source, value="plugin_thing:plugin")
    found = discover()
    assert found.providers["thing"] == "thing (thing-pkg 1.0)"
    assert found.problems == []


@pytest.mark.parametrize("metadata", [None, b"Name: \xff\xfe\n"], ids=["absent", "not text"])
@pytest.mark.filterwarnings("ignore:Implicit None:DeprecationWarning")  # importlib.metadata's, from Python 3.12 on
def test_a_package_without_usable_metadata(site: Path, discover: Callable[[], Registry], metadata: bytes | None) -> None:
    write(site, "bare", backend_source("bare", GOOD))
    file = site / "bare_pkg-1.0.dist-info" / "METADATA"
    if metadata is None:
        file.unlink()
    else:
        file.write_bytes(metadata)
    found = discover()
    assert set(found.backends) == {*SHIPPED, "bare"}
    assert found.problems == []


def test_malformed_entry_points_of_another_package(site: Path, discover: Callable[[], Registry]) -> None:
    """importlib.metadata then raises for all packages; ours are known by their import names too."""
    write(site, "odd", "")
    (site / "odd_pkg-1.0.dist-info" / "entry_points.txt").write_text(
        "[portable]\nthis line has no equals sign\n", encoding="utf-8"
    )
    found = discover()
    assert set(found.backends) == SHIPPED
    assert pt.active().spec.name == "cpu"
    assert all(problem.phase == "discovery" for problem in found.problems)


def test_keyboard_interrupt_is_not_a_plugins_error(site: Path, discover: Callable[[], Registry]) -> None:
    write(site, "slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover()


def test_a_problem_is_recorded_once() -> None:
    registry = Registry()
    for _ in range(3):
        assert registry.guarded("acme", "describe", lambda: [][0]) is None
    assert [problem.message for problem in registry.problems] == ["IndexError: list index out of range"]


def test_a_plugin_installed_later_is_found_after_reset(site: Path, discover: Callable[[], Registry]) -> None:
    assert set(discover().backends) == SHIPPED
    write(site, "late", backend_source("late", GOOD))
    assert set(plugins.registry().backends) == SHIPPED, "looked for once"
    selection.reset()
    assert set(plugins.registry().backends) == {*SHIPPED, "late"}


# Two plugins of one name.


def test_a_third_party_backend_replaces_ours(site: Path, discover: Callable[[], Registry]) -> None:
    write(site, "aaa", backend_source("cuda", GOOD))
    with pytest.warns(UserWarning, match="two plugins provide") as caught:
        found = discover()
    (warning,) = caught
    assert str(warning.message) == (
        f"two plugins provide the backend 'cuda': aaa (aaa-pkg 1.0) is used, cuda ({ours()}) is not; "
        "uninstall one of them to silence this"
    )
    assert type(found.backends["cuda"]).__name__ == "Fake"
    assert found.providers["cuda"] == "aaa (aaa-pkg 1.0)"
    assert set(found.backends) == SHIPPED
    assert found.problems == []


def ours() -> str:
    """What stands for our distribution: installed, or a source tree on PYTHONPATH."""
    provider = plugins.registry().providers["cpu"]
    return provider.partition("(")[2].rstrip(")")


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_of_two_third_party_backends_the_choice_does_not_depend_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, discover: Callable[[], Registry], order: tuple[str, str]
) -> None:
    for name in order:
        (tmp_path / name).mkdir()
        write(tmp_path / name, f"{name}_{order[0]}", backend_source("acme", GOOD))
        monkeypatch.syspath_prepend(tmp_path / name)
    with pytest.warns(UserWarning, match="two plugins provide the backend 'acme'") as caught:
        found = discover()
    first, second = (f"{name}_{order[0]}" for name in ("one", "two"))
    assert found.providers["acme"] == f"{first} ({first}-pkg 1.0)"
    assert f"{second} ({second}-pkg 1.0) is not" in str(caught[0].message)


def test_a_third_party_backend_stays_when_ours_comes_later() -> None:
    registry = Registry()
    theirs, shipped = fakes.Fake(fakes.spec("acme")), fakes.Fake(fakes.spec("acme"))
    registry.add(fakes.PlugIn(theirs), "theirs", "theirs 1.0")
    with pytest.warns(UserWarning, match=r"theirs \(theirs 1\.0\) is used, acme \(portable 0\) is not"):
        registry.add(fakes.PlugIn(shipped), "acme", "portable 0", shipped=True)
    assert registry.backends["acme"] is theirs


def test_one_plugin_announced_twice_is_taken_once(site: Path, discover: Callable[[], Registry]) -> None:
    """As when a package is installed and its source tree is on the path as well."""
    write(site, "twice", backend_source("twice", GOOD))
    other = site / "twice_pkg-1.1.dist-info"
    other.mkdir()
    for file in (site / "twice_pkg-1.0.dist-info").iterdir():
        (other / file.name).write_text(file.read_text().replace("twice-pkg", "twice-copy"), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = discover()
    assert set(found.backends) == {*SHIPPED, "twice"}
    assert found.problems == []


# The hooks that return lists.


class Path_:
    name = "fused"

    def why_not(self, request: Any) -> list[str]:
        return []


class Case:
    name = "matmul"

    def run(self, backend: Any) -> None:
        pass


class Rule:
    code = "X1"
    title = "a rule"


HOOKS: dict[str, tuple[type, Any, dict[str, str]]] = {
    "portable_attention_paths": (AttentionPath, Path_, {"backend": "acme"}),
    "portable_conformance_cases": (ConformanceCase, Case, {}),
    "portable_migration_rules": (MigrationRule, Rule, {}),
}


def plugin(hook: str, answer: Callable[[], Any]) -> Any:
    """A plugin object whose one hook answers what ``answer`` makes."""
    if hook == "portable_attention_paths":
        function: Any = lambda self, backend: answer()  # noqa: E731
    else:
        function = lambda self: answer()  # noqa: E731
    function.__name__ = hook
    return type("Plugin", (), {hook: hookimpl(function)})()


def broken() -> Any:
    raise ValueError("bad table")


@pytest.mark.parametrize("hook", HOOKS)
def test_list_hooks(hook: str) -> None:
    protocol, kind, arguments = HOOKS[hook]
    element = kind()
    registry = Registry()
    answers: dict[str, Callable[[], Any]] = {
        "good": lambda: [element],
        "tuple": lambda: (element, element),
        "empty": list,
        "text": lambda: "fused",
        "single": lambda: element,
        "none": lambda: None,
        "raises": broken,
        "mixed": lambda: [element, 7, object],
        "class": lambda: [kind],
        "last": lambda: [element],
    }
    for name, answer in answers.items():
        registry.add(plugin(hook, answer), name, "t 1")
    assert registry.problems == []
    for _ in range(2):  # asking again reports nothing twice
        found = list(registry.collect(hook, protocol, **arguments))
        assert found == [(f"{name} (t 1)", element) for name in ("good", "tuple", "tuple", "mixed", "last")]

    def error(name: str, answer: str) -> tuple[str, str]:
        return f"{name} (t 1)", f"portable.errors.PluginError: {hook} of plugin {name} (t 1) returned {answer}"

    wrong = f"; return a list of {protocol.__name__} objects"
    assert [(problem.plugin, problem.message) for problem in registry.problems] == [
        error("text", f"'fused'{wrong}"),
        error("single", f"{element!r}{wrong}"),
        error("none", f"None{wrong}"),
        ("raises (t 1)", "ValueError: bad table"),
        error("mixed", f"a list with 7, which is no {protocol.__name__}"),
        error("mixed", f"a list with {object!r}, which is no {protocol.__name__}"),
        error("class", f"a list with {kind!r}, which is no {protocol.__name__}"),
    ]
    assert {problem.phase for problem in registry.problems} == {hook}


def test_attention_paths_are_asked_for_the_backend_by_name() -> None:
    asked = []

    class Plugin:
        @hookimpl
        def portable_attention_paths(self, backend: str) -> list[Any]:
            asked.append(backend)
            return [Path_()] if backend == "acme" else []

    registry = Registry()
    registry.add(Plugin(), "p", "t 1")
    assert len(list(registry.collect("portable_attention_paths", AttentionPath, backend="acme"))) == 1
    assert list(registry.collect("portable_attention_paths", AttentionPath, backend="cpu")) == []
    assert asked == ["acme", "cpu"]


def test_a_plugin_without_the_hook_is_not_asked() -> None:
    registry = Registry()
    registry.add(fakes.PlugIn(fakes.Fake()), "p", "t 1")
    assert list(registry.collect("portable_migration_rules", MigrationRule)) == []
    assert registry.problems == []
