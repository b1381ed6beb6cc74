"""The documents that are generated from the code: ``python -m portable.documents FOLDER`` writes them (`make docs`).

A test compares the files in the repository with what is produced here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from portable import backend_docs, emulation_docs, precision_docs, support_table

DOCUMENTS: dict[str, Callable[[], str]] = {
    "device-api.md": support_table.render,
    "backends.md": backend_docs.render,
    "emulated-device.md": emulation_docs.render,
    "precision.md": precision_docs.render,
}


def main(arguments: list[str]) -> int:
    """Write every document into the folder that is named."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print(f"an existing folder must be named, got {arguments}; usage: python -m portable.documents docs", file=sys.stderr)
        return 2
    for name, render in DOCUMENTS.items():
        (Path(arguments[0]) / name).write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
