"""Makes the arguments of a forced tool call an object, where the child is vLLM's server or SGLang's.

These enforce a tool's schema only where the tool is `strict`; otherwise the arguments of a forced call may be
any JSON, where clients expect an object, and fail. Other servers enforce it by themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

_ENFORCED = frozenset(
    {"type", "properties", "required", "items", "enum", "const", "anyOf", "additionalProperties"}
    | {"$ref", "$defs", "title", "description", "default", "examples", "$schema"}
)
"""Keywords that every grammar library takes. With others the server might refuse the whole request."""

_SCHEMAS = ("parameters", "input_schema")
_OPEN = ("auto", "none", "allowed_tools")


def strict(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat, a response or a message; where a call is forced, a copy whose tools are `strict`,
    unless they say otherwise or their schema may be refused.
    """
    if not _is_forced(fields.get("tool_choice")):
        return fields
    fields = {**fields, "tools": copy.deepcopy(fields.get("tools"))}
    for function in _functions(fields.get("tools")):
        schema = next((function[name] for name in _SCHEMAS if function.get(name)), None)
        if schema is None:
            schema = function["parameters"] = {"type": "object", "properties": {}}
        if function.get("strict") is None and _is_enforced(schema):
            function["strict"] = True
    return fields


def _is_forced(choice: Any) -> bool:
    kind: Any = cast("dict[str, Any]", choice).get("type") if isinstance(choice, dict) else choice
    return kind is not None and kind not in _OPEN


def _functions(tools: Any) -> Iterator[dict[str, Any]]:
    """Chats wrap a tool's function; Responses and Messages do not."""
    for given in cast("list[Any]", tools) if isinstance(tools, list) else ():
        tool = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        if "input_schema" in tool or tool.get("type") == "function":
            function: Any = tool.get("function", tool)
            if isinstance(function, dict):
                yield cast("dict[str, Any]", function)


def _is_enforced(schema: Any) -> bool:
    """Whether the schema, and each one in it, has only keywords that any server enforces."""
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    part = cast("dict[str, Any]", schema)
    if not part.keys() <= _ENFORCED:
        return False
    inner = [part[name] for name in ("items", "additionalProperties") if name in part]
    for name in ("properties", "$defs"):
        inner += cast("dict[str, Any]", part[name]).values() if isinstance(part.get(name), dict) else ()
    return all(_is_enforced(one) for one in [*inner, *(part.get("anyOf") or ())])
