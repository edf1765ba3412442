"""Adds fields to a JSON object without parsing it, so that nothing of it changes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


def with_fields(body: bytes, fields: Mapping[str, object]) -> bytes:
    """Appends `fields` to the JSON object `body`. They win over its own: parsers keep the last duplicate.

    A body that is not an object is returned as it is; the engine refuses it.
    """
    text = body.strip()
    if not (fields and text.startswith(b"{") and text.endswith(b"}")):
        return body
    rest = text[1:-1].rstrip()
    return b"{" + rest + (b"," if rest else b"") + msgspec.json.encode(fields)[1:]
