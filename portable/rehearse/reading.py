"""Reading a rehearsal's result file back. What is damaged, foreign or newer is refused with a message that says which."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any

from portable.errors import ConfigurationError
from portable.rehearse.result import SCHEMA, Result

_FAMILY, _, _VERSION = SCHEMA.partition("/")

_PLAIN: dict[Any, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (int, float)}


def read(path: str | Path) -> Result:
    """The result that `portable rehearse --json` wrote to a file.

    Raises:
        ConfigurationError: the file cannot be read, is no rehearsal's result, was written by a newer `portable`, or lacks
            or misstates a field.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"the rehearsal result {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigurationError(
            f"{path} was given as a rehearsal result, but is not JSON ({error}). Was it cut off? Run portable rehearse again."
        ) from error
    return parse(data, str(path))


def parse(data: Any, name: str = "the data") -> Result:
    """The result in what `Result.as_dict` or its JSON gave.

    Args:
        name: what to call it in messages.

    Raises:
        ConfigurationError: see `read`.
    """
    schema = data.get("schema") if isinstance(data, dict) else None
    family, _, version = schema.partition("/") if isinstance(schema, str) else ("", "", "")
    if family != _FAMILY:
        raise ConfigurationError(
            f"{name} was given as a rehearsal result, but its schema is {schema!r}, not {SCHEMA!r}. "
            "Pass a file that portable rehearse --json wrote."
        )
    if version != _VERSION:
        newer = version.isdecimal() and int(version) > int(_VERSION)
        advice = "Update portable." if newer else "Run portable rehearse again."
        raise ConfigurationError(f"{name} has the schema {schema!r}, and this portable reads {SCHEMA!r}. {advice}")
    try:
        return typing.cast(Result, _decode(Result, data, "result"))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{name} is damaged: {error}. Run portable rehearse again.") from error


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(kind: Any, value: Any, where: str) -> Any:
    """A value of a type that `portable.rehearse.result` uses, from JSON's types.

    Raises:
        ValueError: the value is not of that type; the message says where.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_object(typing.cast(type, kind), value, where)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            if type(None) in arguments:
                return None
            raise ValueError(f"{where} is null")
        return _decode(next(a for a in arguments if a is not type(None)), value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{where} is {value!r}, not one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_decode(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _decode(arguments[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    plain = _PLAIN.get(kind, ())
    if not isinstance(value, plain) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} is {value!r:.80}, not {getattr(origin or kind, '__name__', kind)}")
    return value


def _decode_object(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.80}, not an object")
    hints = _hints(kind)
    missing = [item.name for item in dataclasses.fields(kind) if item.name not in value]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise ValueError(f"{where} has the unknown fields {', '.join(unknown)}")
    return kind(**{name: _decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})
