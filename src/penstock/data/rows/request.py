"""What one row asks of an engine, in the one form that every engine and every process understands.

Made from what the user's preprocessing returned; read by the backends. It knows no engine and no Ray.
"""

from __future__ import annotations

import base64
import hashlib

import msgspec


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call of an OpenAI-compatible endpoint.

    body: JSON object without `model`, exactly as it is to be sent; as bytes no table of rows can change it.
    model: as the row names it (`base`, or `base:adapter`); None for the backend's own.
    prompt: the engine's own prompt, pickled, in place of the body's; only for an engine in this process.
    """

    path: str
    body: bytes
    model: str | None = None
    prompt: bytes | None = None


def digest(request: Request, salt: bytes) -> str:
    """The same for the same request. salt: who is asked, and what else must not share an answer."""
    found = hashlib.blake2b(salt, digest_size=12)
    prompt = () if request.prompt is None else (request.prompt,)
    for part in (request.path.encode(), (request.model or "").encode(), request.body, *prompt):
        found.update(len(part).to_bytes(8, "big") + part)
    return base64.b64encode(found.digest()).decode()
