"""docs/emulated-device.md from the profiles of the backends that can be emulated."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from portable.backend import Backend
from portable.info_view import size
from portable.rehearsal import Profile, Rule
from portable.rehearsal.kernels import KernelTable
from portable.support_table import shipped_backends

HOW: Mapping[str, str] = {
    "family": "answered: `get_device_properties().name`",
    "memory": "enforced: an allocation beyond it raises `torch.OutOfMemoryError`; the peak and its line are counted",
    "device_count": "answered: `device_count()`",
    "rounding": "enforced: what an allocation takes of the memory",
    "computes_in": "enforced: the numbers come out as on the device; a result that this changed is a finding",
    "tuple_label": "enforced: the dtype of the answers",
    "refusals": "enforced: raised, or noted and computed all the same (`portable rehearse` without --strict)",
    "integer_matmul_bits": "enforced: the numbers come out as on the device; a result that this changed is a finding",
    "matmul_dtype": "enforced: inputs are rounded before the product",
    "autocast_dtype": "answered to `torch.autocast`",
    "autocast_dtypes": "answered to `torch.autocast`, which switches itself off for any other",
    "attention": "counted: path and reasons of each call, by line; how a kernel rounds is not emulated",
    "kernels": "counted: calls of operators without a kernel, by line. The CPU computes both kinds",
    "compile_per_shape": "counted: each new signature of an operator is a compilation, by line",
    "compile": "enforced: what is refused; counted: graphs and recompilations. The graph runs operator by operator",
    "random": "enforced: whose generator is advanced",
    "keeps_parameters": "answered to `Module.to`",
    "pinned": "answered: `is_pinned()`",
    "collectives": "enforced between processes over gloo: refusals, and the numbers of integer sums; counted",
    "surface": "enforced: other names raise AttributeError",
}
"""What becomes of each rule in a run; the keys are the fields of a `Profile`."""

INTRODUCTION = """\
# The emulated devices, rule by rule

This file is generated (`make docs`); the tests compare it with the code.

An emulated device follows a *profile*: a table of rules of the real device, each with who states it, or *assumed* with the
reason why it was chosen. `portable rehearse` runs programs on such devices ([rehearse.md](rehearse.md)); a variable
switches one on for any program that uses `portable`:

```sh
PORTABLE_NEURON_EMULATED=1 PORTABLE_BACKEND=neuron python train.py              # or trn3, or trn2,memory=512MiB
PORTABLE_ASCEND_HOST=910B2,path=.vendor PORTABLE_BACKEND=ascend python train.py # see host-acl.md
```

`portable info` then says `execution: emulated` (or `vendor-package-on-host`), and no result file can say `hardware`.

## What is enforced, what is counted, what cannot be shown

- **Enforced**: what the device refuses raises the error there; what it gets wrong comes out wrong; memory ends where the
  device's ends. Where no rule says otherwise the numbers are the CPU's, to the last bit.
- **Counted**, each with the line of the program: operators; operators without a kernel; compilations (new shapes and dtypes);
  waits of the host for the device, by kind; copies and their bytes; paths of attention; graphs of torch.compile; collectives;
  results that are silently wrong.
- **Cannot be shown**: any time; the last bits of the device's own kernels, and how they differ from the CPU's; whether the
  vendor's compiler takes a graph or a shape, and how long it needs; memory that compiled programs and workspaces take;
  fragmentation; what the network does; rules that nobody has published. **Nothing here has run on such a device.**

A rule marked *assumed* may be wrong in either direction. A rehearsal lists the assumptions it rests on (`assumptions` in its
file).
"""

WRITING = """\
## A profile for another vendor

The device is written once, for any profile (`portable/rehearsal`): tensors, views, autograd, memory, autocast, torch.compile,
collectives and counters ask the profile and know no vendor. A new vendor is a table. Every rule needs a source or a reason;
`Rule` refuses one that has neither.

```python
import torch
from portable.rehearsal import Profile, Rule, start
from portable.rehearsal.kernels import KernelTable
from portable.rehearsal.profile import AttentionCall, AttentionRule, CollectiveRule, CompileRule, Refusals

SHEET = "data sheet of the Acme One, 2026"


def why_not(call: AttentionCall) -> list[str]:
    return ["a mask is given"] if call.mask is not None else []


profile = Profile(
    device_type="acme",
    title="Acme One, emulated",
    family=Rule("one", "get_device_properties().name", SHEET),
    memory=Rule(8 * 2**30, "bytes of one device", SHEET),
    device_count=Rule(1, "one device a process", assumed="the sheet names no other way"),
    rounding=Rule((256, 2**20), "allocations below 1 MiB are rounded up to 256 bytes", SHEET),
    computes_in=Rule({torch.float64: torch.float32}, "float64 keeps its label and computes in float32", SHEET),
    tuple_label=Rule({}, "outputs keep their labels", assumed="nothing says otherwise"),
    refusals=Rule(Refusals(dtypes=frozenset({torch.complex64}), out=frozenset()), "no complex64", SHEET),
    integer_matmul_bits=Rule(None, "integer products are exact", SHEET),
    matmul_dtype=Rule(None, "float32 products are exact", SHEET),
    autocast_dtype=Rule(torch.bfloat16, "autocast without a dtype gives bfloat16", SHEET),
    autocast_dtypes=Rule((torch.bfloat16,), "bfloat16 only", SHEET),
    attention=Rule(AttentionRule("fused", "math", why_not, lambda call: []), "fused without a mask", SHEET),
    kernels=Rule(KernelTable(tags=("core", "pointwise")), "what PyTorch tags so", assumed="no table is published"),
    compile_per_shape=Rule(False, "kernels take any shape", SHEET),
    compile=Rule(CompileRule("acme", ignored_modes=True, options=()), "static shapes", SHEET),
    random=Rule("own", "each device has a generator", SHEET),
    keeps_parameters=Rule(True, "Module.to changes parameters in place", assumed="training needs it"),
    pinned=Rule(None, "as PyTorch answers", assumed="nothing says otherwise"),
    collectives=Rule(
        CollectiveRule("acme", None, sum_broadcast=False, refused={}, even_splits=False, barrier_default_group_only=False),
        "all of them",
        SHEET,
    ),
    surface=Rule(("is_available", "device_count", "current_device", "synchronize", "manual_seed_all"), "torch.acme", SHEET),
)
rehearsal = start(profile)
layer = torch.nn.Linear(4, 2).to("acme")
layer(torch.ones(3, 4, device="acme")).sum().backward()
print(layer.weight.grad.device, rehearsal.recorder.to_dict()["ops"])
```

