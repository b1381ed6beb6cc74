"""The documents: links lead somewhere, the README's example runs, names that it mentions exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import portable as pt

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
