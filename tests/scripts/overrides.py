# Executed by train_gpt.py in its own namespace.
import sys
from ast import literal_eval

for argument in sys.argv[1:]:
    key, value = argument[2:].split('=')
    try:
        value = literal_eval(value)
    except (SyntaxError, ValueError):
        pass
    assert key in globals(), f'unknown option {key}'
    globals()[key] = value
