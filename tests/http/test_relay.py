"""What the child of an engine in a process of its own is sent of a request."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web

from penstock.engines.edge import Edge
from penstock.engines.process.options import ProcessOptions
from penstock.engines.process.relay import ModelNames, Relay
from penstock.engines.process.wire import Wire

CHAT, JSON = "/v1/chat/completions", {"content-type": "application/json"}
WEB = {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "http://a/"}}]}]}


class Target:
    """A child that answers with the bytes that it was sent."""

    def __init__(self, wire: Wire) -> None:
        self.options = ProcessOptions(command=["any"])
        self.is_vllm = False
        self.app = Edge(Relay(self), lambda: None)
        self._wire = wire

    @asynccontextmanager
    async def at_work(self, *, waits: bool) -> AsyncGenerator[Wire]:
        yield self._wire

    def names(self, adapter: str | None) -> ModelNames:
        return ModelNames("m", "m")

    async def check_health(self) -> None: ...


@pytest_asyncio.fixture
async def target(free_port: int) -> AsyncIterator[Target]:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    server = web.Application()
    server.router.add_post("/{path:.*}", echo)
    runner = web.AppRunner(server)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", free_port).start()
    wire = Wire("127.0.0.1", free_port, "key")
    yield Target(wire)
    await wire.close()
    await runner.cleanup()


async def post(target: Target, content: bytes, headers: dict[str, str] = JSON) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(target.app), base_url="http://child") as http:
        return await http.post(CHAT, content=content, headers=headers)


@pytest.mark.parametrize(
    "content", [b'{"a":  [1, null], "model": "m"}', b"not JSON", b'{"temperature": NaN}']
)
async def test_a_request_in_the_form_of_engines_goes_byte_for_byte(target: Target, content: bytes):
    assert (await post(target, content)).content == content


async def test_what_is_null_is_left_out(target: Target):
    assert (await post(target, b'{"n": null, "model": "m"}')).json() == {"model": "m"}


async def test_addresses_go_to_the_child_only_where_the_config_names_them(target: Target):
    for text in (json.dumps(WEB), json.dumps({**WEB, "temperature": float("nan")})):
        answer = await post(target, text.encode())
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
    upload = await post(target, json.dumps(WEB).encode(), {"content-type": "multipart/form-data; boundary=a"})
    assert upload.status_code == 200
    target.options = ProcessOptions(command=["any"], allowed_media_domains=["a"])
    assert (await post(target, json.dumps(WEB).encode())).json() == WEB


async def test_what_vllms_server_would_ignore_is_refused(target: Target):
    body: dict[str, Any] = {"functions": [{"name": "f"}]}
    assert (await post(target, json.dumps(body).encode())).json() == body
    target.is_vllm = True
    assert (await post(target, json.dumps(body).encode())).json()["error"]["param"] == "functions"
