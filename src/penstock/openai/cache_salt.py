"""Keeps prefix caches of tenants apart, by the field with which engines salt them."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from penstock.errors import Forbidden

FIELD = "cache_salt"
_PATHS = frozenset(
    (
        *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses"),
        *("/v1/messages", "/v1/generate", "/inference/v1/generate", "/v1/systemone", "/v1/embeddings"),
        *("/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    )
)
_WITHOUT = frozenset(("/cohere/v2/chat", "/v2/embed", "/generative_scoring"))
"""Engines read a prompt there, and no salt."""


class _Own(msgspec.Struct):
    cache_salt: msgspec.Raw = msgspec.Raw()


def own_salt(body: bytes) -> bytes:
    """What a JSON object gives as its salt."""
    try:
        return bytes(msgspec.json.decode(body, type=_Own).cache_salt)
    except msgspec.DecodeError:  # the engine refuses it
        return b""


def salted(tenant: str, path: str, own: bytes) -> dict[str, str]:
    """The field that a tenant's request gets, if any. own: JSON of what it has; the engine refuses it if it
    is no salt.

    Raises: Forbidden where the request cannot be kept apart.
    """
    if path in _WITHOUT:
        raise Forbidden(f"{path} cannot keep the prefix caches of tenants apart (gateway.isolate_cache).")
    if path not in _PATHS or (own not in (b"", b"null") and (own[:1] != b'"' or own == b'""')):
        return {}
    return {FIELD: sha256(b"%b\0%b" % (tenant.encode(), own.removeprefix(b"null"))).hexdigest()}
