"""A row's body made whole for the wire, as bytes: nothing of it is parsed, so nothing of it changes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """The JSON object `body` with these fields, which go before its own of the same name.

    What is no object stays as it is: the engine says what is wrong with it.
    """
    whole = body.strip()
    if not (fields and whole.startswith(b"{") and whole.endswith(b"}")):
        return body
    rest = whole[1:-1].rstrip()
    return b"{" + rest + (b"," if rest else b"") + msgspec.json.encode(fields)[1:]
