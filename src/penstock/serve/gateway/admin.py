"""JSON of the admin endpoints: what is asked of the fleet, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from penstock.errors import BadRequest
from penstock.serve.control.operations import parse


class _Whom(msgspec.Struct, omit_defaults=True):
    """What every operation takes, beside its own arguments."""

    model: str | None = None
    replica: str | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] | None = None


_WHOM = frozenset(_Whom.__struct_fields__)
STATUS = "status"


def asked(operation: str, body: bytes | bytearray, model: str | None) -> dict[str, Any]:
    """Arguments of an operation, or of the status. model: as the query names it.

    Raises: BadRequest for an operation that there is not, for anything but a JSON object of its arguments, or
    nothing.
    """
    try:
        given = msgspec.json.decode(body or b"{}", type=dict[str, Any])
        whom = msgspec.convert({"model": model} | {name: given[name] for name in _WHOM & given.keys()}, _Whom)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body must be a JSON object of the operation's arguments: {error}.") from error
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    if operation == STATUS:
        if given.keys() - {"model"}:
            raise BadRequest("The status takes a model, and nothing else.")
        return msgspec.to_builtins(whom)
    own = {name: value for name, value in given.items() if name not in _WHOM}
    parse(operation, own)
    return own | msgspec.to_builtins(whom)


def shown(found: Mapping[str, Any]) -> bytes:
    """What workers gave is shown as it is, where JSON has a form for it; else as Python writes it."""
    return msgspec.json.encode(found, enc_hook=repr)
