"""Packages with plugins that are broken in one way each, and what is to be said of them."""

from __future__ import annotations

import textwrap
from pathlib import Path

PRELUDE = """
from fakes import Fake, spec
from portable.hookspecs import hookimpl
from portable.spec import Availability
"""
# One backend with a name of its own; ``{name}`` is the plugin's.
GOOD = """
@hookimpl
def portable_backend():
    return Fake(spec("{name}"), answer=Availability(True, "one device", device_count=1))
"""


def write(folder: Path, name: str, source: str, *, group: str = "portable", value: str = "", version: str = "1.0") -> None:
    """Install a package: a module and its metadata, as pip leaves them."""
    module = f"plugin_{name}"
    (folder / f"{module}.py").write_text(textwrap.dedent(source), encoding="utf-8")
    info = folder / f"{name}_pkg-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-pkg\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value or module}\n", encoding="utf-8")


def backend_source(name: str, body: str) -> str:
    return PRELUDE + "\n" + textwrap.dedent(body).replace("{name}", name)


# Plugin to (source, phase, message): what is wrong, where it is noticed, and what is said of it.
BROKEN: dict[str, tuple[str, str, str]] = {
    "raises_on_import": ("raise ImportError('libacme.so: cannot open')", "load", "ImportError: libacme.so: cannot open"),
    "syntax_error": ("def (", "load", "SyntaxError: invalid syntax"),
    "exits_on_import": ("import sys; sys.exit(3)", "load", "SystemExit: 3"),
    "many_lines": (
        "raise RuntimeError('first line\\nsecond line\\nlast line')",
        "load",
        "RuntimeError: first line ... last line",
    ),
    "no_hook": ("x = 1", "load", "PluginError: plugin no_hook (no_hook-pkg 1.0) implements no hook; mark one with"),
    "misspelt": (
        PRELUDE + "@hookimpl\ndef portable_backends(): return Fake()",
        "load",
        "implements portable_backends, which is no hook of portable; the hooks are portable_backend, portable_attention_paths",
    ),
    "wrong_argument": (
        PRELUDE + "@hookimpl\ndef portable_backend(config): return Fake()",
        "load",
        (
            "PluginValidationError: Plugin 'wrong_argument-pkg 1.0:wrong_argument' for hook 'portable_backend' ... "
            "Argument(s) {'config'} are declared in the hookimpl but can not be found in the hookspec"
        ),
    ),
    "raises_in_hook": (
        PRELUDE + "@hookimpl\ndef portable_backend(): return 1 / 0",
        "portable_backend",
        "ZeroDivisionError: division by zero",
    ),
    "exits_in_hook": (PRELUDE + "@hookimpl\ndef portable_backend(): exit('gone')", "portable_backend", "SystemExit: gone"),
    "returns_none": (
        PRELUDE + "@hookimpl\ndef portable_backend(): Fake()",
        "portable_backend",
        (
            "PluginError: the hook portable_backend of plugin returns_none (returns_none-pkg 1.0) returned None (NoneType); "
            "return an instance of a subclass of portable.backend.Backend"
        ),
    ),
    "returns_42": (
        PRELUDE + "@hookimpl\ndef portable_backend(): return 42",
        "portable_backend",
        (
            "PluginError: the hook portable_backend of plugin returns_42 (returns_42-pkg 1.0) returned 42 (int); "
            "return an instance of a subclass of portable.backend.Backend"
        ),
    ),
    "returns_class": (
        PRELUDE + "@hookimpl\ndef portable_backend(): return Fake",
        "portable_backend",
        "returned <class 'fakes.Fake'> (type); return an instance",
    ),
    "raises_in_spec": (
        PRELUDE
        + """
class Bad(Fake):
    spec = property(lambda self: open("/no/such/facts.json"), lambda self, value: None)
@hookimpl
def portable_backend(): return Bad()
""",
        "portable_backend",
        "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/facts.json'",
    ),
    "spec_is_a_dict": (
        PRELUDE + "@hookimpl\ndef portable_backend(): return Fake({'name': 'acme'})",
        "portable_backend",
        "returned a backend whose spec is {'name': 'acme'} (dict); make it a portable.spec.BackendSpec",
    ),
    "priority_is_text": (
        PRELUDE + "@hookimpl\ndef portable_backend(): return Fake(spec('acme', priority='high'))",
        "portable_backend",
        "returned a backend whose spec has priority='high'; make it like 100",
    ),
    "no_name": (
        PRELUDE + "@hookimpl\ndef portable_backend(): return Fake(spec(''))",
        "portable_backend",
        "returned a backend whose spec has name=''; make it like \"acme\"",
    ),
    "aliases_are_text": (
        PRELUDE + "@hookimpl\ndef portable_backend(): return Fake(spec('acme', aliases='npu'))",
        "portable_backend",
        "returned a backend whose spec has aliases='npu'; make it like (\"acme_npu\",)",
    ),
}
# The same for backends that are taken, and fail when they are asked whether they can run.
BAD_PROBES: dict[str, tuple[str, str]] = {
    "probe_raises": ("raise OSError('no driver')", "OSError: no driver"),
    "probe_exits": ("raise SystemExit(5)", "SystemExit: 5"),
    "probe_says_text": ("return 'yes'", "returned 'yes', not an Availability (portable.spec)"),
    "probe_says_nothing": ("pass", "returned None, not an Availability (portable.spec)"),
}


def probe_source(name: str) -> str:
    return PRELUDE + (
        f"class Bad(Fake):\n    def probe(self):\n        {BAD_PROBES[name][0]}\n"
        f"@hookimpl\ndef portable_backend(): return Bad(spec('{name}'))\n"
    )
