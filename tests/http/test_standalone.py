"""A model without a router: HTTP by a gateway in its replica, with the limits and keys that were bound."""

import asyncio
from typing import Any

import httpx
import pytest
from served import Served, chat, sim_config

from penstock.config import GatewayConfig
from penstock.serve import LLMServer
from penstock.serve.replica.server import HTTPRequest

KEY = {"authorization": "Bearer the-key"}


def test_the_key_of_the_environment_that_binds_is_the_keys_of_replicas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_API_KEY", "the-key")
    bound = LLMServer.as_deployment().bind(sim_config("m"))._bound_deployment
    monkeypatch.delenv("PENSTOCK_API_KEY")
    assert bound.init_kwargs["gateway"].api_key.get_secret_value() == "the-key"


def test_a_gateway_config_can_be_bound():
    given = GatewayConfig(api_key="other", request_timeout_s=5)
    bound = LLMServer.as_deployment().bind(sim_config("m"), gateway=given)._bound_deployment
    assert bound.init_kwargs["gateway"] is given


async def test_first_requests_share_one_gateway_and_its_stream_count(served: Served):
    replica = await served.replica(join=False)
    server = LLMServer.sync_init(sim_config("m"))
    server._listener, server._gateway_config = replica.listener, GatewayConfig(api_key="the-key")
    request = HTTPRequest({"type": "http"})
    answers: list[Any] = await asyncio.gather(*(server(request) for _ in range(20)))
    _, app = await server._gateway
    assert {answer._app for answer in answers} == {app}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(answers[0]), base_url="http://x") as http:
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 401
        answer = await http.post("/v1/chat/completions", json=chat(), headers=KEY, timeout=30)
    assert answer.status_code == 200
    await server.stop()


async def test_a_server_that_has_stopped_leaves_no_coroutine_when_it_is_collected(served: Served):
    server = LLMServer.sync_init(sim_config("m"))
    server._listener = (await served.replica(join=False)).listener
    await server.__del__()  # as Serve does
    assert server.__del__() is None  # as Python does
