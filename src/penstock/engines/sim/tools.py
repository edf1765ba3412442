"""Answers of a form that the request sets: the call of a tool, with its arguments, or a value of a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import Struct

from penstock.errors import BadRequest

_DEPTH = 8
"""Of references within a schema: one that refers to itself ends here."""

_FORMATS: Mapping[str, str] = {
    "date": "2000-01-01",
    "time": "00:00:00Z",
    "date-time": "2000-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "name@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_PLAIN: Mapping[str, Any] = {"string": "", "integer": 0, "number": 0.0, "boolean": False, "null": None}


class Function(Struct):
    name: str
    parameters: dict[str, Any] | None = None

    def schema(self) -> dict[str, Any]:
        """Of its arguments: an object, as clients expect."""
        return {"type": "object", **(self.parameters or {})}


class Tool(Struct):
    """Only functions are looked at."""

    function: Function | None = None


class Named(Struct):
    """A choice that names a function."""

    function: Function


class ResponseFormat(Struct):
    """OpenAI's and Anthropic's way to set the form of an answer. Chats hold the schema in `json_schema`."""

    type: str
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None


class Structured(Struct):
    """vLLM's way."""

    json: Any = None
    json_object: bool | None = None
    choice: list[str] | None = None
    regex: str | None = None
    grammar: str | None = None
    structural_tag: Any = None


def structured(asked: ResponseFormat | None) -> Structured | None:
    """OpenAI's way turned into vLLM's; None for free text. Raises: BadRequest."""
    if asked is None or asked.type == "text":
        return None
    if asked.type not in ("json_schema", "json_object"):
        raise BadRequest(f"The simulator has no form '{asked.type}'.", param="response_format")
    schema = (asked.json_schema or {}).get("schema", asked.schema)
    if asked.type == "json_schema" and schema is None:
        raise BadRequest("A response_format of type json_schema needs a schema.", param="response_format")
    return Structured(json=schema or {})


def forms(asked: Structured | None) -> list[str]:
    """Answers of the form that is set, or none for free text. Raises: BadRequest."""
    if asked is None:
        return []
    for name in ("regex", "grammar", "structural_tag"):
        if getattr(asked, name) is not None:
            raise BadRequest(f"The simulator has no {name}.", param=f"structured_outputs.{name}")
    if asked.json is None:
        return asked.choice or (["{}"] if asked.json_object else [])
    schema = _decoded(asked.json)
    return [msgspec.json.encode(_example(schema, schema, _DEPTH)).decode()]


def _decoded(schema: Any) -> Any:
    """vLLM takes a schema also as a text. Raises: BadRequest."""
    try:
        return msgspec.json.decode(schema) if isinstance(schema, str) else schema
    except msgspec.DecodeError as error:
        raise BadRequest("The schema is not valid JSON.", param="structured_outputs.json") from error


def forced(tools: list[Tool], choice: str | Named | None) -> Function | None:
    """The function that must be called: the named one, or the first. Raises: BadRequest without one."""
    name = choice.function.name if isinstance(choice, Named) else None
    if name is None and choice != "required":
        return None
    for tool in tools:
        if tool.function and name in (None, tool.function.name):
            return tool.function
    which = f"the function '{name}'" if name is not None else "a function"
    raise BadRequest(f"`tool_choice` asks for {which}, which `tools` does not have.", param="tool_choice")


def _example(part: Any, schema: Any, depth: int) -> Any:
    """A small value that fits `part` of `schema`; patterns of strings are not looked at. Behind a reference,
    which may lead to itself, null is taken where it fits.
    """
    if not isinstance(part, dict) or depth < 0:
        return {}
    part = cast("dict[str, Any]", part)
    for name in ("const", "default"):
        if name in part:
            return part[name]
    for name in ("enum", "anyOf", "oneOf", "allOf"):
        if isinstance(options := part.get(name), list) and options:
            options = cast("list[Any]", options)
            if depth < _DEPTH and {"type": "null"} in options:
                return None
            return options[0] if name == "enum" else _example(options[0], schema, depth)
    if isinstance(reference := part.get("$ref"), str):
        return _example(_target(reference, schema), schema, depth - 1)
    return _typed(part, schema, depth)


def _typed(part: Mapping[str, Any], schema: Any, depth: int) -> Any:
    kind: Any = part.get("type", "object")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object":
        properties: Mapping[str, Any] = part.get("properties") or {}
        return {name: _example(properties.get(name), schema, depth) for name in part.get("required") or ()}
    if kind == "array":
        items = [_example(one, schema, depth) for one in part.get("prefixItems") or ()]
        return items + [_example(part.get("items"), schema, depth)] * (part.get("minItems", 0) - len(items))
    if kind == "string":
        return _FORMATS.get(part.get("format", ""), "x" * part.get("minLength", 0))
    if "exclusiveMinimum" in part:
        return part["exclusiveMinimum"] + 1
    return part.get("minimum", part.get("maximum", _PLAIN.get(kind, {})))


def _target(reference: str, schema: Any) -> Any:
    """The part that a reference into the same schema names; None for any other."""
    found: Any = schema
    for name in reference.removeprefix("#/").split("/"):
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return found
