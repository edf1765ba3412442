"""Forced tool calls of the simulator: which function a chat must call, and with which arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import Struct

from penstock.errors import BadRequest

_DEPTH = 8
"""Of references within a schema: one that refers to itself ends here."""

_PLAIN: Mapping[str, Any] = {"string": "", "integer": 0, "number": 0.0, "boolean": False, "null": None}


class Function(Struct):
    name: str
    parameters: dict[str, Any] | None = None


class Tool(Struct):
    """Only functions are looked at."""

    function: Function | None = None


class Name(Struct):
    name: str


class Named(Struct):
    """A choice that names a function, or one of another kind."""

    function: Name | None = None


def forced(tools: list[Tool], choice: str | Named | None) -> Function | None:
    """The function that must be called: the named one, or the first. Raises: BadRequest without one."""
    functions = [tool.function for tool in tools if tool.function is not None]
    if isinstance(choice, Named):
        if choice.function is None:
            return None
        named = choice.function.name
        found = next((function for function in functions if function.name == named), None)
        if found is None:
            raise BadRequest(f"tool_choice names '{named}', which is no tool here.", param="tool_choice")
        return found
    if choice == "required" and not functions:
        raise BadRequest("tool_choice 'required' needs `tools`.", param="tools")
    return functions[0] if choice == "required" else None


def arguments(function: Function) -> str:
    """JSON of an object that fits the function's schema."""
    schema = {"type": "object", **(function.parameters or {})}
    return msgspec.json.encode(_example(schema, schema, _DEPTH)).decode()


def _example(part: Any, schema: Mapping[str, Any], depth: int) -> Any:
    """A small value that fits `part` of `schema`; patterns and formats of strings are not looked at."""
    if not isinstance(part, dict) or depth < 0:
        return {}
    part = cast("dict[str, Any]", part)
    for name in ("const", "default"):
        if name in part:
            return part[name]
    for name in ("enum", "anyOf", "oneOf", "allOf"):
        if isinstance(options := part.get(name), list) and options:
            options = cast("list[Any]", options)
            return options[0] if name == "enum" else _example(options[0], schema, depth)
    if isinstance(reference := part.get("$ref"), str):
        return _example(_target(reference, schema), schema, depth - 1)
    return _typed(part, schema, depth)


def _typed(part: Mapping[str, Any], schema: Mapping[str, Any], depth: int) -> Any:
    kind: Any = part.get("type", "object")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties: Mapping[str, Any] = part.get("properties") or {}
        return {name: _example(properties.get(name), schema, depth) for name in part.get("required") or ()}
    if kind == "array":
        return [_example(part.get("items"), schema, depth)] * part.get("minItems", 0)
    if kind == "string":
        return "x" * part.get("minLength", 0)
    return part.get("minimum", _PLAIN.get(kind, {}))


def _target(reference: str, schema: Mapping[str, Any]) -> Any:
    """The part that a reference into the same schema names; None for any other."""
    found: Any = schema
    for name in reference.removeprefix("#/").split("/"):
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return found
