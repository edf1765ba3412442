"""A response that a replica keeps is found again by every gateway, or said to be gone when its replica is."""

import asyncio
import json

import pytest
from served import Served, until

from penstock.config import LLMServingArgs
from penstock.config.schema.versions import VersionConfig
from penstock.engine import Load
from penstock.openai.response_items import item_number, new_id
from penstock.request_context import current_replica
from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("X8")


class Keeper:
    """A replica's app that keeps what it is told, as an engine does, and says what it was asked."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.asked: list[str] = []
        self.said: list[dict[str, object]] = []

    async def __call__(self, scope, receive, send):
        self.asked.append(f"{scope['method']} {scope['path']}")
        said = json.loads((await receive())["body"] or b"{}")
        self.said.append(said)
        if scope["path"] == "/v1/responses":
            known = self.kept.get(said.get("previous_response_id") or "", "")
            key = new_id(current_replica.get())
            self.kept[key] = known + str(said["input"])
        else:
            key = scope["path"].split("/")[3]
        body = json.dumps({"id": key, "text": self.kept[key]}).encode()
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": body})


async def two(served: Served) -> tuple[Keeper, Keeper]:
    keepers = Keeper(), Keeper()
    for keeper in keepers:
        await served.app(keeper)
    return keepers


@pytest.mark.parity("X15")
async def test_a_response_is_continued_by_the_version_that_keeps_it(served: Served):
    keepers = {"m": Keeper(), "m@b": Keeper()}
    for name, keeper in keepers.items():
        await served.app(keeper, name)
    named = {"m": ("a", ("m@a",)), "m@b": ("b", ("m",))}
    await served.gateway(
        *(
            ServedModel(model, 1, aliases=aliases, version=VersionConfig(of="m", name=name))
            for model, (name, aliases) in named.items()
        )
    )
    async with served.http() as http:
        for _ in range(8):
            made = await http.post("/v1/responses", json={"model": "m", "input": "x"})
            body = {"model": "m", "input": "y", "previous_response_id": made.json()["id"]}
            more = await http.post("/v1/responses", json=body)
            assert more.json()["text"] == "xy"
            assert more.headers["x-penstock-model"] == made.headers["x-penstock-model"]
    assert all(keeper.kept for keeper in keepers.values())


@pytest.mark.parity("X15")
async def test_a_shadow_answers_what_refers_to_no_kept_response_and_keeps_nothing(served: Served, tmp_path):
    client, shadow, file = Keeper(), Keeper(), tmp_path / "answers.jsonl"
    entries = [{"name": "a", "weight": 1}, {"name": "b", "weight": 0, "engine_kwargs": {"reply": "b"}}]
    model = {"model_loading_config": {"model_id": "m"}, "llm_engine": "sim", "versions": entries}
    model["shadow"] = {"version": "b", "share": 1.0, "answers": str(file)}
    await served.gateway(*map(ServedModel.of, LLMServingArgs.parse({"llm_configs": [model]}).llm_configs))
    await served.app(client, "m")
    await served.app(shadow, "m@b")
    asked = [{"input": "x"}, {"input": "x", "store": True, "background": False}]
    async with served.http() as http:
        for body in asked:
            made = (await http.post("/v1/responses", json=body)).json()["id"]
        for more in ({"background": True}, {"previous_response_id": made}):
            assert (await http.post("/v1/responses", json={"input": "y", **more})).status_code == 200
        await http.get(f"/v1/responses/{made}")
        await until(lambda: file.exists() and file.read_text().count("\n") == 2)
    sent = [body | {"service_tier": "default"} for body in asked]
    assert (len(client.asked), shadow.said) == (5, [body | {"store": False} for body in sent])
    assert [json.loads(line)["request"] for line in file.read_text().splitlines()] == sent


async def test_every_response_is_found_where_it_was_made(served: Served):
    keepers = await two(served)
    await served.gateway("m", "other")
    async with served.http() as http:
        made = [
            (await http.post("/v1/responses", json={"model": "m", "input": f"{i}"})).json() for i in range(8)
        ]
        assert all(keeper.kept for keeper in keepers)
        for response in made:
            assert (await http.get(f"/v1/responses/{response['id']}")).json() == response
            assert (await http.post(f"/v1/responses/{response['id']}/cancel")).json() == response
            assert (await http.get(f"/v1/responses/{response['id']}/input_items")).json() == response
            assert (await http.delete(f"/v1/responses/{response['id']}")).json() == response


async def test_who_waits_for_a_replica_that_leaves_hears_that_it_is_gone(served: Served):
    entered, gate = asyncio.Event(), asyncio.Event()
    keeper = Keeper()

    async def app(scope, receive, send):
        entered.set()
        await gate.wait()
        await keeper(scope, receive, send)

    listener = await served.app(app)
    await served.gateway(ServedModel("m", 1, max_ongoing_requests=1))
    response = new_id(listener.address.replica_id)
    async with served.http() as http:
        first = asyncio.create_task(http.get(f"/v1/responses/{response}"))
        await entered.wait()
        second = asyncio.create_task(http.get(f"/v1/responses/{response}"))
        await until(lambda: len(served.line("m")) == 1)
        served.remove("m", listener.address)
        assert (await second).status_code == 404
        gate.set()
        await first


async def test_a_conversation_goes_on_where_it_began(served: Served):
    await two(served)
    await served.gateway("m")
    async with served.http() as http:
        response = {"id": None}
        for i in range(6):
            body = {"model": "m", "input": f"{i}", "previous_response_id": response["id"]}
            response = (await http.post("/v1/responses", json=body)).json()
    assert response["text"] == "012345"


async def test_an_id_that_is_no_utf_8_is_the_engine_s_to_refuse(served: Served):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    await served.app(app)
    await served.gateway("m")
    fields = {"content-type": "application/json"}
    async with served.http() as http:
        for body in (
            b'{"model": "m", "input": "x", "previous_response_id": "\xff"}',
            b'{"model": "m", "input": [{"id": "\xff"}]}',
        ):
            assert (await http.post("/v1/responses", content=body, headers=fields)).status_code == 400


async def test_another_gateway_finds_it(served: Served):
    await two(served)
    await served.gateway("m")
    async with served.http() as http:
        made = (await http.post("/v1/responses", json={"input": "x"})).json()
    await served.gateway("m")
    async with served.http() as http:
        await until(lambda: len(served.table.ready("m")) == 2)
        assert (await http.get(f"/v1/responses/{made['id']}")).json() == made


async def test_the_response_of_a_lost_replica_is_404_with_what_to_do(served: Served):
    listener = await served.app(Keeper())
    await served.gateway("m")
    async with served.http() as http:
        made = (await http.post("/v1/responses", json={"input": "x"})).json()
        served.remove("m", listener.address)
        await served.app(Keeper())
        for answer in (
            await http.get(f"/v1/responses/{made['id']}"),
            await http.post("/v1/responses", json={"input": "y", "previous_response_id": made["id"]}),
        ):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"
            assert "Send the conversation again" in answer.json()["error"]["message"]


async def test_it_waits_for_room_in_the_replica_that_keeps_it(served: Served):
    keepers = await two(served)
    await served.gateway("m")
    async with served.http() as http:
        made = (await http.post("/v1/responses", json={"input": "x"})).json()
        keeper = next(keeper for keeper in keepers if made["id"] in keeper.kept)
        replica = next(r for r in served.table.ready("m") if r.id in made["id"])
        served.table.limit("m", 1)
        place = served.table.acquire(replica)
        told = len(keeper.asked)
        waiting = asyncio.create_task(http.get(f"/v1/responses/{made['id']}"))
        await until(lambda: len(served.line("m")) == 1)
        assert (await http.post("/v1/responses", json={"input": "to the other"})).status_code == 200
        assert len(keeper.asked) == told
        served.line("m").release(place)
        assert (await waiting).json() == made


async def test_ids_of_other_engines_pass(served: Served):
    keeper = Keeper()
    keeper.kept["resp_of-its-own"] = "x"
    await served.app(keeper, load=Load)
    await served.gateway("m")
    async with served.http() as http:
        assert (await http.get("/v1/responses/resp_of-its-own")).json()["text"] == "x"


async def test_an_id_that_names_no_replica_is_unknown_where_no_model_is_the_default(served: Served):
    await two(served)
    await served.gateway("m", "other")
    async with served.http() as http:
        for answer in (
            await http.get("/v1/responses/resp_1"),
            await http.delete("/v1/responses/resp_1"),
            await http.post("/v1/responses/resp_1/cancel"),
        ):
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == "There is no response with the id 'resp_1'."
        assert (await http.post("/v1/responses", json={"input": "x"})).status_code == 400


async def test_references_to_items_go_where_their_response_was_made(served: Served):
    keepers = await two(served)
    await served.gateway("m")
    async with served.http() as http:
        for _ in range(4):
            made = (await http.post("/v1/responses", json={"input": "x"})).json()
            keeper = next(keeper for keeper in keepers if made["id"] in keeper.kept)
            known = {"id": f"fc_{item_number(made['id'], '0a')}"}
            for named in ({}, {"type": "item_reference"}) * 3:
                told = len(keeper.asked)
                turn = {"role": "user", "content": "y", "id": "msg_" + item_number(new_id("0" * 16), 0)}
                asked = {"input": [turn, {"type": "item_reference"}, {**named, **known}]}
                assert (await http.post("/v1/responses", json=asked)).status_code == 200
                assert len(keeper.asked) == told + 1
