"""Tokens of an OIDC issuer: checked against keys that a real server gives out, and found as keys are."""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from served import Served, chat

from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.gateway.tenants import tokens

pytestmark = pytest.mark.parity("X6")

RSA, OTHER = (rsa.generate_private_key(65537, 2048) for _ in range(2))
EC = ec.generate_private_key(ec.SECP256R1())
SECRET = "a-secret-of-more-than-32-characters"


def public(key: Any, kid: str, **more: str) -> dict[str, str]:
    kind = ECAlgorithm if key is EC else RSAAlgorithm
    return {**json.loads(kind.to_jwk(key.public_key())), "kid": kid, "use": "sig", **more}


class Issuer:
    """A provider's two documents, at a port of its own."""

    def __init__(self) -> None:
        self.keys = [public(RSA, "rsa", alg="RS256"), public(EC, "ec"), {"kty": "new", "kid": "new"}]
        self.keys.append({"kty": "new", "kid": "long", "x": "x" * 300_000})  # comes in many pieces
        self.keys.append(
            {"kty": "oct", "kid": "oct", "k": base64.urlsafe_b64encode(SECRET.encode()).decode()}
        )
        self.fetches, self.status, self.url = 0, 200, ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._about)
        app.router.add_get("/keys", self._keys)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def _about(self, _: web.Request) -> web.Response:
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

    async def _keys(self, _: web.Request) -> web.Response:
        self.fetches += 1
        return web.json_response({"keys": self.keys}, status=self.status)

    def token(self, key: Any = RSA, kid: str = "rsa", alg: str = "RS256", **claims: Any) -> str:
        usual = {"iss": self.url, "aud": "penstock", "exp": time.time() + 60, "tenant": "ann", "sub": "a|1"}
        found = {name: value for name, value in {**usual, **claims}.items() if value is not None}
        return jwt.encode(found, key, alg, {"kid": kid})


@pytest.fixture
async def issuer():
    found = Issuer()
    await found.start()
    yield found
    await found.runner.cleanup()


async def asked(served: Served, token: str, model: str = "m", path: str = "/v1/chat/completions") -> Any:
    async with served.http(headers={"authorization": f"Bearer {token}"}) as http:
        return await http.post(path, json={**chat(), "model": model})


async def gateway(served: Served, issuer: Issuer, **more: Any) -> Any:
    found = await served.gateway(
        *("m", ServedModel("other", created=1)),
        oidc={"issuer": issuer.url, "audience": "penstock", **more.pop("oidc", {})},
        **more,
    )
    await served.replica("m")
    return found


async def test_a_token_is_its_tenants_key(served: Served, issuer: Issuer):
    limits = {"ann": {"limits": {"requests_per_minute": 3}}}
    found = await gateway(served, issuer, tenants=limits, api_key="the single key of before")
    for token in (issuer.token(), issuer.token(EC, "ec", "ES256", aud=["else", "penstock"])):
        assert (await asked(served, token)).status_code == 200
    again = await asked(served, issuer.token(sub="b"))
    assert again.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await asked(served, issuer.token(sub="c"))).status_code == 429
    rows = found._tenants.usage.counters._rows
    assert {key[1:4] for key in rows} >= {("ann", "a-1", "m"), ("ann", "b", "m")}
    assert (await asked(served, "the single key of before")).status_code == 200
    assert issuer.fetches == 1


