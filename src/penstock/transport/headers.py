"""Which header fields pass between client and replica, and which the gateway removes or adds."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from urllib.parse import quote

from penstock import tiers
from penstock.asgi import HOP_BY_HOP, OWN, passing
from penstock.errors import BadRequest
from penstock.transport import link
from penstock.transport.connection import Headers

REQUEST_ID = b"x-request-id"
# Credentials are for the gateway; it writes the length itself and has answered Expect.
_NOT_TO_REPLICA = HOP_BY_HOP | {
    REQUEST_ID,
    b"host",
    b"content-length",
    b"expect",
    b"authorization",
    b"x-api-key",
    b"cookie",
    b"origin",  # it answers browsers, see `serve.http.cors`
    b"x-vllm-priority",  # clients choose a class, no more
}
_NOT_TO_CLIENT = HOP_BY_HOP | {b"server", b"date", REQUEST_ID}
_CORS = b"access-control-"
_VALID_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")


def request_id(given: bytes | None) -> str:
    """The client's own id if it is valid in logs and headers, else a new one."""
    if given is not None and _VALID_ID.fullmatch(given):
        return given.decode()
    return uuid.uuid4().hex


def to_replica(method: str, target: bytes, client: Headers, own: Headers, body_bytes: int | None) -> bytes:
    """Head of the request to a replica: the client's fields that pass, then the gateway's.

    body_bytes: None for a body in chunks.
    Raises: BadRequest for a line break in a field; no HTTP parser passes one.
    """
    fields = passing(client, _NOT_TO_REPLICA)
    length = (b"content-length", b"%d" % body_bytes) if body_bytes is not None else link.CHUNKED
    fields += [(b"host", b"replica"), length, *own]
    lines = [
        method.encode() + b" " + target + b" HTTP/1.1",
        *(name + b": " + value for name, value in fields),
    ]
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    if head.count(b"\n") != len(lines) + 1 or b" " in target:
        raise BadRequest("The request's path or headers contain a line break.")
    return head


def of_handle(given: Mapping[str, str]) -> dict[str, str]:
    """Fields of a call by handle that pass: as from a client, and the request id."""
    kept: dict[str, str] = {}
    for name, value in given.items():
        lower = name.lower().encode("latin-1", "replace")
        if lower == REQUEST_ID or (lower not in _NOT_TO_REPLICA and not lower.startswith(OWN)):
            kept[name] = value
    return kept


def own(
    secret: str, gateway_id: str, request_id: str, adapter: str = "", tier: str = tiers.DEFAULT
) -> Headers:
    """Fields that only a gateway, or batch, may send to a replica."""
    fields = [
        (link.SECRET, secret.encode()),
        (link.GATEWAY, gateway_id.encode()),
        (REQUEST_ID, request_id.encode()),
    ]
    if tier != tiers.DEFAULT:
        fields.append((link.TIER, tier.encode()))
    return [*fields, (link.ADAPTER, quote(adapter, safe="").encode())] if adapter else fields


def to_client(replica: Headers) -> Headers:
    """The replica's fields that pass to the client."""
    return [
        field for field in replica if field[0] not in _NOT_TO_CLIENT and not field[0].startswith((OWN, _CORS))
    ]
