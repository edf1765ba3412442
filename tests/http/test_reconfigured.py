"""A gateway takes over another config and other models while it runs: new requests see them, and open ones
end as they began.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served, chat, until

from penstock.config import GatewayConfig
from penstock.config.schema.tenants import hashed
from penstock.errors import ConfigError
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import LiveState, ServedModel

pytestmark = pytest.mark.parity("X27")

M, N = ServedModel("m", 1), ServedModel("n", 1)
SLOW: dict[str, Any] = {"step_base_ms": 20, "reply": "word " * 60}
STREAMS = 64


async def change(gateway: Gateway, *models: ServedModel, **config: Any) -> None:
    await gateway.reconfigure(GatewayConfig(**config), models, {})


async def streamed(http: httpx.AsyncClient) -> str:
    answer = await http.post("/v1/chat/completions", json=chat(stream=True))
    parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text
    return "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])


async def test_open_streams_see_nothing_of_changes(served: Served):
    gateway = await served.gateway(M, N)
    await served.replica("m", max_num_seqs=STREAMS, **SLOW)
    await served.replica("n")
    async with served.http(limits=httpx.Limits(max_connections=2 * STREAMS)) as http:
        streams = [asyncio.create_task(streamed(http)) for _ in range(STREAMS)]
        await until(lambda: served.table.leases("m") == STREAMS)
        added = ServedModel("o", 1)
        for models in (
            [replace(M, aliases=("x",), fallbacks=("n",)), N],
            [replace(M, routing_policy="round_robin", max_ongoing_requests=1), N, added],
            [replace(M, max_queued_requests=3), added],
            [M],
        ):
            await change(gateway, *models, max_body_bytes=1000 + len(models))
            answer = await http.get("/v1/models")
            shown = [name for model in models for name in (model.id, *model.aliases)]
            assert [one["id"] for one in answer.json()["data"]] == shown
        served.members["m"].clear()
        await change(gateway, N)
        served.table.set_members("m", {})
        assert {len(text.split()) for text in await asyncio.gather(*streams)} == {60}
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 404


async def test_what_waits_for_a_removed_model_is_refused_and_may_come_again(served: Served):
    gateway = await served.gateway(M, N)
    await served.replica("n")
    async with served.http() as http:
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json=chat()))
        await until(lambda: len(served.line("m")) == 1)
        await change(gateway, N)
        answer = await asyncio.wait_for(waiting, 2)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "'m' has just been removed" in answer.json()["error"]["message"]
        await change(gateway, replace(N, aliases=("m",)))
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200
        assert 'penstock_requests_queued{model="m"' not in (await http.get("/metrics")).text


async def test_a_removed_model_leaves_its_waiting_requests_to_a_fallback(served: Served):
    m = replace(M, fallbacks=("n",), start_s=60.0)  # it is waited for, although there is a fallback
    gateway = await served.gateway(m, N)
    await served.replica("n", reply="n says")
    async with served.http() as http:
        waiting = asyncio.create_task(http.post("/v1/chat/completions", json=chat()))
        await until(lambda: len(served.line("m")) == 1)
        await change(gateway, N)
        assert "n says" in (await asyncio.wait_for(waiting, 2)).text


async def test_requests_that_wait_go_when_the_limit_is_raised(served: Served):
    gateway = await served.gateway(replace(M, max_ongoing_requests=1))
    await served.replica(max_num_seqs=4, **SLOW)
    async with served.http() as http:
        asked = [asyncio.create_task(streamed(http)) for _ in range(3)]
        await until(lambda: len(served.line("m")) == 2)
        await change(gateway, replace(M, max_ongoing_requests=2))
        assert (served.table.leases("m"), len(served.line("m"))) == (2, 1)
        await change(gateway, replace(M, max_ongoing_requests=2, max_queued_requests=1))
        refused = await http.post("/v1/chat/completions", json=chat())
        assert refused.status_code == 429
        await asyncio.gather(*asked)


async def test_a_change_that_cannot_be_had_changes_nothing(served: Served, tmp_path: Path):
    gateway = await served.gateway(M, max_body_bytes=200)
    await served.replica()
    wrong = [
        (M, GatewayConfig(keys_file=str(tmp_path / "absent.yaml")), "absent.yaml: no such file"),
        (M, GatewayConfig(default_model="x"), "default model 'x' is none of"),
        (replace(M, routing_policy="absent:Policy"), GatewayConfig(), "absent"),
    ]
    async with served.http() as http:
        for model, config, said in wrong:
            with pytest.raises(ConfigError, match=said):
                await gateway.reconfigure(config, [model, ServedModel("o", 1)], {})
            assert (await http.post("/v1/chat/completions", json=chat(300 * "a"))).status_code == 413
            assert (await http.post("/v1/chat/completions", json=chat("a"))).status_code == 200
            assert [one["id"] for one in (await http.get("/v1/models")).json()["data"]] == ["m"]


async def test_the_first_tenants_of_a_running_service_are_in_the_audit(served: Served, tmp_path: Path):
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{tenant: t, name: n, key: the-only-key-of-tenant-t}]")
    config = {"api_key": "the-key", "keys_file": str(file), "tenants": {"u": {"weight": 2}}}
    gateway = await served.gateway(M, api_key="the-key")
    for _ in range(2):
        await change(gateway, M, **config)
    key_id = hashed("the-only-key-of-tenant-t")[7:15]
    added = [f"key t/n ({key_id}) added: {{}}", 'tenant u added: {"weight":2.0}']
    assert gateway._tenants.usage.counters.changes == [("the fleet's file", what) for what in added]


async def test_keys_begin_and_end_to_be_asked_for(served: Served, tmp_path: Path):
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{tenant: t, name: n, key: the-only-key-of-tenant-t}]")
    gateway = await served.gateway(M)
    await served.replica()
    async with served.http() as http:

        async def status(**headers: str) -> int:
            return (await http.post("/v1/chat/completions", json=chat(), headers=headers)).status_code

        assert await status() == 200
        await change(gateway, M, keys_file=str(file))
        assert (await status(), await status(authorization="Bearer the-only-key-of-tenant-t")) == (401, 200)
        await change(gateway, M)
        assert await status() == 200


def test_what_serve_passes_on_comes_back_as_it_was():
    models = (replace(M, aliases=("x",), policy_options={"seed": 1}, created=7), N)
    config = GatewayConfig(api_key="k", port=8000, cors={"origins": ["https://example.org"]}, processes=2)
    before = LiveState(models[:1], config)
    state = LiveState(models, config, {"m": "LLMServer:m"}, ("m",), {"m": "r"}, 7.0)
    plain = json.loads(json.dumps(state.dump()))
    found = LiveState.parse(plain, before)
    assert found.cards[0] == models[0]
    assert replace(found, cards=models) == state
    assert found.dump() == plain
    for broken in (None, {}, {**plain, "cards": 1}, "text"):
        with pytest.raises(ValueError):  # noqa: PT011 - pydantic's
            LiveState.parse(broken, before)
    assert replace(state, cards=(replace(M, policy_options={"a": object()}),)).dump() is None
