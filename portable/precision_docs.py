"""docs/precision.md from the backends' declarations. What stands in it is the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from portable.backend import Backend
from portable.numerics import operation_bits
from portable.policy import policy_of
from portable.spec import Generation
from portable.support_table import shipped_backends
from portable.switches import LEVELS, MEANING, Level

INTRODUCTION = """\
# Precision: what to compute in, and what the switches do

This file is generated (`make docs`); the tests compare it with the code.

```python
import portable as pt

print(pt.precision())  # dtypes, loss scaling, every switch as it stands now, each with its reason
pt.precision(backend="cuda", generation="7.5").autocast  # of a device that is not here

with pt.precision("strict"):  # no float32 input is rounded, nothing is summed in 16 bits; a decorator too
    assert pt.mantissa_bits() == 24  # measured on the device
```

```sh
portable explain precision
portable explain precision --backend ascend --generation 910B2 --json
PORTABLE_PRECISION=strict python train.py  # for a whole program; so does pt.precision("strict").keep()
```

`pt.autocast()` and `pt.GradScaler()` follow the policy, `pt.precision_policy()` answers the part that they follow. Autocast
that was asked for is not a switch: no level turns it on or off. Float16 chosen by hand needs
`pt.GradScaler(dtype=torch.float16)`.

## Levels

{levels}

At the end of a block every switch is what it was, after an error too, and whatever the program set inside. Blocks may nest;
they may end in another order than they began, and the latest that is still open decides. Switches belong to the process, not to
a thread: a level in one thread holds in all. PyTorch reads them when an operator is called (`torch.compile` compiles again).

Two things that PyTorch's own switches do (2.13): setting `torch.backends.mkldnn.fp32_precision` sets the one for all devices,
and under `torch.backends.fp32_precision = "ieee"`, which `strict` uses too, reading the older `torch.backends.cudnn.allow_tf32`
raises.

A variable that a library reads when it starts cannot be turned: where `ONEDNN_DEFAULT_FPMATH_MODE` or `NEURON_CC_FLAGS` allow
less than float32 on a device that has the format, `strict` raises and says so. Hardware that multiplies no float32 (Ascend
910A) stays what it is; `strict` warns once.

## Mantissa bits

Bits that a float32 input of a product keeps, the implicit one counted: float32 24, HF32 12, TF32 and float16 11, bfloat16 8.
`pt.mantissa_bits("matmul" | "bmm" | "linear" | "conv2d")` measures them: a number whose last bit is bit k, times 1, less 1,
comes out exactly as long as bit k is kept. "allowed" below is what the switches let the device do, as declared; a kernel may
keep more.

Measured here: on a CPU with AVX2 (AMD Zen 1, PyTorch 2.13) every operation keeps 24 bits under each of oneDNN's modes, since
oneDNN has no kernel there that rounds. On the vendor's torch_npu above the host runtime, whose products follow the vendor's
HF32 switches, `allow_hf32 = True` gives 12 and `strict` 24; on the emulated Trainium `--auto-cast` gives 8. **Nothing was
measured on a GPU, an Ascend or a Trainium device.**

## Loss scaling

Tested on every backend (tests/api/check_precision.py): float16 training that really overflows skips the step, halves the scale,
leaves parameters and optimizer state as they were bit for bit, and doubles the scale after `growth_interval` good steps; with
the plain, foreach and fused optimizers. PyTorch's fused SGD with momentum takes uninitialised memory for momentum when the very
first step overflows (2.13, `torch/optim/sgd.py`); the scaler of `pt.GradScaler` keeps that out, `torch.amp.GradScaler` does
not.
"""


@dataclass(frozen=True)
class Row:
    """One generation: level to the mantissa bits of (matrix products, convolutions) that it allows."""

    backend: str
    generation: str
    bits: Mapping[Level, tuple[int, int]]


def generations() -> Iterator[Row]:
    """Every generation of the backends that come with `portable`."""
    for backend, generation in _all():
        yield Row(backend.spec.name, generation.name, {level: operation_bits(backend, generation, level) for level in LEVELS})


def _all() -> Iterator[tuple[Backend, Generation]]:
    for backend in shipped_backends():
        for described in backend.documented():
            for generation in described.spec.generations.values():
                yield described, generation


def _cell(bits: tuple[int, int]) -> str:
    return str(bits[0]) if bits[0] == bits[1] else f"{bits[0]}, conv {bits[1]}"


def render() -> str:
    """The whole document as Markdown."""
    rows = "\n".join(f"- `{level}`: {MEANING[level]}" for level in LEVELS)
    lines = [INTRODUCTION.replace("{levels}", rows), "## Policy by generation", ""]
    lines += ["Parameters, gradient reduction and optimizer state are float32 everywhere:", ""]
    found = list(_all())
    advice = found[0][0].spec.precision
    for name, part in (
        ("parameters", advice.parameters), ("gradient reduction", advice.reduction), ("optimizer state", advice.optimizer),
    ):  # fmt: skip
        lines.append(f"- {name}: {part.reason}.")
    for described in dict.fromkeys(backend for backend, _ in found):
        if described.spec.precision.parameters != advice.parameters:
            lines.append(f"- parameters on {described.spec.name}: {described.spec.precision.parameters.reason}.")
    lines += ["", "| backend | generation | autocast | scaler | allowed: strict | default | fast | why |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for backend, generation in found:
        policy = policy_of(backend.spec, generation)
        cells = [
            backend.spec.name,
            f"`{generation.name}`",
            policy.autocast or "off",
            "yes" if policy.scaler else "no",
            *(_cell(operation_bits(backend, generation, level)) for level in LEVELS),
            policy.reason,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Sources of the dtypes: [backends.md](backends.md). Loss scaling:", ""]
    for backend in dict.fromkeys(backend for backend, _ in found):
        for name, text in backend.spec.precision.scaling.items():
            lines.append(f"- {backend.spec.name}{f' ({name})' if name else ''}: {text}.")
    lines += ["", "## Switches", "", "| backend | switch | for | default | strict | fast | source |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for backend in dict.fromkeys(backend for backend, _ in found):
        for control in backend.precision_controls():
            for switch in control.documented():
                values = (switch.default, *(switch.at[level] for level in ("strict", "fast")))
                cells = [backend.spec.name, f"`{switch.name}`", switch.governs, *values, switch.source]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
