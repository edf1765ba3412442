"""JSON of the admin endpoints: what is asked of the fleet, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.errors import BadRequest


class _Whom(msgspec.Struct, omit_defaults=True):
    """What every operation takes, beside its own arguments."""

    model: str | None = None
    replica: str | None = None
    timeout_s: float | None = None


_WHOM = frozenset(_Whom.__struct_fields__)


def asked(body: bytes | bytearray, model: str | None) -> dict[str, Any]:
    """Arguments of an operation. model: as the query names it.

    Raises: BadRequest for anything but a JSON object, or nothing.
    """
    try:
        given = msgspec.json.decode(body or b"{}", type=dict[str, Any])
        whom = msgspec.convert({"model": model} | {name: given[name] for name in _WHOM & given.keys()}, _Whom)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadRequest(f"The body must be a JSON object of the operation's arguments: {error}.") from error
    own = {name: value for name, value in given.items() if name not in _WHOM}
    return own | msgspec.to_builtins(whom)


def shown(found: Mapping[str, Any]) -> bytes:
    """What workers gave is shown as it is, where JSON has a form for it; else as Python writes it."""
    return msgspec.json.encode(found, enc_hook=repr)
