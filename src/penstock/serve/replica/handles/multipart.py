"""A multipart form: what a call by handle with a file becomes on its way to the engine's app.

Used by `api`, for calls by handle; forms that come by HTTP are passed on as they are.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from penstock.errors import BadRequest

FILE = "file"
PATHS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""They take forms, not JSON."""


def encode(fields: Mapping[str, Any]) -> tuple[str, bytes]:
    """Content type and body of a form with these fields, of which `file` is the one with a file's bytes.

    Lists become repeated fields, objects JSON, and what is None is left out.
    Raises: BadRequest when `file` is neither bytes nor a file.
    """
    boundary = secrets.token_hex(16)
    pieces: list[bytes] = []
    for name, value in fields.items():
        for head, content in _parts(name, value):
            pieces += [
                f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode(),
                content,
                b"\r\n",
            ]
    pieces.append(f"--{boundary}--\r\n".encode())
    return f"multipart/form-data; boundary={boundary}", b"".join(pieces)


def content(file: object) -> tuple[str, bytes]:
    """Name and bytes of an upload: bytes, a file, starlette's `UploadFile`, or (name, either of them).

    Raises: BadRequest for anything else.
    """
    if isinstance(file, tuple | list) and len(file) >= 2:
        name, inner = file[0], file[1]
        return str(name), content(inner)[1]
    name = _name(getattr(file, "filename", None) or getattr(file, "name", None))
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


def _name(given: object) -> str:
    return given.rpartition("/")[2] if isinstance(given, str) else "audio"


def _parts(name: str, value: Any) -> Iterator[tuple[str, bytes]]:
    if name == FILE:
        called, found = content(value)
        yield f'name="{FILE}"; filename="{_quoted(called)}"\r\nContent-Type: application/octet-stream', found
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _parts(name, each)
    elif value is not None:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield f'name="{_quoted(name)}"', text.encode()


def _quoted(name: str) -> str:
    """Source: WHATWG HTML, multipart/form-data encoding."""
    return name.replace("\n", "%0A").replace("\r", "%0D").replace('"', "%22")
