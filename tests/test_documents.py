"""The documents: links lead somewhere, the README's example runs, names that it mentions exist."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import portable as pt
from portable import emulation_docs, selection
from portable.rehearsal import Profile

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_names_in_the_readme_exist() -> None:
    for name in set(re.findall(r"\bpt\.([a-zA-Z_.]+)", (ROOT / "README.md").read_text(encoding="utf-8"))):
        found: object = pt
        for part in name.rstrip(".").split("."):
            found = getattr(found, part)


def test_the_example_of_the_readme_trains() -> None:
    """The code block as it stands; only the model and the loader, which it leaves to the reader, are supplied."""
    block = re.search(
        r"```python\n(import torch\nimport portable.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert block is not None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.layer(x), y)

    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True)
    names: dict[str, object] = {"Model": Model, "loader": [(x, y)] * 60}
    with pt.use("cpu"):
        exec(block[1].replace("lr=3e-4", "lr=3e-2").replace("pt.compile(model)", "pt.compile(model, backend='eager')"), names)
    start = nn.functional.mse_loss(torch.zeros_like(y), y)
    assert float(names["loss"].detach()) < 0.3 * float(start)  # type: ignore[attr-defined]


def test_each_rule_of_a_profile_says_what_becomes_of_it() -> None:
    assert set(emulation_docs.HOW) == {
        field.name for field in dataclasses.fields(Profile) if field.name not in ("device_type", "title")
    }


@pytest.mark.parametrize("name", ["ascend", "neuron"])
def test_the_document_on_emulated_devices_has_every_rule_and_its_standing(name: str) -> None:
    backend = selection.find(name)
    section = (ROOT / "docs" / "emulated-device.md").read_text(encoding="utf-8").split(f"## {name}: ")[1].split("\n## ")[0]
    rows = {row.split(" | ")[0].strip("|` "): row for row in section.splitlines() if row.startswith("| `")}
    for profile in backend.profiles().values():
        for field, rule in profile.rows():
            assert rule.source.replace("|", "\\|") in rows[field] and rule.assumed in rows[field]
            assert ("**assumed**" in rows[field]) is bool(rule.assumed)
    assert set(backend.profiles()) == set(backend.spec.generations) - {"trn1"}


def test_the_profile_of_the_document_makes_a_device() -> None:
    """The code block as it stands, in a process of its own: one has one device."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "emulated-device.md").read_text(encoding="utf-8"), re.DOTALL)
    more = """
import torch.nn.functional as F
torch.acme.manual_seed_all(1)
x = torch.ones(1, 2, 4, 8, device="acme")
F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool, device="acme"))
(path, reasons, _, _), = rehearsal.recorder.attention
assert (path, reasons) == ("math", ("a mask is given",)), (path, reasons)
try:
    torch.ones(2, dtype=torch.complex64, device="acme")
except RuntimeError as error:
    print(error)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PORTABLE_NEURON_EMULATED", None)
    command = [sys.executable, "-W", "error::FutureWarning", "-c", block + more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = done.stdout.splitlines()
    assert first.startswith("acme:0 {") and "'aten::addmm': 1" in first
    assert "complex64" in second and "Acme One, emulated" in second


def test_the_messages_that_host_acl_explains_are_said_somewhere() -> None:
    """Each row of the tables at its end names a message; "..." and the letters N, X, Y stand for what differs."""
    sources = [
        *(ROOT / "backends" / "portable_ascend" / "host_acl").rglob("*.py"),
        ROOT / "portable" / "rehearsal" / "session.py",
    ]
    sources += (ROOT / "backends" / "portable_ascend" / "host_acl" / "runtime").glob("*.c")
    said = re.sub(r"\"\s*f?\"", "", "\n".join(path.read_text(encoding="utf-8") for path in sources))
    vendors = ("not in libopapi.so", "NPU out of memory", "processing for 32 padding size")
    text = (ROOT / "docs" / "host-acl.md").read_text(encoding="utf-8").split("## When it does not start")[1]
    cells = [row.split(" | ")[0].strip("| ") for row in text.splitlines() if row.startswith("| `")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 20
    for message in messages:
        parts = re.split(r"\.\.\.|\b[NXYM]\b|\blibascendcl\.so\b", message)
        pattern = r"[^\n]{0,80}?".join(re.escape(part.strip(" '")) for part in parts if part.strip(" '"))
        assert re.search(pattern, said) or any(known in message for known in vendors), message
