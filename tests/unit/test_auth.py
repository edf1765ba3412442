"""Which path each kind of key reaches, of a gateway with one key, with an admin key, with tenants' keys."""

from typing import Any

import pytest

from penstock.config import GatewayConfig
from penstock.config.schema.tenants import KeyConfig, hashed
from penstock.errors import Error
from penstock.serve.gateway.auth import Auth
from penstock.serve.gateway.request import ClientRequest
from penstock.serve.tenancy.keys import KeyTable

SCOPES = {"user": ("chat",), "files": ("chat", "files"), "boss": ("admin",)}
PATHS = ("/v1/chat/completions", "/v1/files", "/admin/fleet", "/health", "/nothing")


def keys() -> KeyTable:
    """Tenants' keys, each with its name's scopes."""
    table = KeyTable()
    table.replace(
        [KeyConfig(tenant="t", name=one, hash=hashed(one), scopes=list(SCOPES[one])) for one in SCOPES], {}
    )
    return table


async def never() -> Any: ...


def asked(auth: Auth, path: str, **fields: str) -> tuple[int, ClientRequest]:
    """The status, and the request."""
    headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    request = ClientRequest({"method": "POST", "path": path, "headers": [*headers, (b"host", b"h")]}, never)
    try:
        return (200 if auth.route(request).path else 0), request
    except Error as error:
        return error.status, request


@pytest.mark.parametrize(("header", "scheme"), [("authorization", "bearer "), ("x_api_key", "")])
@pytest.mark.parametrize(
    ("config", "more", "expected"),
    [
        ({}, {}, {"": "200 404 404 200 404"}),
        ({}, {"has_jobs": True}, {"": "200 200 404 200 404"}),
        ({"admin_key": "a"}, {"administered": True}, {"": "200 404 401 200 404", "a": "200 404 200 200 404"}),
        ({"admin_key": "a"}, {}, {"": "200 404 404 200 404", "a": "200 404 404 200 404"}),
        (
            {"api_key": "k", "admin_key": "a"},
            {"administered": True, "has_jobs": True},
            {
                "": "401 401 401 200 401",
                "k": "200 200 401 200 404",
                "a": "401 401 200 200 401",
                "kk": "401 401 401 200 401",
            },
        ),
        ({"api_key": "k"}, {"administered": True}, {"": "401 401 401 200 401", "k": "200 404 404 200 404"}),
        (
            {"admin_key": "a"},
            {"administered": True, "has_jobs": True, "keys": keys()},
            {
                "": "401 401 401 200 401",
                "user": "200 403 403 200 404",
                "files": "200 200 403 200 404",
                "boss": "403 403 200 200 404",
                "a": "401 401 200 200 401",
            },
        ),
        (
            {},
            {"administered": True, "keys": keys()},
            {"user": "200 403 403 200 404", "boss": "403 403 200 200 404"},
        ),
    ],
)
def test_what_a_key_reaches(
    config: dict[str, str], more: dict[str, Any], expected: dict[str, str], header: str, scheme: str
):
    auth = Auth(GatewayConfig(**config), {}, **{"administered": False, "has_jobs": False, **more})
    found = {
        key: " ".join(str(asked(auth, path, **{header: scheme + key} if key else {})[0]) for path in PATHS)
        for key in expected
    }
    assert found == expected
    assert auth.keyed == ("api_key" in config or "keys" in more)
    right = "k" if "api_key" in config else "user"
    taken = [asked(auth, "/health", **{header: scheme + key})[1].has_key for key in (right, "wrong")]
    assert taken == [True, not auth.keyed]
    assert asked(auth, "/v1/models", authorization="Basic " + right)[0] == (401 if auth.keyed else 200)


def test_a_web_page_needs_a_key_where_it_is_not_named():
    page = {"origin": "https://elsewhere.example"}
    for config, status in (({}, 403), ({"api_key": "k"}, 200)):
        auth = Auth(GatewayConfig(**config), {}, administered=False, has_jobs=False)
        assert asked(auth, "/v1/models", x_api_key="k", **page)[0] == status