A process has one such device for its whole life: PyTorch has one slot for devices from outside. In a backend package
([write-a-backend.md](write-a-backend.md)) `Backend.emulate` starts it, `Backend.profiles` names the profiles for this document,
and `Backend.costs` puts the costs of findings into the vendor's words; `portable rehearse --backend acme` then works.
A vendor's real package can be driven by the same counters: `portable_ascend.host_acl` hands the device's operators to the same
class, and lets the package decide the rest.
"""

_SOURCE = re.compile(r"^``(?P<name>\w+)``\s+(?P<text>.+(?:\n {8,}.+)*)", re.MULTILINE)
_IN_WORDS = {"rounding"}  # the text says it all


def _shown(value: Any) -> str:
    """A rule's value in words, "" if its text says all."""
    if isinstance(value, torch.dtype):
        return f"`{str(value)[6:]}`"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, KernelTable):
        missing = ", ".join(f"`{name}` ({why})" for name, why in value.missing.items())
        names = " ".join(f"`{name}`" for name in sorted(value.names))
        return f"tags {', '.join(value.tags)}; without: {missing}; besides the tags: {names}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return "; ".join(
            f"{name.replace('_', ' ')}: {_shown(item)}" for name, item in fields if not callable(item) and _shown(item)
        )
    if isinstance(value, Mapping):
        return ", ".join(f"{_shown(key)} → {_shown(item)}" for key, item in value.items())
    if isinstance(value, (tuple, frozenset)):
        items = sorted(value, key=str) if isinstance(value, frozenset) else value
        return " ".join(_shown(item) for item in items)
    if isinstance(value, (int, float)):
        return f"{value:,}"
    return f"`{value}`" if isinstance(value, str) else ""


def _value(name: str, rules: Mapping[str, Rule[Any]]) -> str:
    """The value for every generation: once if all have the same."""
    if name in _IN_WORDS:
        return ""
    shown = {key: size(rule.value) if name == "memory" else _shown(rule.value) for key, rule in rules.items()}
    if len(set(shown.values())) == 1:
        return next(iter(shown.values()))
    groups: dict[str, list[str]] = {}
    for key, text in shown.items():
        groups.setdefault(text, []).append(key)
    return "; ".join(f"{', '.join(keys)}: {text or 'nothing'}" for text, keys in groups.items())


def _rows(profiles: Mapping[str, Profile]) -> Iterable[tuple[str, ...]]:
    first = next(iter(profiles.values()))
    for name, rule in first.rows():
        rules = {key: getattr(profile, name) for key, profile in profiles.items()}
        standing = rule.source
        if rule.assumed:
            standing += f"{'; ' if standing else ''}**assumed**: {rule.assumed}"
        yield f"`{name}`", rule.text, _value(name, rules), HOW[name], standing


def _sources(package: str) -> list[str]:
    """The short names of sources, from the docstring of the backend's facts."""
    text = importlib.import_module(f"{package}.facts").__doc__ or ""
    return [f"- `{found['name']}`: {' '.join(found['text'].split())}" for found in _SOURCE.finditer(text)]


def _section(backend: Backend, profiles: Mapping[str, Profile]) -> list[str]:
    first = next(iter(profiles.values()))
    rules = [rule for _, rule in first.rows()]
    names = ", ".join(f"`{name}`" for name in profiles)
    return [
        f"## {backend.spec.name}: {backend.spec.vendor}",
        "",
        f"Device type `{first.device_type}`; generations {names}.",
        f"{sum(bool(rule.assumed) for rule in rules)} of {len(rules)} rules are assumed, in whole or in part. Sources:",
        "",
        *_sources(type(backend).__module__.partition(".")[0]),
        "",
        "| rule | the real device | value | in a run | source |",
        "| --- | --- | --- | --- | --- |",
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in _rows(profiles)),
        "",
    ]


def render() -> str:
    """The whole document as Markdown."""
    lines = [INTRODUCTION]
    for backend in shipped_backends():
        profiles = backend.profiles()
        if profiles:
            lines += _section(backend, profiles)
    return "\n".join([*lines, WRITING])
