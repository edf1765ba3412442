"""Keys of tenants: who may use what, what stays hidden, and what limits say, on real sockets."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import pwd
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import Served, chat, until

from penstock.config import GatewayConfig
from penstock.config.schema.tenants import hashed
from penstock.openai.response_items import keeper_name, new_id, tenant_mark
from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("X6")

ANN, BOB = "pk_key-of-ann-in-tests", "pk_key-of-bob-in-tests"


def key(secret: str, tenant: str, name: str = "k", **more: Any) -> dict[str, Any]:
    return {"tenant": tenant, "name": name, "hash": hashed(secret), **more}


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def gateway(
    served: Served, *keys: dict[str, Any], cards: tuple[Any, ...] = ("m",), **config: Any
) -> Any:
    return await served.gateway(*cards, keys=[*keys], **config)


async def asked(
    served: Served, secret: str, path: str = "/v1/chat/completions", **body: Any
) -> httpx.Response:
    async with served.http(headers=bearer(secret)) as http:
        return await http.post(path, json=chat(**body))


# -- turns


@pytest.mark.parametrize(
    ("most", "policy", "first"),
    [(2, "fcfs", True), (100, "priority", True), (100, "fcfs", False)],
    ids=["gateway", "engine", "none"],
)
async def test_one_request_goes_before_another_tenants_flood(
    served: Served, most: int, policy: str, first: bool
):
    """Where requests wait in the gateway, or in an engine that schedules by priority, but in no other."""
    card = ServedModel("m", 1, max_ongoing_requests=most)
    counted = {"open_requests": 100}
    app = await gateway(served, key(ANN, "ann", limits=counted), key(BOB, "bob"), cards=(card,))
    await served.replica(max_num_seqs=2, scheduling_policy=policy, reply="a " * 8, step_base_ms=20)
    order = list[str]()
    async with served.http() as http, asyncio.TaskGroup() as group:

        async def ask(secret: str) -> None:
            answer = await http.post("/v1/chat/completions", json=chat(), headers=bearer(secret))
            assert answer.status_code == 200
            order.append(secret)

        for _ in range(20):
            group.create_task(ask(ANN))
        await until(lambda: app._tenants.keys.allowances["ann/k"].open > 16)
        group.create_task(ask(BOB))
    assert (order.index(BOB) < 10) is first


# -- keys


WRONG = [
    {},
    bearer("wrong"),
    bearer(ANN[:-1]),
    bearer(ANN + "x"),
    bearer(hashed(ANN)),
    bearer("Schlüssel".encode().decode("latin-1")),
    bearer("x" * 60_000),
    {"x-api-key": BOB + ANN},
    bearer("wrong") | {"x-api-key": ANN},  # the first header counts
]


async def test_unknown_and_expired_keys_are_refused_alike(served: Served):
    await gateway(served, key(ANN, "ann"), key(BOB, "bob", expires=1_000_000.0))
    async with served.http() as http:
        answers = []
        for headers in [*WRONG, bearer(BOB)]:
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            answers.append(await http.get("/v1/models", headers=raw))
        assert {one.status_code for one in answers} <= {401, 431}
        assert len({one.content for one in answers if one.status_code == 401}) == 1
        for headers in (bearer(ANN), {"x-api-key": ANN}, bearer(ANN) | {"x-api-key": "wrong"}):
            assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_the_single_key_stays_and_is_the_tenant_default(served: Served):
    await gateway(served, key(ANN, "ann"), api_key="the-single-key")
    async with served.http(headers=bearer("the-single-key")) as http:
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200


async def test_scopes_decide_which_endpoints_answer(served: Served):
    await gateway(served, key(ANN, "ann", scopes=["chat"]), key(BOB, "bob", scopes=["metrics"]))
    await served.replica(reply="yes")
    async with served.http() as http:

        async def status(secret: str, method: str, path: str) -> int:
            body = {"json": chat(prompt="x", input="x")} if method == "POST" else {}
            return (await http.request(method, path, headers=bearer(secret), **body)).status_code

        assert await status(ANN, "POST", "/v1/chat/completions") == 200
        assert await status(BOB, "GET", "/metrics") == 200
        refused = [("POST", "/v1/completions"), ("POST", "/v1/embeddings"), ("POST", "/tokenize")]
        refused += [("POST", "/v1/audio/transcriptions"), ("POST", "/score"), ("GET", "/metrics")]
        for method, path in refused:
            assert await status(ANN, method, path) == 403, path
        assert await status(BOB, "POST", "/v1/chat/completions") == 403
        for path in ("/v1/files", "/v1/batches", "/nothing", "/admin/status"):
            assert await status(ANN, "GET", path) in (403, 404)
        assert await status("wrong", "GET", "/nothing") == 401


async def test_administration_takes_the_admin_key_or_a_key_with_that_scope(served: Served):
    async def operate(operation: str, arguments: Any) -> dict[str, Any]:
        return {}

    await gateway(
        served, key(ANN, "ann"), key(BOB, "bob", scopes=["admin"]), operate=operate, admin_key="the-admin-key"
    )
    async with served.http() as http:
        for secret, status in ((ANN, 403), (BOB, 200), ("the-admin-key", 200), ("wrong", 401)):
            assert (await http.get("/admin/status", headers=bearer(secret))).status_code == status
        assert (await http.get("/v1/models", headers=bearer("the-admin-key"))).status_code == 401


# -- models


async def test_models_that_a_key_may_not_use_are_not_there(served: Served, tmp_path: Path):
    for name in ("law", "tax"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"r": 8, "peft_type": "LORA"}')
    cards = (
        ServedModel("m", created=1, adapter_slots=2, aliases=("mm",)),
        ServedModel("secret-model", created=1, aliases=("hidden-alias",)),
    )
    await gateway(
        served,
        key(ANN, "ann", models=["mm", "m:law", "gone"]),
        key(BOB, "bob", models=["m:*"]),
        cards=cards,
        default_model="secret-model",
    )
    await served.replica(lora={"dynamic_lora_loading_path": str(tmp_path)}, reply="yes")
    async with served.http(headers=bearer(ANN)) as http:
        texts = [(await http.get("/v1/models")).text, (await http.get("/health")).text]
        assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["m", "mm", "m:law"]
        for name, status in (("m", 200), ("mm", 200), ("m:law", 200), ("mm:law", 200)):
            assert (await http.get(f"/v1/models/{name}")).status_code == status
            assert (await http.post("/v1/chat/completions", json=chat(model=name))).status_code == 200
        for name in ("m:tax", "secret-model", "hidden-alias", "m:*", "no-such-model"):
            for answer in (
                await http.get(f"/v1/models/{name}"),
                await http.post("/v1/chat/completions", json=chat(model=name)),
            ):
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
                texts.append(answer.text.replace(f"'{name}' is not", ""))
        nameless = await http.post("/v1/chat/completions", json=chat(model=None))
        assert nameless.json()["model"].startswith("m")  # its only one, not the secret default
        texts += [(await http.get(path)).text for path in ("/version", "/openapi.json")]
    assert not any(word in text for text in texts for word in ("secret-model", "hidden-alias", "m:tax"))
    listed = await served.openai(BOB).models.list()
    assert [one.id for one in listed.data] == ["m:law", "m:tax"]
    with pytest.raises(openai.NotFoundError):
        await served.openai(BOB).chat.completions.create(**chat())


# -- the file of keys


async def test_a_change_of_the_file_reaches_the_gateway_and_a_broken_one_does_not(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "keys.yaml"

    def write(text: str) -> None:
        draft = tmp_path / "draft"
        draft.write_text(text)
        draft.replace(file)

    def entry(secret: str, name: str) -> str:
        return f"keys: [{{tenant: {name}, name: k, hash: '{hashed(secret)}'}}]"

    write(entry(ANN, "ann"))
    found = await served.gateway("m", keys_file=str(file))

    async def status(secret: str) -> int:
        async with served.http(headers=bearer(secret)) as http:
            return (await http.get("/v1/models")).status_code

    assert (await status(ANN), await status(BOB)) == (200, 401)
    write(entry(BOB, "bob"))
    keys = found._tenants.keys
    await until(lambda: keys.find(ANN.encode(), 0.0) is None, limit_s=5)
    assert (await status(ANN), await status(BOB)) == (401, 200)
    who = f"{file} ({pwd.getpwuid(os.getuid()).pw_name})"
    noticed = found._tenants.usage.counters.changes
    ids = [hashed(one)[7:15] for one in (ANN, BOB)]
    assert noticed == [(who, f"key ann/k ({ids[0]}) removed"), (who, f"key bob/k ({ids[1]}) added: {{}}")]
    with caplog.at_level(logging.ERROR):
        write(f"keys: [{BOB}")
        await until(lambda: "stay as they were" in caplog.text)
        os.utime(file)
        await until(lambda: caplog.text.count("stay as they were") == 2)
        file.unlink()
        await until(lambda: caplog.text.count("stay as they were") == 3)
    assert await status(BOB) == 200
    assert caplog.text.count("stay as they were") == 3


@pytest.mark.parametrize(
    "error", [OSError(errno.ESTALE, os.strerror(errno.ESTALE)), RuntimeError("can't start new thread")]
)
async def test_a_file_that_cannot_be_read_for_a_while_is_read_once_it_can(
    error: Exception,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys: [{{tenant: ann, name: k, hash: '{hashed(ANN)}'}}]")
    found = await served.gateway("m", keys_file=str(file))
    read = Path.read_text
    tries: list[Path] = []

    def away(path: Path, *args: str, **named: str) -> str:
        if path != file or len(tries) == 2:
            return read(path, *args, **named)
        tries.append(path)
        raise error

    monkeypatch.setattr(Path, "read_text", away)
    file.write_text(f"keys: [{{tenant: bob, name: k, hash: '{hashed(BOB)}'}}]")
    keys = found._tenants.keys
    await until(lambda: keys.find(BOB.encode(), 0.0) is not None, limit_s=5)
    assert caplog.text.count("stay as they were") == 1
    assert len(tries) == 2


@pytest.mark.parametrize("text", ["keys: 5", None])
async def test_a_gateway_that_starts_without_its_file_of_keys_refuses_until_it_is_there(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
):
    file = tmp_path / "keys.yaml"
    if text is not None:
        file.write_text(text)
    await served.gateway("m", keys_file=str(file), admin_key="the-admin")
    assert "A gateway refuses keys of tenants with 503 until it can read them: " in caplog.text

    async def status(secret: str) -> int:
        async with served.http(headers=bearer(secret)) as http:
            return (await http.get("/v1/models")).status_code

    assert (await status(ANN), await status(BOB)) == (503, 503)
    file.write_text(f"keys: [{{tenant: t, name: n, key: {ANN}}}]")
    async with asyncio.timeout(5):
        while await status(ANN) == 503:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert (await status(ANN), await status(BOB)) == (200, 401)


# -- limits


LIMIT_HEADERS = ("x-ratelimit-limit-{}", "x-ratelimit-remaining-{}", "x-ratelimit-reset-{}")


def limits_of(answer: httpx.Response, what: str) -> tuple[str | None, ...]:
    return tuple(answer.headers.get(name.format(what)) for name in LIMIT_HEADERS)


async def test_requests_over_the_limit_are_refused_and_every_answer_says_how_many_are_left(served: Served):
    await gateway(served, key(ANN, "ann", limits={"requests_per_minute": 3}), key(BOB, "bob"))
    await served.replica(reply="yes")
    first = await asked(served, ANN)
    assert limits_of(first, "requests") == ("3", "2", "1m0s")
    assert limits_of(first, "tokens") == (None, None, None)
    streamed = await asked(served, ANN, stream=True)
    assert limits_of(streamed, "requests")[1] == "1"
    missing = await asked(served, ANN, model="nothing")
    assert (missing.status_code, limits_of(missing, "requests")[1]) == (404, "1")
    async with served.http(headers=bearer(ANN)) as http:
        assert limits_of(await http.get("/v1/models"), "requests")[1] == "1"
    await asked(served, ANN)
    refused = await asked(served, ANN)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert limits_of(refused, "requests")[:2] == ("3", "0")
    assert 55 <= int(refused.headers["retry-after"]) <= 60
    assert not any("ratelimit" in name for name in (await asked(served, BOB)).headers)


async def test_openais_client_reads_the_refusals(served: Served):
    await gateway(
        served,
        key(ANN, "ann", limits={"requests_per_minute": 1}),
        key(BOB, "bob", limits={"tokens_per_day": 50}),
    )
    await served.replica(reply="yes")
    await served.openai(ANN).chat.completions.create(**chat())
    with pytest.raises(openai.RateLimitError) as refused:
        await served.openai(ANN).chat.completions.create(**chat())
    assert refused.value.code == "rate_limit_exceeded"
    bob = served.openai(BOB).with_options(max_retries=5)
    for most, code in ((51, "rate_limit_exceeded"), (20, ""), (20, "insufficient_quota")):
        if not code:
            await bob.chat.completions.create(**chat(max_tokens=most, extra_body={"ignore_eos": True}))
            continue
        with pytest.raises(openai.RateLimitError) as refused:
            await bob.chat.completions.create(**chat(max_tokens=most))
        headers = refused.value.response.headers
        assert (refused.value.code, headers["x-should-retry"]) == (code, "false")
        assert ("retry-after" in headers) is (code == refused.value.type)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_reserved_and_settled_with_what_the_engine_reports(served: Served, stream: bool):
    await gateway(served, key(ANN, "ann", limits={"tokens_per_minute": 5000}))
    await served.replica(reply="one two three")
    exact = (await asked(served, ANN)).json()["usage"]["total_tokens"]
    before = 5000 - exact
    answer = await asked(served, ANN, max_tokens=1000, stream=stream)
    assert answer.status_code == 200
    reserved = before - int(limits_of(answer, "tokens")[1] or 0)
    assert 1000 < reserved < 1100
    after = await asked(served, ANN, max_tokens=1, model="nothing")
    assert int(limits_of(after, "tokens")[1] or 0) == before - exact


async def test_the_tokens_of_every_endpoint_are_known(served: Served):
    served_gateway = await gateway(served, key(ANN, "ann"))
    await served.replica(reply="one two three four")
    count = served_gateway._tenants.usage.counters
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"prompt": "a b c"}),
        ("/v1/responses", {"input": "a b c"}),
        ("/v1/messages", {"max_tokens": 50}),
    ]
    for path, more in bodies:
        for stream in (False, True):
            body = {**chat(), **more, "stream": stream}
            if path != "/v1/chat/completions" and path != "/v1/messages":
                del body["messages"]
            async with served.http(headers=bearer(ANN)) as http:
                answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            (row,) = [row for _, row in count.settlement({}, 0.0).rows]
            count._sent = None
            assert (row.requests, row.output_tokens, row.errors) == (1, 7, 0), (path, stream, row)
            assert row.prompt_tokens > 0


async def test_the_usage_that_the_gateway_asked_for_stays_hidden(served: Served):
    await gateway(served, key(ANN, "ann"))
    await served.replica(reply="one two three")
    client = served.openai(ANN)

    async def usages(**options: Any) -> list[Any]:
        stream = await client.chat.completions.create(**chat(), stream=True, **options)
        return [chunk.usage for chunk in [one async for one in stream] if chunk.usage or not chunk.choices]

    assert await usages() == []
    assert await usages(stream_options={"include_usage": False}) == []
    assert [one.completion_tokens for one in await usages(stream_options={"include_usage": True})] == [5]
    raw = await asked(served, ANN, stream=True)
    assert raw.text.endswith("data: [DONE]\n\n")
    assert "usage" not in raw.text


async def test_what_only_the_engine_would_take_for_a_stream_is_refused(served: Served):
    """The gateway would ask for no usage, and see none."""
    await gateway(served, key(ANN, "ann"))
    await served.replica(reply="one two three")
    for stream in (1, 1.0, "true", "on", [True]):
        refused = await asked(served, ANN, stream=stream)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
        assert "true or false" in refused.text
    for stream in (None, False):
        assert (await asked(served, ANN, stream=stream)).status_code == 200


async def test_a_stream_that_its_client_leaves_is_charged_once_for_what_it_had(served: Served):
    tenants = (await gateway(served, key(ANN, "ann", limits={"open_requests": 1})))._tenants
    await served.replica(reply="word " * 500, step_base_ms=5)
    async with served.http(headers=bearer(ANN)) as http:
        body, pieces = chat(stream=True, max_tokens=400), 0
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for piece in answer.aiter_bytes():
                pieces += piece.count(b"data: ")
                if pieces >= 20:
                    break
            assert (await asked(served, ANN)).json()["error"]["code"] == "rate_limit_exceeded"
    await until(lambda: not tenants.keys.allowances["ann/k"].open)
    (row,) = [row for _, row in tenants.usage.counters.settlement({}, 0.0).rows]
    assert (row.requests, row.refused) == (2, 1)
    assert pieces <= row.output_tokens < 200
    assert row.prompt_tokens > 0


async def test_a_stream_whose_replica_dies_is_settled_and_counts_as_an_error(served: Served):
    tenants = (await gateway(served, key(ANN, "ann"), wait_for_replica_s=0.5))._tenants  # for another one
    replica = await served.process(reply="word " * 500, step_base_ms=20)
    async with (
        served.http(headers=bearer(ANN)) as http,
        http.stream("POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=400)) as answer,
    ):
        text = ""
        async for piece in answer.aiter_text():
            text += piece
            if text.count("data: ") >= 20:
                replica.kill()
    assert "error" in text
    await until(lambda: tenants.usage.counters._rows)
    (row,) = [row for _, row in tenants.usage.counters.settlement({}, 0.0).rows]
    assert (row.requests, row.errors, row.output_tokens) == (1, 1, text.count("data: ") - 1)


async def test_answers_without_usage_are_counted_by_the_estimate_and_stored_ones_once(served: Served):
    tenants = (await gateway(served, key(ANN, "ann", limits={"max_tokens": 9})))._tenants
    bodies = {
        "POST": b'{"id": "x", "usage": null}',
        "GET": b'{"usage": {"input_tokens": 5, "output_tokens": 7}}',
    }

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bodies[scope["method"]]})

    listener = await served.app(app)
    stored = new_id(keeper_name(listener.address.replica_id, tenant_mark("ann")))
    async with served.http(headers=bearer(ANN)) as http:
        made = {"model": "m", "input": "a" * 400, "background": True}
        assert (await http.post("/v1/responses", json=made)).status_code == 200
        (row,) = tenants.usage.counters._rows.values()
        assert (row.requests, row.output_tokens) == (1, 9)
        assert row.prompt_tokens == 8  # the model's context window
        assert (await http.get(f"/v1/responses/{stored}")).status_code == 200
        assert (row.requests, row.output_tokens) == (2, 9)


@pytest.mark.parametrize(
    ("path", "body", "counted"),
    [
        ("/v1/embeddings", b"\x00\x01", (3, 0, 0)),  # `encoding_format: bytes`
        ("/v1/messages/count_tokens", b'{"input_tokens": 90}', (0, 0, 0)),
        ("/v1/completions/render", b"[]", (0, 0, 0)),
        (
            "/v1/messages",
            b'{"usage":{"input_tokens":10,"cache_read_input_tokens":85,"cache_creation_input_tokens":5,'
            b'"output_tokens":7}}',
            (100, 85, 7),
        ),
    ],
)
async def test_prompts_are_counted_whole_where_they_took_the_engines_time(
    served: Served, path: str, body: bytes, counted: tuple[int, int, int]
):
    tenants = (await gateway(served, key(ANN, "ann")))._tenants

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    await served.app(app)
    async with served.http(headers=bearer(ANN)) as http:
        assert (await http.post(path, json={"model": "m", "input": [1, 2, 3]})).status_code == 200
    (row,) = tenants.usage.counters._rows.values()
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == counted


async def test_a_refused_or_failed_request_costs_no_tokens(served: Served):
    tenants = (await gateway(served, key(ANN, "ann", limits={"tokens_per_day": 10_000})))._tenants
    await served.replica(reply="yes")
    assert (await asked(served, ANN, max_tokens="hot")).status_code == 400
    allowance = tenants.keys.allowances["ann/k"]
    assert (allowance.day.unsettled, allowance.tokens.open) == (0, 0)


async def test_a_budget_is_spent_by_the_prices_of_now(served: Served, caplog: pytest.LogCaptureFixture):
    keys = [key(ANN, "ann", limits={"cost_per_month": 0.01}), key(BOB, "bob")]
    tenants = {"bob": {"limits": {"warn_cost_per_month": 1e-6}}}
    found = await served.gateway("m", keys=keys, tenants=tenants, prices={"m": {"input": 1, "output": 100}})
    await served.replica(reply="one two three")
    first = await asked(served, ANN, max_tokens=50)
    usage = first.json()["usage"]
    spent = usage["prompt_tokens"] * 1000 + usage["completion_tokens"] * 100_000
    rows = found._tenants.usage.counters._rows
    assert [row.cost for row in rows.values()] == [spent]
    streamed = await asked(served, ANN, stream=True, max_tokens=40)
    assert streamed.status_code == 200
    refused = await asked(served, ANN, max_tokens=99)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"
    (row,) = rows.values()
    assert (row.cost, row.refused) == (2 * spent, 1)
    shown = [(await asked(served, BOB)).headers.get("x-penstock-budget") for _ in range(2)]
    assert shown == [None, f"bob; spent={spent / 1e9:g}; soft=0.000001"]
    assert caplog.text.count("its soft line is") == 1
    cheap = GatewayConfig(keys=keys, tenants=tenants, prices={"m": {"output": 1}}, port=None)
    await found.reconfigure(cheap, [ServedModel("m", 1)], {})
    assert (await asked(served, ANN, max_tokens=99)).status_code == 200
    assert row.cost == 2 * spent + usage["completion_tokens"] * 1000


async def test_seconds_of_audio_have_a_price(served: Served):
    prices = {"m": {"audio_second": 0.0001}}
    found = await served.gateway("m", keys=[key(ANN, "ann")], prices=prices)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b'{"text": "hi", "usage": {"type": "duration", "seconds": 7}}'
        await send({"type": "http.response.body", "body": body})

    await served.app(app)
    async with served.http(headers=bearer(ANN)) as http:
        files = {"file": ("a.wav", b"RIFF")}
        await http.post("/v1/audio/transcriptions", data={"model": "m"}, files=files)
    (row,) = found._tenants.usage.counters._rows.values()
    assert (row.audio_seconds, row.cost, row.output_tokens) == (7, 700_000, 0)


async def test_pictures_have_a_price_beside_their_tokens(served: Served):
    prices = {"m": {"output": 1, "image": 0.002}}
    limits = {"ann": {"limits": {"cost_per_month": 0.005}}}
    found = await served.gateway("m", keys=[key(ANN, "ann")], prices=prices, tenants=limits)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        body = b'{"usage": {"prompt_tokens": 900, "completion_tokens": 7}}'
        await send({"type": "http.response.body", "body": body})

    await served.app(app)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for count, status in ((2, 200), (1, 429)):
        messages = [{"role": "user", "content": [picture] * count}]
        answer = await asked(served, ANN, messages=messages, max_tokens=7)
        assert answer.status_code == status
    (row,) = found._tenants.usage.counters._rows.values()
    assert (row.images, row.cost, row.refused) == (2, 2 * 2_000_000 + 7000, 1)


async def test_refused_requests_are_counted_for_their_key_in_few_rows(served: Served):
    counted = {"requests_per_minute": 1, "max_tokens": 9}
    tenants = (await gateway(served, key(ANN, "ann", limits=counted, scopes=["chat"])))._tenants
    await served.replica(reply="yes")
    assert (await asked(served, ANN, max_tokens=1)).status_code == 200
    refused = [(429, "m", {}), (400, "m", {"max_tokens": 99}), (400, "", {"model": 5})]
    refused += [(404, "", {"model": f"random-{number}"}) for number in range(5)]
    refused += [(403, "", {"path": "/v1/completions"}), (404, "", {"path": "/v1/nothing"})]
    for status, _, body in refused:
        assert (await asked(served, ANN, **body)).status_code == status
    assert (await asked(served, "pk_nobody-s-key-in-tests")).status_code == 401
    rows = {key[1:]: row for key, row in tenants.usage.counters._rows.items()}
    assert {key: (row.requests, row.errors, row.refused) for key, row in rows.items()} == {
        ("ann", "k", "m", "", "default"): (3, 2, 2),
        ("ann", "k", "", "", "default"): (8, 8, 8),
    }


async def test_the_longest_answer_is_enforced(served: Served):
    await gateway(served, key(ANN, "ann", limits={"max_tokens": 3}))
    await served.replica(reply="one two three four five")
    for body in (
        {},
        {"max_tokens": None},
        {"max_tokens": 3},
        {"max_tokens": 2, "max_completion_tokens": None},
    ):
        answer = await asked(served, ANN, **body)
        assert answer.json()["usage"]["completion_tokens"] == min(3, body.get("max_tokens") or 3)
    for body in ({"max_tokens": 4}, {"max_completion_tokens": 400}):
        refused = await asked(served, ANN, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert (await asked(served, ANN, "/v1/generate", prompt="x")).status_code == 403


async def test_without_tenants_bodies_and_answers_are_as_before(served: Served):
    await served.gateway("m", api_key="key")
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    await served.app(app)
    body = b'{"model": "m", "stream": true, "messages": []}'
    async with served.http(headers=bearer("key")) as http:
        answer = await http.post("/v1/chat/completions", content=body)
    assert seen == [body]
    assert not any("ratelimit" in name for name in answer.headers)


# -- prefix caches


async def test_each_tenant_has_a_prefix_cache_of_its_own_where_that_is_asked_for(served: Served):
    found = await gateway(served, key(ANN, "ann"), key(BOB, "bob"), isolate_cache=True)
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(json.loads((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    await served.app(app)
    paths = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/generate"]
    for path in [*paths, "/inference/v1/generate", "/v1/embeddings", "/v1/rerank"]:
        for secret, more in ((ANN, {}), (ANN, {"cache_salt": None}), (BOB, {}), (ANN, {"cache_salt": "x"})):
            assert (await asked(served, secret, path, temperature=0.5, **more)).status_code == 200
        first, same, other, own = seen
        assert first == same
        assert len({first["cache_salt"], other["cache_salt"], own["cache_salt"], "x"}) == 4
        assert (own["temperature"], len(own["cache_salt"])) == (0.5, 64)
        seen.clear()
    await asked(served, ANN, cache_salt=5)
    assert seen.pop()["cache_salt"] == 5  # for the engine to refuse
    await asked(served, ANN, "/tokenize", prompt="x")
    assert "cache_salt" not in seen.pop()
    refused = await asked(served, ANN, "/cohere/v2/chat")
    assert (refused.status_code, "isolate_cache" in refused.text) == (403, True)
    await found.reconfigure(GatewayConfig(keys=[key(ANN, "ann")], port=None), [ServedModel("m", 1)], {})
    await asked(served, ANN)
    assert "cache_salt" not in seen.pop()


# -- secrecy


async def test_no_key_is_in_logs_errors_metrics_or_reprs(
    served: Served, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    caplog.set_level(logging.DEBUG)
    found = await gateway(served, key(ANN, "ann", scopes=["chat", "metrics"]), key(BOB, "bob", expires=1.0))
    await served.replica(reply="yes")
    texts: list[str] = []
    async with served.http() as http:
        for secret in (ANN, BOB, "pk_wrong-key-in-tests"):
            for method, path in (
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
                ("POST", "/v1/chat/completions"),
            ):
                answer = await http.request(
                    method, path, headers=bearer(secret), json=chat(temperature="hot")
                )
                texts += [answer.text, str(answer.headers)]
    tenants = found._tenants
    texts += [repr(found._config), repr(tenants.keys.find(ANN.encode(), math.inf)), caplog.text]
    texts.append(str(capsys.readouterr()))
    logged = "\n".join(texts).replace(str({"authorization": f"Bearer {ANN}"}), "")
    assert "penstock_tenant_requests_total" in logged
    assert not any(secret in logged for secret in (ANN, BOB, "pk_wrong-key-in-tests"))
