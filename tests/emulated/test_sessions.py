"""Each ``check_*`` file in a pytest session of its own: a process can have one device from outside, and this one has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SWITCH = "PORTABLE_NEURON_EMULATED"
# Environment of the sessions that need another than {SWITCH: "1"}.
ENVIRONMENTS = {
    "check_memory": {SWITCH: "trn2,memory=8MiB"},
    "check_compiler_flags": {"NEURON_CC_FLAGS": "--auto-cast=matmult --auto-cast-type=bf16"},
}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, SWITCH: "1", "OMP_NUM_THREADS": "1", **variables}
    for name in ("PORTABLE_BACKEND", "NEURON_CC_FLAGS", "TORCH_NEURONX_ENABLE_NKI_SDPA"):
        if name not in variables:
            environment.pop(name, None)
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("check_*.py")))
def test_session(name: str) -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / f"{name}.py"), **ENVIRONMENTS.get(name, {}))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


FIRST = "import torch, portable as pt\n"


@pytest.mark.parametrize(
    ("program", "variables", "message"),
    [
        pytest.param(
            "pt.use('neuron')\nfrom portable.rehearsal import start\nfrom portable_neuron.profile import profile\n"
            "from portable_neuron.emulated import Options\nstart(profile(Options('trn3')))",
            {},
            "this process emulates AWS Trainium2 (logical NeuronCore-v3, LNC=2), emulated already",
            id="another profile",
        ),
        pytest.param(
            "torch.utils.rename_privateuse1_backend('npux')\npt.use('neuron')", {}, "has the device 'npux'", id="slot taken"
        ),
        pytest.param(
            "torch.utils.rename_privateuse1_backend('npux')\nfrom portable import selection\n"
            "selection.find('neuron').emulate()",
            {},
            "this process has the device 'npux' already",
            id="slot taken, emulate",
        ),
        pytest.param(
            "from portable import selection\nselection.find('neuron').emulate(devices=2)",
            {},
            "2 emulated neuron devices were asked for in one process, which can have one",
            id="two devices",
        ),
        pytest.param("pt.use('neuron')", {SWITCH: "trn2,devices=2"}, "torchrun --nproc-per-node 2", id="two by variable"),
        pytest.param("pt.use('neuron')", {SWITCH: "trn7"}, "Write 1, a generation (trn2, trn3", id="unknown generation"),
        pytest.param("pt.use('neuron')", {SWITCH: "trn1"}, "does not support trn1", id="trn1"),
        pytest.param("pt.use('neuron')", {SWITCH: "trn2,memory=lots"}, "memory=512MiB", id="memory"),
        pytest.param(
            "pt.use('neuron')", {"NEURON_CC_FLAGS": "--auto-cast=all --auto-cast-type=fp8_e4m3"}, "use bf16 or fp16", id="flags"
        ),
    ],
)
def test_what_cannot_be_is_said(program: str, variables: dict[str, str], message: str) -> None:
    done = run("-c", FIRST + program, **variables)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr[-3000:]


def test_without_the_switch_nothing_is_emulated() -> None:
    done = run("-c", FIRST + "assert not hasattr(torch, 'neuron')\npt.use('neuron')", **{SWITCH: "0"})
    assert done.returncode != 0 and "torch-neuronx is not installed" in done.stderr


def test_info_says_emulated() -> None:
    done = run("-m", "portable", "info", "--json", PORTABLE_BACKEND="neuron")
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"execution": "emulated"' in done.stdout and "Counts and rules, no times" in done.stdout


def test_the_same_device_twice() -> None:
    """Asking again for what runs answers it, also through the selection and for processes started by this one."""
    program = """
from portable import selection
from portable.rehearsal import current
first = selection.find('neuron').emulate('trn3', memory=2**30)
assert selection.find('neuron').emulate('trn3', memory=2**30) is first is current()
assert torch.neuron.get_device_properties().total_memory == 2**30 and torch.neuron.get_device_properties().name == 'trn3'
import subprocess, sys
code = "import portable as pt, torch; pt.use('neuron'); print(torch.neuron.get_device_properties())"
print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout)
"""
    done = run("-c", FIRST + program, **{SWITCH: "0"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert "name='trn3', total_memory=1073741824" in done.stdout
