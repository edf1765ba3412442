"""A row's value as JSON: the same value, or an error that names the field and what it holds.

Rows come from Arrow, pandas, numpy and the user's code; requests are JSON. Nothing is dropped and nothing
rounded on the way.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any, cast
from uuid import UUID

import msgspec

from penstock.errors import BadRequest

_SHOWN_CHARS = 80
_MAX_DEPTH = 200
_NOT_A_TIME = "is NaT, which JSON cannot hold; None leaves a field out"


def to_json(value: Any, where: str, depth: int = 0) -> Any:
    """`value` as None, bool, int, float, str, lists and dicts.

    Arrays and Arrow scalars become what they hold, bytes a string (UTF-8), times ISO 8601 strings, a pydantic
    class its JSON schema.
    Raises: BadRequest naming `where`.
    """
    if value is None or value is True or value is False or type(value) is int:
        return value
    if depth > _MAX_DEPTH:
        raise invalid_field(where, f"is nested more than {_MAX_DEPTH} levels deep, or contains itself")
    if isinstance(value, Enum):
        return to_json(value.value, where, depth + 1)
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, float):
        return _number(value, where)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_key(key, where): to_json(item, f"{where}.{key}", depth + 1) for key, item in items}
    if isinstance(value, list | tuple):
        items = enumerate(cast("Iterable[Any]", value))
        return [to_json(item, f"{where}[{index}]", depth + 1) for index, item in items]
    return _other(value, where, depth)


def to_dict(value: Any, where: str) -> dict[str, Any]:
    """A dict, also from JSON text. Raises: BadRequest."""
    value = parse_json(value, where)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise invalid_field(where, f"is {type_name(value)}; it must be a dict")
    found = dict(cast("Mapping[Any, Any]", value))
    for key in found:
        if not isinstance(key, str):
            raise invalid_field(
                where, f"has the key {truncate(repr(key))}, {type_name(key)}; keys must be strings"
            )
    return found


def parse_json(value: Any, where: str) -> Any:
    """The value of JSON text, for tables whose columns hold no lists and dicts; other values unchanged."""
    if hasattr(value, "as_py"):
        value = value.as_py()
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise invalid_field(where, f"is not valid JSON ({error})") from error
    except RecursionError as error:
        raise invalid_field(where, "is JSON with too many levels") from error


def as_list(value: Any) -> Any:
    """A list where `value` is another library's sequence; else `value`."""
    for method in ("as_py", "tolist", "to_pylist"):
        if hasattr(value, method):
            return getattr(value, method)()
    return list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value


def expect(value: Any, where: str, wanted: str) -> Any:
    """`value` as JSON, checked to be of the type `wanted`, a key of `_TYPES`. Raises: BadRequest."""
    if wanted in ("object", "objects"):
        value = parse_json(value, where)
    value = to_json(value, where)
    if wanted in ("whole", "number", "bool") and isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value.strip().lower())  # a cell of a CSV file
    if wanted == "whole" and isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of integers with nulls becomes floats in some tables
    kind, words = _TYPES[wanted]
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        fault = f"is {truncate(repr(value))}, {type_name(value)}; it must be {words}"
        raise invalid_field(where, fault) from error


def invalid_field(where: str, fault: str) -> BadRequest:
    """The error about the field `where`. fault: a verb and what follows, without the full stop."""
    return BadRequest(f"{where} {fault}{'' if fault.endswith('?') else '.'}", param=where)


def type_name(value: Any) -> str:
    """The type of a value, with its article."""
    return (
        "None"
        if value is None
        else f"{'an' if type(value).__name__[0] in 'aeiouAEIOU' else 'a'} {type(value).__name__}"
    )


def truncate(text: str) -> str:
    """As much of a text as an error may show."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _text(value: str, where: str) -> str:
    text = str.__str__(value)  # also of subclasses of str, as numpy's
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise invalid_field(
                where,
                f"has a lone surrogate at position {error.start}, which UTF-8 cannot encode",
            ) from error
    return text


def _number(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise invalid_field(where, f"is {float(value)}, which JSON cannot hold; None leaves a field out")
    return float(value)


def _key(key: Any, where: str) -> str:
    if isinstance(key, str):
        return _text(key, where)
    if hasattr(key, "tolist"):
        key = key.tolist()
    if isinstance(key, int) and not isinstance(key, bool):  # of logit_bias
        return str(key)
    raise invalid_field(where, f"has the key {truncate(repr(key))}, {type_name(key)}; keys must be strings")


def _other(value: Any, where: str, depth: int) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError as error:
            fault = "has bytes that are not UTF-8; send images, videos and audio as parts of messages"
            raise invalid_field(where, fault) from error
    if isinstance(value, date | time):
        if isinstance(value, datetime) and value != value:  # pandas' NaT
            raise invalid_field(where, _NOT_A_TIME)
        return value.isoformat()
    if isinstance(value, Decimal):
        return _decimal(value, where)
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, type):
        return _schema(value, where, depth)
    if _dtype(value) == "M" and (value != value).any():
        raise invalid_field(where, _NOT_A_TIME)
    found = _opened(value)
    if found is value:
        raise invalid_field(
            where, f"is {type_name(value)}, which JSON cannot hold; use strings, numbers, lists and dicts"
        )
    return to_json(found, where, depth + 1)


def _opened(value: Any) -> Any:
    """The content of another library's container; other values unchanged."""
    if hasattr(value, "as_py"):  # an Arrow scalar
        return value.as_py()
    if hasattr(value, "to_pylist"):
        return value.to_pylist()
    if _dtype(value) == "M":  # `tolist` would return numbers
        return value.astype(str).tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(cast("Any", value))
    return value.tolist() if hasattr(value, "tolist") else value


def _dtype(value: Any) -> str | None:
    """numpy's kind of an array's items: M for times."""
    return getattr(getattr(value, "dtype", None), "kind", None)


def _decimal(value: Decimal, where: str) -> int | float:
    if value.is_finite():
        if value == value.to_integral_value():
            return int(value)
        if Decimal(repr(float(value))) == value:
            return float(value)
    raise invalid_field(
        where, f"is {value}, which no JSON number represents exactly; use a float or a string"
    )


def _schema(value: type, where: str, depth: int) -> Any:
    schema = getattr(value, "model_json_schema", None)
    if schema is None:
        raise invalid_field(where, f"is the class {value.__name__}; use a JSON schema or a pydantic class")
    return to_json(schema(), where, depth + 1)


_TYPES: Mapping[str, tuple[Any, str]] = {
    "any": (Any, "anything"),
    "whole": (int, "a whole number"),
    "number": (int | float, "a number"),
    "bool": (bool, "true or false"),
    "text": (str, "a string"),
    "texts": (str | list[str], "a string or a list of strings"),
    "wholes": (list[int], "a list of whole numbers"),
    "object": (dict, "a dict"),
    "objects": (list[dict[str, Any]], "a list of dicts"),
}
