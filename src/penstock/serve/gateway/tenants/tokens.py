"""Tokens (JWT) of an OIDC issuer in place of keys. Each is checked once; the table then finds it as it finds
keys, until it expires.

The issuer's keys are fetched when the gateway starts, from time to time, and for a token that another one has
signed. While the issuer does not answer, those that were fetched last stay.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import TYPE_CHECKING, Any

import aiohttp

from penstock.config.schema.strict import NAME
from penstock.config.schema.tenants import SCOPES, USUAL_SCOPES, KeyConfig, OidcConfig, as_name, hashed
from penstock.errors import Error, Unauthorized, Unavailable
from penstock.serve.tenancy.keys import Grant, KeyTable

if TYPE_CHECKING:
    import jwt

log = logging.getLogger(__name__)

_ALGORITHMS = {"EdDSA", *(f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512))}
"""With a public key: one with a shared secret would let the issuer's clients make tokens."""

_LEEWAY_S = 30.0  # between clocks
_REFRESH_S, _AGAIN_S = 600.0, 5.0  # between fetches; between those for tokens of unknown keys
_FETCH_S, _MOST_BYTES = 5.0, 1 << 20
_LONGEST_BYTES = 8192
_NO_KEYS = "Tokens cannot be checked now: the issuer's keys could not be fetched. The gateway's log says why."


class IssuedTokens:
    """Used on the gateway's event loop, until `close`."""

    def __init__(self, config: OidcConfig, table: KeyTable) -> None:
        self.config = config
        self._table = table
        self._known: dict[str, jwt.PyJWK] = {}
        self._said: object = None  # by the issuer, of its keys
        self._fetching: asyncio.Task[None] | None = None
        self._fetched_at = 0.0
        self._watching = asyncio.create_task(self._watch())

    def close(self) -> None:
        self._watching.cancel()
        if self._fetching is not None:
            self._fetching.cancel()

    async def find(self, given: bytes) -> Grant | Error | None:
        """What a key, or a token, may do. Returns why a token is refused; None for what is neither."""
        grant = self._table.find(given, time.time())
        if grant is not None or given.count(b".") != 2 or len(given) > _LONGEST_BYTES:
            return grant
        try:
            return await self._checked(given)
        except Error as error:
            return error

    async def _checked(self, token: bytes) -> Grant:
        """Raises: Unauthorized, Unavailable."""
        if not self._known:
            await self._fetched()
        if not self._known:
            raise Unavailable(_NO_KEYS)
        import jwt

        config = self.config
        try:
            name = jwt.get_unverified_header(token).get("kid", "")
            if name not in self._known:
                await self._fetched()
            if (key := self._known.get(name)) is None:
                raise jwt.InvalidTokenError("its key is none of the issuer's")
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=config.audience,
                issuer=config.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            tenant = claims.get(config.tenant_claim)
            if not isinstance(tenant, str) or not re.fullmatch(NAME, tenant):
                raise jwt.InvalidTokenError(f"its claim '{config.tenant_claim}' must be the name of a tenant")
            scopes, models = (_words(claims, name) for name in (config.scopes_claim, config.models_claim))
        except (jwt.PyJWTError, OverflowError, ValueError) as error:
            raise Unauthorized(f"The token is refused: {error}.", www_authenticate="Bearer") from None
        key = KeyConfig.model_construct(
            tenant=tenant,
            name=as_name(str(claims.get("sub", ""))) or "token",
            hash=hashed(token.decode()),
            models=models,
            scopes=USUAL_SCOPES if scopes is None else [one for one in SCOPES if one in scopes],
            expires=int(claims["exp"]) + _LEEWAY_S,
        )
        return self._table.add_token(key)

    # -- the issuer's keys

    async def _watch(self) -> None:
        while True:
            await self._fetched()
            await asyncio.sleep(_REFRESH_S if self._known else _AGAIN_S)

    async def _fetched(self) -> None:
        """Waits for a fetch: one that runs, or a new one, if the last is some seconds ago."""
        if self._fetching is None or self._fetching.done():
            if self._fetched_at and time.monotonic() - self._fetched_at < _AGAIN_S:
                return
            self._fetched_at = time.monotonic()
            self._fetching = asyncio.create_task(self._fetch())
        await asyncio.wait({self._fetching})  # goes on when this caller is cancelled: others wait, too

    async def _fetch(self) -> None:
        try:
            known, said = await self._load()
        except Exception as error:  # of the network, of what it answered, or of a missing PyJWT
            log.error("Keys of %s cannot be fetched, the last ones stay: %r", self.config.issuer, error)
            return
        if said != self._said:
            self._table.forget_tokens()  # of a key that was taken back
        self._known, self._said = known, said

    async def _load(self) -> tuple[dict[str, jwt.PyJWK], object]:
        """By id; and as the issuer says them. Raises: what reading and parsing raise."""
        import jwt

        issuer, url = self.config.issuer, self.config.jwks_url
        limit = aiohttp.ClientTimeout(total=_FETCH_S)
        async with aiohttp.ClientSession(timeout=limit, trust_env=True) as session:
            if url is None:
                about = await _read(session, f"{issuer.rstrip('/')}/.well-known/openid-configuration")
                if about["issuer"] != issuer:
                    raise ValueError(f"it calls itself {about['issuer']!r}")
                url = about["jwks_uri"]
            given = await _read(session, url)
        usable = (key for key in jwt.PyJWKSet.from_dict(given).keys if key.algorithm_name in _ALGORITHMS)
        return {key.key_id or "": key for key in usable if key.public_key_use in (None, "sig")}, given


async def _read(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url, allow_redirects=False) as answer:
        answer.raise_for_status()
        content = bytearray()
        async for piece in answer.content.iter_any():
            content += piece
            if len(content) > _MOST_BYTES:
                raise ValueError(f"{url} answers more than {_MOST_BYTES} bytes")
        return json.loads(content)


def _words(claims: dict[str, Any], claim: str | None) -> list[str] | None:
    """Of a list, or of text with spaces; nothing where it is missing. None where no claim is configured.
    Raises: ValueError.
    """
    if claim is None:
        return None
    given = claims.get(claim) or []
    words = given.split() if isinstance(given, str) else given
    if not isinstance(words, list) or not all(isinstance(one, str) for one in words):
        raise ValueError(f"its claim '{claim}' must be a list of names, or text with spaces between them")
    return words
