"""From observations to a result, its file, and what a reader refuses. Nothing is run here: the numbers are given."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.errors import ConfigurationError
from portable.rehearse import NOTICE, SCHEMA, Finding, Result, markdown, options, parse, read, text
from portable.rehearse import result as model
from portable.rehearse.build import verdict
from portable.rehearse.costs import Cost, Costs
from portable.rehearse.failure import explain
from portable.rehearse.findings import Findings, when
from portable.rehearse.observations import Observations, merged
from portable.rehearse.output import PARTIAL, Output, ranked
from portable.rehearse.places import Where, where
from portable.rehearse.rules import COMPAT, RULES, SYNCS, WRONG
from portable.rehearse.steps import Spread, Spreads

NOWHERE = model.Memory(0, 100, 0.0, "", 0)


def finding(severity: Any = "major", rule: str = "REH-SYNC-ITEM", line: int = 3) -> Finding:
    return Finding(rule, severity, "a.py", line, "x.item()", False, 5, "every step", 1.0, "item", "why | not", "slow", "`do`")


def run(**changes: Any) -> model.Run:
    values: dict[str, Any] = {
        "target": "a.py", "arguments": ("--b", "c"), "module": False, "ended": "the end", "exit_code": 0, "steps": 3,
        "asked_steps": None, "strict": False, "processes": 1, "rank": 0, "world_size": 1,
        "started": "2026-12-01T00:00:00+00:00",
    }  # fmt: skip
    return model.Run(**{**values, **changes})


def a_result(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "execution": "emulated",
        "complete": True,
        "verdict": model.Verdict("no", "it refuses", ("a.py:3",)),
        "run": run(),
        "target": model.Target("neuron", "neuron", "trn2", "Trainium2", 1, 100),
        "environment": model.Environment("portable rehearse a.py", "3.11", "Linux", "a CPU", {"torch": "2.13"}),
        "failure": model.Failure("device", "RuntimeError", "no\ncomplex", "a.py", 3, "x", "REH-REFUSED"),
        "findings": (finding(), finding("info", "REH-COMPILE-FIRST", 9)),
        "dtypes_refused": (model.DtypeRefused("complex64", "a.py", 3, 1, "none"),),
        "operators": model.Operators(10, 1, 0.1, {"aten::add": 9}),
        "fallbacks": (model.Place("aten::normal_", "a.py", 4, False, 1, 1, 0, 0, 0, "start or end"),),
        "compiles": (),
        "syncs": (model.Place("item", "a.py", 3, False, 5, 1, 4, 0, 2, "every step"),),
        "copies": (model.Copies("to the CPU", 2, 2048),),
        "memory": model.Memory(50, 100, 0.5, "a.py", 4),
        "attention": (model.AttentionPath("math", False, ("a mask",), "q (1, 2)", "a.py", 7, 3),),
        "graphs": (model.Graphs("f (a.py:1)", 2, 1),),
        "collectives": {"all_reduce": 3},
        "precision": model.Precision(None, False, "float32 is safe"),
        "compat": (model.Compat("changed", "fused=True", "dropped", 1, "a.py", 2),),
        "assumptions": (model.Assumption("kernels", "some", "unknown"),),
    }
    return Result(**{**values, **changes})


# --- the file ----------------------------------------------------------------------------------------------------------------


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    output = Output(tmp_path / "deep" / "r.json", tmp_path / "r.md")
    output.partial(a_result(complete=False))
    assert read(tmp_path / "deep" / f"r.json{PARTIAL}") == a_result(complete=False)
    output.final(a_result(), markdown.section)
    assert read(tmp_path / "deep" / "r.json") == a_result()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]
    assert json.loads((tmp_path / "deep" / "r.json").read_text())["schema"] == SCHEMA
    Output(tmp_path / "deep" / "r.json", tmp_path / "r.md").final(a_result(failure=None), markdown.section)  # replaces its own
    assert read(tmp_path / "deep" / "r.json").failure is None


def test_nothing_here_can_be_called_hardware(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can only be emulated or vendor-package-on-host"):
        a_result(execution="hardware")
    with pytest.raises(ConfigurationError, match=r"result.execution is 'hardware', not one of 'emulated'"):
        parse({**a_result().as_dict(), "execution": "hardware"})


def _damaged(change: Any) -> str:
    data = json.loads(json.dumps(a_result().as_dict()))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ('{"schema": "portable.reh', "is not JSON .*cut off"),
        ("[1, 2]", "its schema is None"),
        ('{"schema": 1, "entries": []}', "its schema is 1, not 'portable.rehearsal/1'"),
        (_damaged(lambda d: d.update(schema="portable.rehearsal/2")), "this portable reads .*Update portable"),
        (_damaged(lambda d: d.update(schema="portable.rehearsal/0")), "Run portable rehearse again"),
        (_damaged(lambda d: d.pop("findings")), "damaged: result lacks findings"),
        (_damaged(lambda d: d["findings"][0].update(count="5")), r"result.findings\[0\].count is '5', not int"),
        (_damaged(lambda d: d["findings"][0].update(count=True)), "count is True, not int"),
        (_damaged(lambda d: d["findings"][1].update(severity="bad")), r"findings\[1\].severity is 'bad', not one of 'blocker'"),
        (_damaged(lambda d: d["run"].update(more=1)), "result.run has the unknown fields more"),
        (_damaged(lambda d: d["run"].update(arguments="abc")), "result.run.arguments is 'abc', not tuple"),
        (_damaged(lambda d: d.update(verdict=None)), "result.verdict is None, not an object"),
        (_damaged(lambda d: d.update(failure=3)), "result.failure is 3, not an object"),
    ],
)
def test_what_is_no_result_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        read(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read(tmp_path / "r.json")


def test_ranks_have_files_of_their_own() -> None:
    assert ranked(Path("a/r.json"), 0) == Path("a/r.json")
    assert ranked(Path("a/r.json"), 3) == Path("a/r.rank3.json")


def test_the_section_escapes_what_would_break_a_table() -> None:
    section = markdown.section(a_result())
    assert "why \\| not" in section and "no complex" in section
    assert all(line.count(" | ") >= 1 for line in section.splitlines() if line.startswith("| major"))
    assert NOTICE in section and "Lines that fail: `a.py:3`" in section
    assert "**Incomplete.**" in markdown.section(a_result(complete=False))


# --- options -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text_", "size"), [("1024", 1024), ("24GiB", 24 * 2**30), ("1.5 mib", 3 * 2**19), ("64GB", 64 * 10**9), ("7b", 7)]
)
def test_memory(text_: str, size: int) -> None:
    assert options.memory(text_) == size


@pytest.mark.parametrize("text_", ["", "much", "-1GiB", "0", "0.1", "24 G", "1e3", "GiB", "nan"])
def test_no_memory(text_: str) -> None:
    with pytest.raises(ConfigurationError, match="no size of memory"):
        options.memory(text_)


@pytest.mark.parametrize(
    ("fail_on", "worst", "fails"),
    [
        (None, "blocker", False),
        ("blocker", "blocker", True),
        ("blocker", "wrong", False),
        ("wrong", "blocker", True),
        ("major", "major", True),
        ("major", "minor", False),
        ("major", None, False),
    ],
)
def test_fail_on(fail_on: Any, worst: Any, fails: bool) -> None:
    assert options.Options("neuron", "a.py", fail_on=fail_on).fails(worst) is fails


def test_sizes_in_words() -> None:
    assert [text.size(n) for n in (0, 1023, 1024, 1536, 24 * 2**30)] == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "24 GiB"]


def test_without_steps_the_summary_says_so() -> None:
    said = dict(text.facts(a_result(run=run(steps=0, asked_steps=5))))
    assert "--steps 5 did not end the program" in said["steps"]
    assert "did not end" not in dict(text.facts(a_result(run=run(steps=0))))["steps"]
    assert "steps" not in dict(text.facts(a_result()))


# --- lines -------------------------------------------------------------------------------------------------------------------


def test_lines() -> None:
    assert where("a.py:12", "/x") == Where("a.py", 12, False)
    assert where("/x/b/a.py:3 (backward)", "/x") == Where("b/a.py", 3, True)
    assert where("/y/a.py:3", "/x") == Where("/y/a.py", 3, False)
    assert where("unknown (backward)", "/x") == Where("", 0, True)
    assert where("unknown", "/x").code("/x") == ""


def test_the_text_of_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("first\n    second  # two\n")
    assert where("a.py:2", str(tmp_path)).code(str(tmp_path)) == "second  # two"
    assert where("a.py:9", str(tmp_path)).code(str(tmp_path)) == ""


# --- steps -------------------------------------------------------------------------------------------------------------------


def test_counts_are_spread_over_the_steps() -> None:
    counter: Counter[str] = Counter()
    spreads = Spreads(lambda: counter, warmup=2)
    for step, more in enumerate([3, 1, 0, 2, 1], start=1):
        counter["a"] += more
        spreads.step(step)
    counter["a"] += 7
    counter["b"] += 1
    assert spreads.now(5) == {"a": Spread(4, 3, 7, 2), "b": Spread(0, 0, 1, 0)}
    assert spreads.now(5) == spreads.now(5)  # looking changes nothing
    assert when(spreads.now(5)["a"], 5, 2) == "some steps"


@pytest.mark.parametrize(
    ("spread", "steps", "expected"),
    [
        (Spread(1, 9, 0, 9), 10, "every step"),
        (Spread(0, 8, 0, 8), 10, "every step"),  # a step or two without
        (Spread(0, 7, 0, 7), 10, "some steps"),
        (Spread(5, 0, 4, 0), 10, "start or end"),
        (Spread(5, 0, 0, 0), 1, "not known"),
        (Spread(5, 0, 0, 0), 0, "not known"),
    ],
)
def test_when(spread: Spread, steps: int, expected: str) -> None:
    assert when(spread, steps, 1) == expected


# --- findings ----------------------------------------------------------------------------------------------------------------


def findings(seen: Observations, costs: Costs | None = None, memory: model.Memory = NOWHERE) -> tuple[Finding, ...]:
    return Findings("/x", costs or Costs(), seen.steps).all(seen, None, (), memory)


def test_every_kind_of_finding_has_a_rule() -> None:
    assert {*SYNCS.values(), *WRONG.values(), *COMPAT.values()} <= set(RULES)
    for name, rule in RULES.items():
        assert name.startswith("REH-") and rule.title and rule.cost and rule.fix, name
        assert not (rule.eases and rule.severity in ("blocker", "wrong")), name


def test_the_vendors_words_go_first() -> None:
    seen = Observations(steps=4, syncs={("item", "a.py:1"): Spread(1, 3, 0, 3), ("nonzero", "a.py:2"): Spread(1, 3, 0, 3)})
    costs = Costs({"sync": Cost("dear", "less"), "REH-SYNC-NONZERO": Cost("dearer")})
    words = {f.line: (f.cost, f.fix) for f in findings(seen, costs)}
    assert words == {1: ("dear", "less"), 2: ("dearer", RULES["REH-SYNC-NONZERO"].fix)}


def test_severity_follows_how_often() -> None:
    spreads = {"1": Spread(1, 3, 0, 3), "2": Spread(0, 1, 0, 1), "3": Spread(9, 0, 9, 0)}
    seen = Observations(steps=4, syncs={("item", f"a.py:{line}"): spread for line, spread in spreads.items()})
    assert {f.line: f.severity for f in findings(seen)} == {1: "major", 2: "minor", 3: "info"}
    without_steps = Observations(syncs={("item", "a.py:1"): Spread(10), ("item", "a.py:2"): Spread(9)})
    assert {f.line: f.severity for f in findings(without_steps)} == {1: "major", 2: "minor"}


def test_what_repeats_after_training_is_more_than_information() -> None:
    seen = Observations(steps=4, syncs={("item", "a.py:1"): Spread(0, 0, 10, 0), ("item", "a.py:2"): Spread(9, 0, 9, 0)})
    assert {f.line: f.severity for f in findings(seen)} == {1: "minor", 2: "info"}


def test_attention_at_one_line_is_one_finding_for_each_kind_of_reason() -> None:
    reason, mask = "the lengths {0} and {0} are not both multiples of 512", "a mask is given"
    grown = {("math", (reason.format(n),), f"q (1, {n})", "a.py:1"): Spread(0, 0, 2, 0) for n in (1, 2, 3)}
    seen = Observations(
        steps=4,
        attention={
            **grown,
            ("math", (reason.format(64),), "q (4, 64)", "a.py:1"): Spread(2, 6, 0, 3),
            ("math", (mask,), "q (4, 512)", "a.py:1"): Spread(0, 0, 1, 0),
            ("flash", (), "q (4, 1024)", "a.py:1"): Spread(2, 6, 0, 3),
        },
    )
    lengths, masked = findings(seen)
    assert (lengths.severity, lengths.count, lengths.when) == ("major", 14, "every step")
    assert lengths.detail == f"takes math: {reason.format(64)} (q (4, 64)), and so for 3 other shapes"
    assert (masked.severity, masked.count, masked.detail) == ("info", 1, "takes math: a mask is given (q (4, 512))")


def test_host_waits_of_every_step_are_told_from_the_others() -> None:
    rows = (
        model.Place("item", "a.py", 3, False, 5, 1, 4, 0, 4, "every step"),
        model.Place("item", "a.py", 4, False, 9, 9, 0, 0, 0, "start or end"),
    )
    said = dict(text.facts(a_result(run=run(steps=5), syncs=rows)))
    assert said["host waits"] == "14: 1 in every step, 9 in some steps or outside of them"
    assert dict(text.facts(a_result(run=run(steps=0), syncs=rows)))["host waits"] == "14"


def test_compilations_of_a_line_are_one_finding() -> None:
    seen = Observations(
        steps=5,
        compiles={
            ("aten::mul", "a.py:1"): Spread(2, 3, 0, 3),
            ("aten::add", "a.py:1"): Spread(2, 2, 0, 2),
            ("aten::sum", "a.py:2"): Spread(0, 1, 0, 1),
            ("aten::sum", "a.py:3"): Spread(2, 0, 4, 0),
        },
    )
    found = {f.line: (f.rule, f.count, f.what, f.per_step) for f in findings(seen)}
    assert found == {
        1: ("REH-COMPILE-EVERY-STEP", 9, "mul, add", 1.67),
        2: ("REH-COMPILE-LATE", 1, "sum", 0.33),
        3: ("REH-COMPILE-FIRST", 6, "sum", 0.0),
    }


def test_a_loop_without_an_optimizer_compiles_again_and_again() -> None:
    growing = {("aten::mul", "a.py:1"): Spread(10), ("aten::add", "a.py:1"): Spread(1), ("aten::mul", "a.py:2"): Spread(9)}
    found = {f.line: (f.rule, f.severity) for f in findings(Observations(compiles=growing))}
    assert found == {1: ("REH-COMPILE-EVERY-STEP", "major"), 2: ("REH-COMPILE-FIRST", "info")}
    # After training, as when a model generates with a growing context.
    ended = {("aten::mul", "a.py:1"): Spread(1, 0, 10, 0), ("aten::mul", "a.py:2"): Spread(1, 0, 9, 0)}
    found = {f.line: (f.rule, f.severity) for f in findings(Observations(steps=5, compiles=ended))}
    assert found == {1: ("REH-COMPILE-LATE", "minor"), 2: ("REH-COMPILE-FIRST", "info")}


def test_a_full_memory_is_one_finding_at_its_first_line() -> None:
    seen = Observations(
        findings={
            ("refused", "memory", "a.py:5"): [2, "out of memory: 9 bytes"],
            ("refused", "memory", "a.py:1"): [80, "out of memory: 1 byte"],
            ("refused", "aten::add", "a.py:2"): [1, "the output tensor has dtype float64, which"],
            ("refused", "send", "a.py:3"): [1, "the backend has no point-to-point operations"],
            ("a new kind", "f", "a.py:4"): [1, "odd"],
        }
    )
    found = {f.line: (f.rule, f.severity, f.count) for f in findings(seen)}
    assert found == {
        5: ("REH-OOM", "blocker", 2),
        2: ("REH-REFUSED-DTYPE", "blocker", 1),
        3: ("REH-REFUSED", "blocker", 1),
        4: ("REH-WRONG", "wrong", 1),
    }
    full = model.Memory(95, 100, 0.95, "a.py", 8)
    assert [(f.rule, f.line) for f in findings(Observations(), memory=full)] == [("REH-MEMORY-FULL", 8)]
    assert not [f for f in findings(seen, memory=full) if f.rule == "REH-MEMORY-FULL"]


def test_graphs() -> None:
    seen = Observations(
        steps=12,
        graphs={"f (a.py:1)": [11, 10], "g (a.py:2)": [3, 0], "h (a.py:3)": [1, 0], "L['m'] (Linear)": [2, 1]},
        recompiles={"f (a.py:1)": Spread(1, 9, 0, 9), "L['m'] (Linear)": Spread(1, 0, 0, 0)},
    )
    found = {f.what: (f.rule, f.severity, f.line) for f in findings(seen)}
    assert found == {
        "f": ("REH-GRAPH-RECOMPILE", "major", 1),
        "g": ("REH-GRAPH-BREAKS", "minor", 2),
        "L['m'] (Linear)": ("REH-GRAPH-RECOMPILE", "info", 0),
    }


def test_processes_add_up() -> None:
    one = Observations(1, 3, Counter(a=1), syncs={("item", "a.py:1"): Spread(1, 2, 0, 2)}, graphs={"f": [2, 1]}, peak=5)
    two = Observations(
        1,
        4,
        Counter(a=2, b=1),
        syncs={("item", "a.py:1"): Spread(1, 3, 1, 3)},
        graphs={"f": [1, 0]},
        peak=9,
        peak_line="a.py:7",
    )
    two.findings["refused", "f", "a.py:2"] = [2, "no"]
    total = merged([one, two])
    assert (total.processes, total.steps, total.ops, total.peak, total.peak_line) == (2, 4, Counter(a=3, b=1), 9, "a.py:7")
    assert total.syncs == {("item", "a.py:1"): Spread(2, 5, 1, 3)} and total.graphs == {"f": [3, 1]}
    assert total.findings == {("refused", "f", "a.py:2"): [2, "no"]}
    assert one.syncs == {("item", "a.py:1"): Spread(1, 2, 0, 2)}  # the parts stay as they are


# --- the verdict -------------------------------------------------------------------------------------------------------------

OWN = model.Failure("script", "ValueError", "of its own\nmore", "a.py", 4, "x")
GAP = dataclasses.replace(OWN, cause="emulator")


@pytest.mark.parametrize(
    ("found", "failure", "how", "calls", "runs", "reason"),
    [
        ((), None, {}, 5, "yes", "nothing that the program did is refused"),
        ((finding("wrong"),), None, {}, 5, "yes", "1 result is silently wrong"),
        ((finding("blocker"), finding("blocker", line=4)), OWN, {}, 5, "no", "refuses 2 lines"),
        ((), OWN, {"exit_code": 1}, 5, "unknown", "a reason of its own: ValueError: of its own"),
        ((), GAP, {"exit_code": 1}, 5, "unknown", "the emulated device, not the real one"),
        ((), None, {"exit_code": 7, "ended": "sys.exit"}, 5, "unknown", "exit code 7"),
        ((), None, {"exit_code": None, "ended": "a signal"}, 5, "unknown", "did not come to its end"),
        ((), None, {}, 0, "unknown", "computed nothing on the device"),
    ],
)
def test_verdict(found: Any, failure: Any, how: dict[str, Any], calls: int, runs: str, reason: str) -> None:
    said = verdict(found, failure, run(**how), calls)
    assert said.runs == runs and reason in said.reason
    if runs == "no":
        assert said.lines == ("a.py:3", "a.py:4")


def raised(code: str, file: str = "/x/user.py") -> BaseException:
    try:
        exec(compile(code, file, "exec"), {"torch": torch})
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("code", "cause", "rule"),
    [
        ("\nraise ValueError('x')", "script", ""),
        ("\ntorch.ones(2, 3) @ torch.ones(2, 3)", "script", ""),
        ("\nraise torch.OutOfMemoryError('full')", "device", "REH-OOM"),
        (
            "\nfrom portable.errors import UnsupportedError as E; raise E('neuron', 'f', 'none', 'g')",
            "device",
            "REH-UNSUPPORTED",
        ),
        ("\nfrom portable.errors import DeviceIndexError as E; raise E('cuda:9')", "device", "REH-DEVICE"),
        ("\nraise RuntimeError('ERR01007 OPS feature not supported')", "device", "REH-REFUSED"),
        ("\nraise RuntimeError('ERR01007 dtype torch.complex64 not supported')", "device", "REH-REFUSED-DTYPE"),
        ("\nraise RuntimeError('ERR99999 UNKNOWN application exception')", "script", ""),
        ("\nraise RuntimeError('ERR00100 PTA call acl api failed')", "emulator", ""),
        (
            "\nraise NotImplementedError(\"Could not run 'aten::f' with arguments from the 'PrivateUse1' backend\")",
            "emulator",
            "",
        ),
        ("\nimport json; json.loads('{')", "script", ""),
        (
            "\ntry: raise torch.OutOfMemoryError('full')\nexcept torch.OutOfMemoryError as e: raise ValueError('x') from e",
            "device",
            "REH-OOM",
        ),
    ],
)
def test_why_a_program_failed(code: str, cause: str, rule: str) -> None:
    from portable_ascend.costs import COSTS

    found = explain(raised(code), "/x", "/nowhere", COSTS)
    assert (found.cause, found.rule, found.file, found.line) == (cause, rule, "user.py", 2)


def test_the_line_of_another_processs_traceback() -> None:
    error = RuntimeError('Traceback (most recent call last):\n  File "/x/worker.py", line 12, in f\nKeyError: 1')
    assert (explain(error, "/x", "/nowhere", Costs()).file, explain(error, "/x", "/nowhere", Costs()).line) == ("worker.py", 12)


def test_a_syntax_error_has_its_own_line() -> None:
    found = explain(raised("a = 1\nb = (\n", "/x/user.py"), "/x", "/nowhere", Costs())
    assert (found.cause, found.error, found.file, found.line) == ("script", "SyntaxError", "user.py", 2)


def test_the_document_lists_every_rule() -> None:
    document = (Path(__file__).parents[2] / "docs" / "rehearse.md").read_text()
    for name, rule in RULES.items():
        assert f"| `{name}` | {rule.severity}{' (if in every step)' if rule.eases else ''} | {rule.title} |" in document
    assert NOTICE.lower() in " ".join(document.lower().split())
