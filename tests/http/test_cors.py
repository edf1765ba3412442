"""CORS: what a browser is told about pages of other origins; nothing unless the config names them."""

from __future__ import annotations

import httpx
import pytest
from served import Served, chat

from penstock.config import GatewayConfig
from penstock.errors import ConfigError

pytestmark = pytest.mark.parity("X21")

PAGE, OTHER = "http://localhost:3000", "https://elsewhere.example"
ASKS = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def allowed(answer: httpx.Response) -> str | None:
    return answer.headers.get("access-control-allow-origin")


def listed(answer: httpx.Response, name: str) -> set[str]:
    return {word.strip().lower() for word in answer.headers.get(name, "").split(",")}


async def test_a_preflight_needs_no_key_and_allows_what_clients_send(served: Served):
    await served.gateway("m", api_key="key", cors={"origins": [PAGE]})
    async with served.http() as http:
        answer = await http.options("/v1/chat/completions", headers={"origin": PAGE, **ASKS})
    assert (answer.status_code, allowed(answer)) == (200, PAGE)
    assert {"get", "post", "delete"} <= listed(answer, "access-control-allow-methods")
    assert {"authorization", "content-type", "x-stainless-lang"} <= listed(
        answer, "access-control-allow-headers"
    )
    assert "origin" in listed(answer, "vary")
    assert "access-control-allow-credentials" not in answer.headers


async def test_answers_streams_and_errors_can_be_read_by_the_page(served: Served):
    await served.gateway("m", api_key="key", cors={"origins": [PAGE]})
    await served.replica(reply="one two three")
    async with served.http(headers={"origin": PAGE, "authorization": "Bearer key"}) as http:
        answer = await http.post("/v1/chat/completions", json=chat())
        stream = await http.post("/v1/chat/completions", json=chat(stream=True))
        error = await http.post("/v1/chat/completions", json=chat(model="nothing"))
        listing = await http.get("/v1/models")
        refused = await http.get("/v1/models", headers={"authorization": "Bearer wrong"})
    assert [one.status_code for one in (answer, stream, error, listing, refused)] == [200, 200, 404, 200, 401]
    assert stream.text.endswith("data: [DONE]\n\n")
    for one in (answer, stream, error, listing, refused):
        assert one.headers.get_list("access-control-allow-origin") == [PAGE]
        assert {"x-request-id", "retry-after", "server-timing"} <= listed(
            one, "access-control-expose-headers"
        )
        assert "origin" in listed(one, "vary")


async def test_pages_of_other_origins_are_not_allowed(served: Served):
    await served.gateway("m", cors={"origins": [PAGE]})
    async with served.http(headers={"origin": OTHER}) as http:
        preflight = await http.options("/v1/models", headers=ASKS)
        answer = await http.get("/v1/models")
    assert (preflight.status_code, allowed(preflight)) == (400, None)
    assert (answer.status_code, allowed(answer)) == (403, None)
    assert "origin" in listed(answer, "vary")  # a cache must not give this one to an allowed page


async def test_credentials_are_allowed_to_named_origins_alone(served: Served):
    await served.gateway("m", cors={"origins": [PAGE], "credentials": True})
    async with served.http(headers={"origin": PAGE}) as http:
        preflight, answer = await http.options("/v1/models", headers=ASKS), await http.get("/v1/models")
    for one in (preflight, answer):
        assert (allowed(one), one.headers["access-control-allow-credentials"]) == (PAGE, "true")
    with pytest.raises(ConfigError, match="origins by name"):
        GatewayConfig(cors={"origins": ["*"], "credentials": True})


async def test_all_origins_are_one_word(served: Served):
    await served.gateway("m", cors={"origins": ["*"]})
    async with served.http(headers={"origin": OTHER}) as http:
        preflight, answer = await http.options("/v1/models", headers=ASKS), await http.get("/v1/models")
    assert (allowed(preflight), allowed(answer)) == ("*", "*")


async def test_without_a_config_no_page_is_allowed_whatever_an_engine_says(served: Served):
    seen: list[bytes] = []

    async def engine(scope, receive, send):
        seen.extend(name for name, _ in scope["headers"])
        fields = [(b"access-control-allow-origin", b"*"), (b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": b"{}"})

    await served.gateway("m", api_key="key")
    await served.app(engine)
    async with served.http(headers={"origin": PAGE, "authorization": "Bearer key"}) as http:
        preflight = await http.options("/v1/chat/completions", headers=ASKS)
        answer = await http.post("/v1/chat/completions", json=chat())
    assert (preflight.status_code, allowed(preflight)) == (204, None)
    assert (answer.status_code, allowed(answer)) == (200, None)
    assert b"origin" not in seen


@pytest.mark.parametrize(
    "origin", ["localhost:3000", "https://app.example/", "https://App.example", "", "null"]
)
def test_what_no_browser_would_send_is_refused_with_what_would_fit(origin: str):
    with pytest.raises(ConfigError, match="is not an origin; write the scheme"):
        GatewayConfig(cors={"origins": [origin]})
