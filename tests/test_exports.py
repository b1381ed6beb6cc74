"""The public names: what type checkers see, what is there at run time, and what dir() lists are the same."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import portable as pt
from portable import catalogue

SOURCE = Path(pt.__file__)


def typed_imports() -> dict[str, set[str]]:
    """Module to the names imported from it under TYPE_CHECKING, read from the source."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(SOURCE.read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom)
                for alias in statement.names:
                    assert alias.name == alias.asname, "only `import x as x` is a re-export for type checkers"
                    found.setdefault(statement.module or "", set()).add(alias.name)
    return found


def test_type_checkers_see_what_is_exported():
    expected = {f"portable.{module}": set(names) for module, names in pt._EXPORTS.items()}
    expected["portable"] = set(pt._MODULES)
    expected["torch"] = {"OutOfMemoryError"}
    assert typed_imports() == expected


def test_no_name_is_exported_twice():
    names = [name for group in pt._EXPORTS.values() for name in group] + list(pt._MODULES)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("module", pt._EXPORTS)
def test_names_resolve_to_their_modules(module):
    home = importlib.import_module(f"portable.{module}")
    for name in pt._EXPORTS[module]:
        assert getattr(pt, name) is getattr(home, name)
        assert getattr(pt, name).__doc__, name


@pytest.mark.parametrize("name", pt._MODULES)
def test_modules_resolve(name):
    assert getattr(pt, name) is sys.modules[f"portable.{name}"]


def test_dir_lists_everything():
    names = {name for group in pt._EXPORTS.values() for name in group}
    assert {*names, *pt._MODULES, "OutOfMemoryError", "__version__"} <= set(dir(pt))
    for name in dir(pt):
        getattr(pt, name)


def test_unknown_name():
    with pytest.raises(AttributeError, match=r"'portable' has no attribute 'nonsense'.*dir\(portable\)"):
        pt.nonsense  # noqa: B018
    assert not hasattr(pt, "nonsense")


@pytest.mark.parametrize("function", catalogue.FUNCTIONS, ids=lambda function: function.name)
def test_catalogue_is_reachable_under_both_names(function):
    mine, theirs = attrgetter(function.public_name)(pt), attrgetter(function.name)(pt.cuda)
    assert mine is theirs
    assert function.summary


def test_portable_cuda_has_the_catalogues_surface():
    assert set(pt.cuda.names()) == {function.name for function in catalogue.FUNCTIONS}
    top = {function.name.partition(".")[0] for function in catalogue.FUNCTIONS}
    assert top <= set(pt.cuda.__all__)
    for name in pt.cuda.__all__:
        getattr(pt.cuda, name)


def test_catalogue_uses_torch_cudas_names():
    """Every name exists in torch.cuda itself (nvtx's range_push ... as well), or where torch.cuda keeps it."""
    for function in catalogue.FUNCTIONS:
        assert attrgetter(function.name)(torch.cuda) is not None


def in_fresh_process(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_brings_neither_torch_nor_a_vendors_package():
    heavy = "{'torch', 'numpy', 'pluggy', 'rich', 'typer', 'torch_npu', 'torch_neuronx'}"
    code = f"import sys, portable; dir(portable); portable.__version__; print({heavy} & set(sys.modules))"
    assert in_fresh_process(code).strip() == "set()"


def test_errors_can_be_caught_without_torch():
    code = "import sys; from portable.errors import PortableError, UnsupportedError; print('torch' in sys.modules)"
    assert in_fresh_process(code).strip() == "False"


def test_every_module_imports_alone():
    """In a fresh process each, in one go: no module relies on another having been imported before."""
    names = sorted(path.stem for path in SOURCE.parent.glob("*.py") if not path.stem.startswith("__"))
    code = f"""
import importlib, sys
import torch, pluggy
before = set(sys.modules)
for name in {names!r}:
    importlib.import_module("portable." + name)
    for loaded in set(sys.modules) - before:
        if loaded.startswith("portable"):
            del sys.modules[loaded]
"""
    in_fresh_process(code)


def test_errors_are_of_the_expected_builtin_kinds():
    kinds = {
        "BackendNotFound": LookupError, "BackendUnavailable": RuntimeError, "DeviceIndexError": IndexError,
        "UnsupportedError": NotImplementedError, "PluginError": TypeError, "ConfigurationError": ValueError,
    }  # fmt: skip
    for name, kind in kinds.items():
        assert issubclass(getattr(pt, name), kind)
        assert issubclass(getattr(pt, name), pt.PortableError)


def test_unsupported_error_survives_pickling():
    import pickle

    error = pt.UnsupportedError("cpu", "graph", "none here.", "use another.")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "graph is not available on the cpu backend: none here. Instead: use another."
    assert (copy.backend, copy.function, copy.reason, copy.alternative) == ("cpu", "graph", "none here.", "use another.")


def test_autocast_does_not_load_dynamo():
    """It takes seconds, and a program that only evaluates has no need of it."""
    in_fresh_process("import sys, portable as pt\nwith pt.autocast(): pass\nassert 'torch._dynamo' not in sys.modules")
