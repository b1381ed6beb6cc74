# Executed by memmap_gpt.py in its own namespace: --name=value replaces a setting of the same type.
import sys
from ast import literal_eval

for argument in sys.argv[1:]:
    name, _, text = argument.removeprefix("--").partition("=")
    if name not in globals():
        raise ValueError(f"unknown setting {name!r}")
    try:
        setting = literal_eval(text)
    except (SyntaxError, ValueError):
        setting = text
    assert type(setting) is type(globals()[name]), argument
    globals()[name] = setting
