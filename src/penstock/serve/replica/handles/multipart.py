"""A multipart form: what a call by handle with a file becomes on its way to the engine's app.

Used by `api`, for calls by handle; forms that come by HTTP are passed on as they are.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import FormData

from penstock.errors import BadRequest
from penstock.openai.paths import UPLOADS

FILE = "file"
PATHS = frozenset(UPLOADS.values())
"""They take forms, not JSON."""


async def encode(fields: Mapping[str, Any]) -> tuple[str, bytes]:
    """Content type and body of a form with these fields, of which `file` is the one with a file's bytes.

    Lists become repeated fields, objects JSON, and what is None is left out.
    Raises: BadRequest when `file` is neither bytes nor a file.
    """
    form = FormData(quote_fields=False, default_to_multipart=True)
    for name, value in fields.items():
        if name == FILE:
            called, found = content(value)
            form.add_field(name, io.BytesIO(found), filename=called)  # aiohttp warns of large bytes
        else:
            for text in _texts(value):
                form.add_field(name, text)
    body = form()
    return body.headers["content-type"], await body.as_bytes()


def content(file: object) -> tuple[str, bytes]:
    """Name and bytes of an upload: bytes, a file, starlette's `UploadFile`, or (name, either of them).

    Raises: BadRequest for anything else.
    """
    if isinstance(file, list) and len(file) == 1:  # FastAPI's form of a field that is a tuple
        return content(file[0])
    if isinstance(file, tuple | list) and len(file) >= 2:
        name, inner = file[0], file[1]
        return str(name), content(inner)[1]
    called = getattr(file, "filename", None) or getattr(file, "name", None)
    name = called.rpartition("/")[2] if isinstance(called, str) else "audio"
    inner: Any = getattr(file, "file", file)  # an upload's own `read` is a coroutine
    if isinstance(inner, bytes | bytearray | memoryview):
        return name, bytes(inner)
    found = inner.read() if hasattr(inner, "read") else None
    if not isinstance(found, bytes):
        kind = type(file).__name__
        raise BadRequest(
            f"'{FILE}' must be bytes or a file opened for reading bytes, not {kind}.", param=FILE
        )
    return name, found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif value is not None:
        yield value if isinstance(value, str) else msgspec.json.encode(value).decode()
