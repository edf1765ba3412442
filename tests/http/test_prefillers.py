"""A decode replica's way to the prefill replicas of its model, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from served import NODE, Served, sim_config, until

from penstock.config.derive.prefill import prefill_name
from penstock.config.schema.prefill import PrefillConfig
from penstock.layers.adapters import adapter_of, asking_for
from penstock.request_context import tier
from penstock.serve.fleet import membership
from penstock.serve.replica import prefill_client
from penstock.serve.replica.prefill_client import PrefillClient

pytestmark = pytest.mark.parity("S24")

BODY = b'{"model": "m", "prompt": "a long one", "max_tokens": 1}'
SCOPE: dict[str, Any] = {"type": "http", "path": "/v1/completions", "headers": []}


class Handle:
    """Serve's, to the prefill replicas."""

    app_name = "app"

    def options(self, **_: Any) -> None:
        pass


def published(*replicas: Any) -> None:
    """Serve names them."""
    members = {replica.address.replica_id: replica.address for replica in replicas}
    membership.publish(prefill_name("m"), Handle.app_name, members)


async def test_an_answer_is_taken_where_the_weights_are_the_same(served: Served):
    weights = "default"
    engine = await served.replica(join=False)
    config = sim_config("m").model_copy(update={"prefill": PrefillConfig()})
    halves = PrefillClient(config, Handle(), engine.engine.app(), lambda: weights, NODE)
    try:
        assert await halves.ask(SCOPE, BODY) is None, "there is none"
        published(engine)
        await until(lambda: halves._table.ready("m"))
        assert b"text_completion" in (await halves.ask(SCOPE, BODY) or b"")
        weights = "other"
        assert await halves.ask(SCOPE, BODY) is None, "its cache fits no longer"
    finally:
        await halves.close()


async def test_a_prompt_keeps_its_class_its_adapter_and_its_id_there(served: Served):
    asked: list[tuple[str, str, bytes | None, bytes]] = []

    async def prefill(scope: Any, receive: Any, send: Any) -> None:
        fields, body = dict(scope["headers"]), (await receive())["body"]
        asked.append((tier.get(), adapter_of(scope), fields.get(b"x-request-id"), body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    replica = await served.app(prefill)
    config = sim_config("m").model_copy(update={"prefill": PrefillConfig()})
    halves = PrefillClient(config, Handle(), replica, lambda: "default", NODE)
    try:
        published(replica)
        await until(lambda: halves._table.ready("m") and asked)
        asked.clear()
        named = [(name.encode(), value.encode()) for name, value in asking_for("poet").items()]
        fields = [*named, (b"x-request-id", b"one"), (b"content-type", b"application/json")]
        tier.set("flex")
        assert await halves.ask({**SCOPE, "headers": fields}, BODY)
        assert asked == [("flex", "poet", b"one", BODY)]
    finally:
        await halves.close()


async def test_a_warm_up_that_takes_too_long_is_ended_in_the_engine(served: Served, monkeypatch):
    """Else a fetch from a prefill replica that died would stay there."""
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
    halves = PrefillClient(config, Handle(), hanging, lambda: "default", NODE)
    try:
        published(replica)
        async with asyncio.timeout(20):
            await ended.wait()
    finally:
        await halves.close()


async def test_one_that_is_closed_follows_nothing(served: Served):
    engine = await served.replica(join=False)
    config = sim_config("m").model_copy(update={"prefill": PrefillConfig()})
    halves = PrefillClient(config, Handle(), engine.engine.app(), lambda: "default", NODE)
    published(engine)
    await until(lambda: halves._warming)
    warming = list(halves._warming)
    await halves.close()
    assert all(task.done() for task in warming)
    published()
    published(engine)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not halves._links._tasks
    assert not halves._warming
