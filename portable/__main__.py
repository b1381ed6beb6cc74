"""``python -m portable`` and the console script: every error of our own is one message and a non-zero exit."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line.

    Exit codes: 0 success, 1 an error that a message explains, 2 wrong usage; `portable run` exits with the script's own.
    """
    from portable.errors import PortableError

    gc.disable()  # imports make lasting objects only; looking for garbage among them is a tenth of the time to show a help text
    try:
        from portable.cli import app

        gc.enable()
        app(prog_name="portable")
    except PortableError as error:
        print(f"portable: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
