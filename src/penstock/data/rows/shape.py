"""What a field of a row must be, a whole number, a text, a dict; also where it comes as JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from penstock.data.rows.coerce import cut, kind_of, plain, refused


def mapping(value: Any, where: str) -> dict[str, Any]:
    """A dict, also where it comes as JSON text. Raises: BadRequest."""
    value = parsed(value, where)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refused(where, f"is {kind_of(value)}; it must be a dict")
    found = dict(cast("Mapping[Any, Any]", value))
    for key in found:
        if not isinstance(key, str):
            raise refused(where, f"has the key {cut(repr(key))}, {kind_of(key)}; keys must be texts")
    return found


def parsed(value: Any, where: str) -> Any:
    """What JSON text holds, for columns of a table that cannot hold lists and dicts; all else untouched."""
    if hasattr(value, "as_py"):
        value = value.as_py()
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise refused(where, f"is a text that is no JSON ({error})") from error
    except RecursionError as error:
        raise refused(where, "is JSON that is nested too deeply") from error


def checked(value: Any, where: str, wanted: str) -> Any:
    """`value` as JSON has it, if it is what is `wanted`, a key of `_TYPES`. Raises: BadRequest."""
    if wanted in ("object", "objects"):
        value = parsed(value, where)
    value = plain(value, where)
    if wanted == "whole" and isinstance(value, float) and value.is_integer():
        value = int(value)  # a table with gaps in a column has floats there
    fits, words = _TYPES[wanted]
    if not fits(value):
        raise refused(where, f"is {cut(repr(value))}, {kind_of(value)}; it must be {words}")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _all(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, cast("list[Any]", value)))


_TYPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "any": (lambda value: True, "anything"),
    "whole": (_is_whole, "a whole number"),
    "number": (lambda value: _is_whole(value) or isinstance(value, float), "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "text": (lambda value: isinstance(value, str), "a text"),
    "texts": (
        lambda value: isinstance(value, str) or _all(value, lambda item: isinstance(item, str)),
        "a text or a list of texts",
    ),
    "wholes": (lambda value: _all(value, _is_whole), "a list of whole numbers"),
    "object": (lambda value: isinstance(value, dict), "a dict"),
    "objects": (lambda value: _all(value, lambda item: isinstance(item, dict)), "a list of dicts"),
}
