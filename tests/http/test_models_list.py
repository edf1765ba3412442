"""`/v1/models`: which models and adapters there are, whatever becomes of the place where adapters lie."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from served import Served, Slots

from penstock.asgi import Receive, Scope, Send
from penstock.errors import NotFound
from penstock.serve.gateway import own_answers
from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("S15", "S21")

BASE = ServedModel("org/base:v2", 1700000000, adapter_slots=4)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


async def models(served: Served) -> list[dict[str, Any]]:
    async with served.http() as http:
        return (await http.get("/v1/models")).json()["data"]


async def ids(served: Served) -> list[str]:
    return [model["id"] for model in await models(served)]


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that asks its replicas each time."""
    monkeypatch.setattr(own_answers, "FRESH_S", 0.0)


async def test_adapters_stand_behind_their_model(served: Served):
    await served.gateway("other", BASE)
    await served.app(app, BASE.id, adapters=Slots("poet", "a/clerk"))
    shown = await models(served)
    assert [model["id"] for model in shown] == [
        "other",
        "org/base:v2",
        "org/base:v2:a/clerk",
        "org/base:v2:poet",
    ]
    assert shown[1] | {"id": "org/base:v2:poet", "parent": "org/base:v2"} == shown[3]
    assert (shown[1]["parent"], shown[1]["root"]) == (None, "org/base:v2")
    assert (shown[3]["created"], shown[3]["root"], shown[3]["max_model_len"]) == (
        1700000000,
        "org/base:v2",
        8,
    )


async def test_an_adapter_is_found_by_its_name(served: Served):
    await served.gateway("other", BASE)
    await served.app(app, BASE.id, adapters=Slots("poet", "a/clerk"))
    async with served.http() as http:
        answers = [await http.get(f"/v1/models/org/base:v2{name}") for name in ("", ":poet", ":a%2Fclerk")]
    assert [answer.json()["id"] for answer in answers] == [
        "org/base:v2",
        "org/base:v2:poet",
        "org/base:v2:a/clerk",
    ]


async def test_an_unknown_adapter_is_404_with_the_known_ones(served: Served):
    await served.gateway("other", BASE)
    await served.app(app, BASE.id, adapters=Slots("poet"))
    async with served.http() as http:
        unknown = await http.get("/v1/models/org/base:v2:pilot")
        without = await http.get("/v1/models/other:poet")
    assert (unknown.status_code, without.status_code) == (404, 404)
    assert "'org/base:v2:pilot' is not served" in unknown.json()["error"]["message"]
    assert "'org/base:v2', 'org/base:v2:poet'." in unknown.json()["error"]["message"]
    assert "'other'." in without.json()["error"]["message"]


async def test_many_who_ask_together_are_one_question_to_one_replica(served: Served):
    await served.gateway(BASE)
    slots = [Slots("poet"), Slots("poet")]
    for one in slots:
        await served.app(app, BASE.id, adapters=one)
    await asyncio.gather(*(ids(served) for _ in range(20)))
    await ids(served)
    assert sum(one.asked for one in slots) == 1


@pytest.mark.usefixtures("forgetful")
async def test_new_adapters_are_shown(served: Served):
    await served.gateway(BASE)
    slots = Slots("poet")
    await served.app(app, BASE.id, adapters=slots)
    before = await ids(served)
    slots.names = {"poet", "pilot"}
    assert (before, await ids(served)) == (
        [BASE.id, f"{BASE.id}:poet"],
        [BASE.id, *(f"{BASE.id}:{n}" for n in ("pilot", "poet"))],
    )


@pytest.mark.usefixtures("forgetful")
async def test_what_was_known_last_is_shown_when_it_cannot_be_listed(served: Served):
    await served.gateway(BASE)
    slots = Slots("poet")
    listener = await served.app(app, BASE.id, adapters=slots)
    before = await ids(served)
    slots.error = NotFound("The bucket is gone.")
    without_store = await ids(served)
    await listener.close()
    without_replica = await ids(served)
    assert before == without_store == without_replica == [BASE.id, f"{BASE.id}:poet"]


async def test_a_store_that_does_not_answer_holds_up_nobody(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(own_answers, "_WAIT_S", 0.05)

    class Stuck(Slots):
        async def listed(self) -> Sequence[str]:
            await asyncio.Event().wait()
            raise AssertionError

    await served.gateway(BASE)
    await served.app(app, BASE.id, adapters=Stuck("poet"))
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json={"messages": []})
    assert (await ids(served), answer.text) == ([BASE.id], "here")


async def test_a_model_without_adapters_is_not_asked_for_any(served: Served):
    await served.gateway("m")
    slots = Slots("poet")
    await served.app(app, adapters=slots)
    assert (await ids(served), slots.asked) == (["m"], 0)
