"""What a request asks for, in the one form that engines read; and what of OpenAI's API is not done here.

Every engine that reads bodies calls `prepared`, for HTTP and for the lines of a batch. The same table is in
`docs/reference/endpoints.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from penstock.errors import BadRequest
from penstock.openai import response_items

Request = dict[str, Any]

_CHATS, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_NOT_DONE: Mapping[str, Mapping[str, str]] = {
    _CHATS: {
        "functions": "Send them as `tools`.",
        "function_call": "Send it as `tool_choice`.",
        "web_search_options": "Models here do not search the web; give the model a tool that does.",
        "audio": "Answers are text.",
        "modalities": "Answers are text.",
    },
    _RESPONSES: {
        "conversation": "Send `previous_response_id`, or the items of the conversation.",
        "context_management": "Send fewer items, or `truncation`.",
        "prompt": "Send `instructions` and `input` in place of a stored prompt.",
        "image": "Answers are text.",
    },
    _MESSAGES: {
        "container": "Tools run at the client.",
        "mcp_servers": "Tools run at the client.",
    },
}
"""By the beginning of the path: fields that ask for what is not done, and what to do instead."""

_ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {"modalities": (["text"],), "function_call": ("none", "auto")}
_TOOLS = ("function", "custom", "namespace", "allowed_tools")
"""Kinds of Responses' tools that clients run."""

_NESTED = ("messages", "input", "tools", "tool_choice", "response_format", "text", "reasoning", "system")
_VALUES = frozenset(
    {"arguments", "input", "input_schema", "json_schema", "metadata", "output", "parameters", "schema"}
)
"""Below these null is a value."""
_DEEPEST = 8


def prepared(path: str, request: Request, *, nulls: bool = True) -> Request:
    """The request without fields that are null, and with Responses' input items in one form; itself if it
    has neither. nulls: whether there can be any.
    """
    found = _without_nulls(request) if nulls else request
    if path.startswith(_RESPONSES) and isinstance(items := found.get("input"), list):
        items = cast("list[Any]", items)
        read = [response_items.as_read(item) for item in items]
        if any(new is not old for new, old in zip(read, items, strict=True)):
            found = {**found, "input": read}
    return found


def refuse_not_done(path: str, request: Mapping[str, Any], *, hosted_tools: bool = False) -> None:
    """hosted_tools: whether the engine runs tools. Raises: BadRequest for what would be ignored."""
    for start, fields in _NOT_DONE.items():
        if not path.startswith(start):
            continue
        for name in fields.keys() & request.keys():
            if (value := request[name]) and value not in _ASKS_NOTHING.get(name, ()):
                raise BadRequest(f"`{name}` is not supported. {fields[name]}", param=name)
    if path.startswith(_CHATS) and isinstance(messages := request.get("messages"), list):
        for message in cast("list[Any]", messages):
            turn = cast("Request", message) if isinstance(message, dict) else {}
            if turn.get("function_call") or turn.get("role") == "function":
                raise BadRequest(
                    "`messages` has a turn in the form of `functions`, which is not supported. Send "
                    "`tool_calls` of the assistant, and their results with the role `tool`.",
                    param="messages",
                )
    if path.startswith(_RESPONSES) and not hosted_tools:
        choice = request.get("tool_choice")
        for name, listed in (("tools", request.get("tools")), ("tool_choice", [choice])):
            for tool in cast("list[Any]", listed) if isinstance(listed, list) else ():
                kind: Any = cast("Request", tool).get("type") if isinstance(tool, dict) else None
                if isinstance(kind, str) and kind not in _TOOLS:
                    raise BadRequest(
                        f"`{name}` names '{kind[:80]}', which is not run here. Send tools of type `function` "
                        "or `custom`, and run them at the client.",
                        param=name,
                    )


def _without_nulls(request: Request) -> Request:
    if not any(value is None or name in _NESTED for name, value in request.items()):
        return request
    return {
        name: _set_fields(value, _DEEPEST) if name in _NESTED else value
        for name, value in request.items()
        if value is not None
    }


def _set_fields(value: Any, depth: int) -> Any:
    """The value without the members of its objects that are null, down to `depth`."""
    if not depth:
        return value
    if isinstance(value, list):
        return [_set_fields(one, depth - 1) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    return {
        name: one if name in _VALUES else _set_fields(one, depth - 1)
        for name, one in cast("Request", value).items()
        if one is not None
    }
