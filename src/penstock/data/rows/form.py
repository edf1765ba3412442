"""A payload with files as a form (`multipart/form-data`), as uploads to transcription services want it.

A payload is a form where a value is bytes, or a dict with the bytes as `content`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import aiohttp
import msgspec

from penstock.data.rows.coerce import invalid_field, to_json, type_name

_FILE = {"content", "filename", "content_type"}


def is_form(payload: object) -> bool:
    """Whether a value of the payload is a file."""
    return isinstance(payload, Mapping) and any(
        isinstance(value, bytes | bytearray) or _is_file(value)
        for value in cast("Mapping[Any, Any]", payload).values()
    )


def checked(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload's values as arguments of `FormData.add_field`: files as they are, all else as text or JSON.

    Raises: BadRequest.
    """
    return {str(name): _value(value, f"payload.{name}") for name, value in payload.items()}


def form_data(fields: Mapping[str, Any]) -> aiohttp.FormData:
    """Of `checked` fields; for one request, since sending it uses it up."""
    form = aiohttp.FormData()
    for name, value in fields.items():
        form.add_field(name, **value)
    return form


def _value(value: Any, where: str) -> Any:
    name = where.rpartition(".")[2]
    if isinstance(value, bytes | bytearray):
        return {"value": bytes(value), "filename": name}
    if not _is_file(value):
        found = to_json(value, where)
        return {"value": found if isinstance(found, str) else msgspec.json.encode(found).decode()}
    if unknown := sorted(value.keys() - _FILE):
        raise invalid_field(f"{where}.{unknown[0]}", f"is not known; a file has {', '.join(sorted(_FILE))}")
    content = value["content"]
    if not isinstance(content, bytes | bytearray | str):
        raise invalid_field(f"{where}.content", f"is {type_name(content)}; it must be bytes")
    return {
        "value": content.encode() if isinstance(content, str) else bytes(content),
        "filename": value.get("filename") or name,
        "content_type": value.get("content_type"),
    }


def _is_file(value: object) -> bool:
    return isinstance(value, Mapping) and "content" in value
