"""A decode replica's way to the prefill replicas of its model, over real sockets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from served import NODE, Served, sim_config, until

from penstock.config.schema.prefill import PrefillConfig
from penstock.layers.adapters import adapter_of, asking_for
from penstock.request_context import tier
from penstock.serve.fleet import membership
from penstock.serve.replica import prefill_client
from penstock.serve.replica.prefill_client import PrefillClient

pytestmark = pytest.mark.parity("S24")

BODY = b'{"model": "m", "prompt": "a long one", "max_tokens": 1}'
SCOPE: dict[str, Any] = {"type": "http", "path": "/v1/completions", "headers": []}


async def test_an_answer_is_taken_where_the_weights_are_the_same(served: Served, patched):
    seen: list[Any] = []
    patched(membership, "follow", lambda model, handle, tell: seen.append(tell))
    weights = "default"
    engine = await served.replica(join=False)
    config = sim_config("m").model_copy(update={"prefill": PrefillConfig()})
    halves = PrefillClient(config, SimpleNamespace(), engine.engine.app(), lambda: weights, NODE)
    try:
        assert await halves.ask(SCOPE, BODY) is None, "there is none"
        seen[0]({engine.address.replica_id: engine.address})
        await until(lambda: halves._table.ready("m"))
        assert b"text_completion" in (await halves.ask(SCOPE, BODY) or b"")
        weights = "other"
        assert await halves.ask(SCOPE, BODY) is None, "its cache fits no longer"
    finally:
        await halves.close()


async def test_a_prompt_keeps_its_class_its_adapter_and_its_id_there(served: Served, patched):
    seen: list[Any] = []
    patched(membership, "follow", lambda model, handle, tell: seen.append(tell))
    asked: list[tuple[str, str, bytes | None, bytes]] = []

    async def prefill(scope: Any, receive: Any, send: Any) -> None:
        fields, body = dict(scope["headers"]), (await receive())["body"]
        asked.append((tier.get(), adapter_of(scope), fields.get(b"x-request-id"), body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    replica = await served.app(prefill)
    config = sim_config("m").model_copy(update={"prefill": PrefillConfig()})
    halves = PrefillClient(config, SimpleNamespace(), replica, lambda: "default", NODE)
    try:
        seen[0]({replica.address.replica_id: replica.address})
        await until(lambda: halves._table.ready("m") and asked)
        asked.clear()
        named = [(name.encode(), value.encode()) for name, value in asking_for("poet").items()]
        fields = [*named, (b"x-request-id", b"one"), (b"content-type", b"application/json")]
        tier.set("flex")
        assert await halves.ask({**SCOPE, "headers": fields}, BODY)
        assert asked == [("flex", "poet", b"one", BODY)]
    finally:
        await halves.close()


async def test_a_warm_up_that_takes_too_long_is_ended_in_the_engine(served: Served, monkeypatch, patched):
    """Else a fetch from a prefill replica that died would stay there."""
    seen: list[Any] = []
    patched(membership, "follow", lambda model, handle, tell: seen.append(tell))
    monkeypatch.setattr(prefill_client, "_WARM_LIMIT_S", 1.0)
    ended = asyncio.Event()

    async def prefill(scope: Any, receive: Any, send: Any) -> None:
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        await send({"type": "http.response.body", "body": b'{"kv_transfer_params": {"from": "there"}}'})

    async def hanging(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            ended.set()

    replica = await served.app(prefill)
    config = sim_config("m").model_copy(update={"prefill": PrefillConfig()})
    halves = PrefillClient(config, SimpleNamespace(), hanging, lambda: "default", NODE)
    try:
        seen[0]({replica.address.replica_id: replica.address})
        async with asyncio.timeout(20):
            await ended.wait()
    finally:
        await halves.close()
