"""When two requests may share one answer: the key of a request, and whether its answer is always the same."""

from __future__ import annotations

import base64
import hashlib

import msgspec

from penstock.data.rows.request import RowRequest


def request_digest(request: RowRequest, salt: bytes) -> str:
    """Equal for equal requests. salt: identity of the model, and whatever else keeps answers apart."""
    found = hashlib.blake2b(salt, digest_size=12)
    prompt = () if request.prompt is None else (request.prompt,)
    for part in (request.path.encode(), (request.model or "").encode(), request.body, *prompt):
        found.update(len(part).to_bytes(8, "big") + part)
    return base64.b64encode(found.digest()).decode()


class _Sampling(msgspec.Struct):
    temperature: float | None = None
    seed: int | None = None


_sampling = msgspec.json.Decoder(_Sampling).decode
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def is_deterministic(request: RowRequest) -> bool:
    """Whether the same request gets the same answer: nothing is sampled, or with a seed in the request.

    A payload for a URL, and a method's call, have no path of an endpoint: they may generate, too.
    """
    if request.path.startswith("/") and request.path not in _GENERATING:
        return True
    try:
        body = _sampling(request.body)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return False
    return body.temperature == 0 or body.seed is not None
