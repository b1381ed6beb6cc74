"""`portable rehearse`: run a program on a device that is not there, and say what would happen on the real one.

Data flows one way: recorders of the processes -> `observations` -> `findings` -> `result` -> the views and the file.
"""

from __future__ import annotations

from portable.provenance import NOTICE
from portable.rehearse.reading import parse, read
from portable.rehearse.result import SCHEMA, Finding, Result

__all__ = ["NOTICE", "SCHEMA", "Finding", "Result", "parse", "read"]
