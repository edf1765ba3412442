"""A row's messages in OpenAI's form: roles and contents checked, media as data URLs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, cast

from penstock.data.rows import media
from penstock.data.rows.coerce import as_list, invalid_field, parse_json, to_json, truncate, type_name
from penstock.data.rows.request import ROLES, Task

_MEDIA = {
    "image": "image",
    "image_url": "image",
    "image_pil": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
}
"""Types of media parts, as OpenAI, vLLM, Qwen and Hugging Face write them."""

_ASSUMED_TYPES = {"image": "png", "video": "mp4", "audio": "wav"}
"""Of base64 that comes without its type."""

_MEDIA_KEYS = ("url", "path", "base64")
_PARTS = ", ".join(("text", *_MEDIA, "input_audio"))


def read_messages(value: Any, task: Task, where: str = "messages") -> list[dict[str, Any]]:
    """Raises: BadRequest naming the message and what is wrong with it."""
    value = as_list(parse_json(value, where))
    if not isinstance(value, list):
        raise invalid_field(
            where, f"is {_shown(value)}; it must be a list of messages with 'role' and 'content'"
        )
    if not value:
        raise invalid_field(where, "is empty; give at least one message with 'role' and 'content'")
    items = cast("list[Any]", value)
    return [_message(item, task, f"{where}[{index}]") for index, item in enumerate(items)]


def is_messages(value: Any) -> bool:
    """Whether a prompt is a list of messages, as in some datasets."""
    value = as_list(value)
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _message(value: Any, task: Task, where: str) -> dict[str, Any]:
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json", exclude_unset=True)
    if not isinstance(value, Mapping):
        raise invalid_field(where, f"is {_shown(value)}; it must be a dict with 'role' and 'content'")
    message = cast("Mapping[str, Any]", value)
    _check_role(message, where)
    if "content" not in message and message["role"] not in ("assistant", "tool", "function"):
        raise invalid_field(f"{where}.content", "is missing; give a string or a list of parts")
    found: dict[str, Any] = {}
    for name, item in message.items():
        if name == "content":
            found["content"] = _content(item, task, f"{where}.content")
        elif item is not None:
            found[str(name)] = to_json(item, f"{where}.{name}")
    return found


def _check_role(message: Mapping[str, Any], where: str) -> None:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        given = "is missing" if "role" not in message else f"is {_shown(role)}"
        raise invalid_field(
            f"{where}.role", f"{given}; it must be a string: system, user, assistant, tool, ..."
        )
    if role in ROLES:
        return
    close = difflib.get_close_matches(role, ROLES, 1)
    ask = f"did you mean {close[0]!r}?" if close else "known are"
    raise invalid_field(
        f"{where}.role",
        f"is {truncate(repr(role))}, which is not known; {ask} {', '.join(sorted(ROLES))}",
    )


def _content(value: Any, task: Task, where: str) -> Any:
    value = as_list(value)
    if isinstance(value, Mapping):
        raise invalid_field(where, "is a dict; it must be a string or a list of parts")
    if not isinstance(value, list):
        found = to_json(value, where)
        if found is not None and not isinstance(found, str):
            raise invalid_field(where, f"is {_shown(found)}; it must be a string or a list of parts")
        return found
    return [_part(item, task, f"{where}[{index}]") for index, item in enumerate(cast("list[Any]", value))]


def _part(value: Any, task: Task, where: str) -> Any:
    if isinstance(value, str):
        return {"type": "text", "text": to_json(value, where)}
    if not isinstance(value, Mapping):
        raise invalid_field(where, f"is {_shown(value)}; a part must be a dict with 'type' ({_PARTS})")
    part = cast("Mapping[str, Any]", value)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise invalid_field(where, f"is a part without 'type'; there are {_PARTS}")
    if kind == "input_audio":
        return _input_audio(part, task, where)
    if kind in _MEDIA:
        return _media_part(part, kind, task, where)
    return _drop_none(part, where)


def _drop_none(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Without fields that are None: a table gives each message the keys of all, and engines refuse them."""
    return {str(name): to_json(item, f"{where}.{name}") for name, item in fields.items() if item is not None}


def _media_part(part: Mapping[str, Any], kind: str, task: Task, where: str) -> dict[str, Any]:
    """As `image_url`, `video_url` or `audio_url`, with the part's other fields beside it."""
    medium = _MEDIA[kind]
    name = next((name for name in (kind, medium, *_MEDIA_KEYS) if part.get(name) is not None), None)
    if name is None:
        raise invalid_field(where, f"is a part of type {kind!r} without {kind!r}")
    content, details = part[name], cast("dict[str, Any]", {})
    if isinstance(content, Mapping) and "url" in content:
        details = {str(key): item for key, item in cast("Mapping[str, Any]", content).items() if key != "url"}
        content = cast("Mapping[str, Any]", content)["url"]
    if name == "base64":
        content = f"data:{medium}/{_ASSUMED_TYPES[medium]};base64,{content}"
    address = media.data_url(content, medium, f"{where}.{name}", task.read_files)
    others = {str(key): item for key, item in part.items() if key not in ("type", name) and item is not None}
    field = f"{medium}_url"
    return to_json({"type": field, field: {"url": address} | details} | others, where)


def _input_audio(part: Mapping[str, Any], task: Task, where: str) -> Any:
    """Unchanged where it has base64; bytes, files and arrays become base64."""
    content: Any = part.get("input_audio")
    inner = content.get("data", content) if isinstance(content, Mapping) else content
    if isinstance(content, Mapping) and isinstance(inner, str):
        return _drop_none(part, where)
    if inner is None:
        raise invalid_field(where, "is a part of type 'input_audio' without 'input_audio'")
    data, form = media.input_audio(inner, f"{where}.input_audio", task.read_files)
    return _drop_none(dict(part) | {"input_audio": {"data": data, "format": form}}, where)


def _shown(value: Any) -> str:
    return (
        f"{truncate(repr(value))}, {type_name(value)}"
        if isinstance(value, str | int | float)
        else type_name(value)
    )
