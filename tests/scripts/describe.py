"""Prints what a program can see of how it was started, as JSON."""
import json
import sys

main = sys.modules["__main__"]
print(json.dumps({
    "name": __name__, "file": globals().get("__file__"), "argv": sys.argv, "path": sys.path[0], "package": __package__,
    "spec": getattr(__spec__, "name", None), "main": main.__dict__ is globals(), "builtins": type(__builtins__).__name__,
    "doc": __doc__, "cached": __cached__, "loader": type(__loader__).__name__,
}))