FORGED: dict[str, Callable[[Issuer], str]] = {
    "Signature verification failed": lambda issuer: issuer.token(OTHER),
    "its key is none of the issuer's": lambda issuer: issuer.token(OTHER, "other"),
    "Signature has expired": lambda issuer: issuer.token(exp=time.time() - 40),
    "not yet valid": lambda issuer: issuer.token(nbf=time.time() + 40),
    "Audience doesn't match": lambda issuer: issuer.token(aud="else"),
    'missing the "aud" claim': lambda issuer: issuer.token(aud=None),
    'missing the "exp" claim': lambda issuer: issuer.token(exp=None),
    "Invalid issuer": lambda issuer: issuer.token(iss="https://else"),
    "The specified alg value is not allowed": lambda issuer: jwt.encode({}, "", "none", {"kid": "rsa"}),
    "alg value is not allowed": lambda issuer: issuer.token(SECRET, "rsa", "HS256"),
    "none of the issuer's.": lambda issuer: issuer.token(SECRET, "oct", "HS256"),
    "its claim 'tenant' must be": lambda issuer: issuer.token(tenant="no name"),
    "its claim 'tenant' must": lambda issuer: issuer.token(tenant=["ann"]),
    "Invalid": lambda issuer: "a.b.c",
}


async def test_a_wrong_token_is_refused_with_the_reason(served: Served, issuer: Issuer):
    await gateway(served, issuer)
    assert (await asked(served, issuer.token(exp=time.time() - 10))).status_code == 200  # clocks differ
    for reason, token in FORGED.items():
        answer = await asked(served, token(issuer))
        assert answer.status_code == 401, reason
        assert reason.removesuffix(".") in answer.json()["error"]["message"]
    good = issuer.token()
    head, claims, signature = good.split(".")
    assert (await asked(served, f"{head}.{claims}x.{signature}")).status_code == 401
    assert (await asked(served, good)).status_code == 200


async def test_claims_say_models_and_scopes(served: Served, issuer: Issuer):
    claims = {"tenant_claim": "team", "models_claim": "models", "scopes_claim": "scope"}
    await gateway(served, issuer, oidc=claims)
    team = {"tenant": None, "team": "ann", "models": ["m"], "scope": "openid chat"}
    assert (await asked(served, issuer.token(**team))).status_code == 200
    assert (await asked(served, issuer.token(**team), "other")).status_code == 404
    assert (await asked(served, issuer.token(**team), path="/v1/embeddings")).status_code == 403
    assert (await asked(served, issuer.token(**{**team, "scope": None}))).status_code == 403
    assert (await asked(served, issuer.token(**{**team, "models": None}))).status_code == 404
    odd: list[tuple[str, Any]] = [
        ("scope", 5),
        ("scope", {"chat": True}),
        ("models", ["m", 1]),
        ("exp", math.inf),
    ]
    for name, value in odd:
        answer = await asked(served, issuer.token(**{**team, name: value}))
        assert answer.status_code == 401, name
        assert name == "exp" or f"its claim '{name}' must" in answer.json()["error"]["message"]
    async with served.http(headers={"authorization": f"Bearer {issuer.token(**team)}"}) as http:
        assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["m"]


async def test_the_issuers_last_keys_go_on_and_new_ones_are_fetched(
    served: Served, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
):
    issuer.status = 500
    await gateway(served, issuer, oidc={"jwks_url": f"{issuer.url}/keys"})
    assert (await asked(served, issuer.token())).status_code == 503
    for _ in range(20):
        await asked(served, issuer.token())
    assert issuer.fetches == 1  # the next is due in some seconds
    monkeypatch.setattr(tokens, "_AGAIN_S", 0.0)
    issuer.status = 200
    old = issuer.token()
    assert (await asked(served, old)).status_code == 200
    fetches = issuer.fetches
    issuer.status = 500
    assert (await asked(served, issuer.token(sub="b"))).status_code == 200
    assert (await asked(served, issuer.token(OTHER, "other"))).status_code == 401
    assert issuer.fetches == fetches + 1
    issuer.status, issuer.keys = 200, [public(OTHER, "other")]
    assert (await asked(served, issuer.token(OTHER, "other"))).status_code == 200
    assert (await asked(served, old)).status_code == 401  # its key was taken back
    replaced = issuer.token(OTHER, "other")
    assert (await asked(served, replaced)).status_code == 200
    issuer.keys = [public(RSA, "other")]  # a new key under the old id
    assert (await asked(served, issuer.token(kid="unknown"))).status_code == 401  # has them fetched
    assert (await asked(served, replaced)).status_code == 401
