"""The API key: once set, only the probes answer without it."""

import pytest
from served import Served, chat

PRIVATE = [
    "/v1/models",
    "/v1/models/m",
    "/metrics",
    "/version",
    "/openapi.json",
    "/nothing",
    "/_penstock/link",
]
WRONG = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer"},
    {"authorization": "Bearer ke"},
    {"authorization": "Bearer keykey"},
    {"authorization": "Bearer KEY"},
    {"authorization": "key"},
    {"x-api-key": "wrong"},
    {"x-api-key": ""},
]
RIGHT = [{"authorization": "Bearer key"}, {"authorization": "bearer key"}, {"x-api-key": "key"}]


async def test_without_the_key_nothing_answers(served: Served):
    await served.gateway("m", api_key="key")
    async with served.http() as http:
        for headers in WRONG:
            for path in PRIVATE:
                answer = await http.get(path, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "invalid_api_key"
            asked = await http.post("/v1/chat/completions", headers=headers, json=chat())
            assert asked.status_code == 401


async def test_either_header_brings_the_key(served: Served):
    await served.gateway("m", api_key="key")
    async with served.http() as http:
        for headers in RIGHT:
            assert (await http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parity("X23")
async def test_probes_and_what_says_nothing_need_no_key(served: Served):
    await served.gateway("m", api_key="key")
    async with served.http() as http:
        ready = [(await http.get(path)).status_code for path in ("/health", "/readyz", "/ping")]
        alive = [(await http.get(path)).status_code for path in ("/livez", "/-/healthz", "/", "/docs")]
        shown = [(await http.get("/health", headers=headers)).json() for headers in (*WRONG, *RIGHT)]
    assert ready == [503] * 3
    assert [set(one) for one in shown] == [{"status"}] * len(WRONG) + [{"status", "models"}] * len(RIGHT)
    assert alive == [200] * 4


async def test_what_kuberay_asks_is_answered_in_its_words(served: Served):
    await served.gateway("m", api_key=None)
    async with served.http() as http:
        assert (await http.get("/-/healthz")).text == "success"


async def test_without_a_configured_key_any_is_taken(served: Served):
    await served.gateway("m", api_key=None)
    await served.replica(reply="yes")
    answer = await served.openai(api_key="fake-key").chat.completions.create(**chat())
    assert answer.choices[0].message.content == "yes"


async def test_the_replica_sees_neither_the_clients_key_nor_our_secret(served: Served):
    await served.gateway("m", api_key="key")
    seen = []

    async def app(scope, receive, send):
        seen.extend(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-penstock-a", b"1")]})
        await send({"type": "http.response.body", "body": b"{}"})

    await served.app(app)
    headers = {"authorization": "Bearer key", "x-api-key": "key", "cookie": "a=b"}
    headers |= {"x-penstock-gateway": "me", "x-mine": "1"}
    async with served.http(headers=headers) as http:
        answer = await http.post("/v1/chat/completions", json=chat())
    assert b"x-mine" in seen
    assert {b"authorization", b"cookie", b"x-api-key"}.isdisjoint(seen)
    assert not [name for name in [*seen, *answer.headers.raw] if b"x-penstock" in name]
