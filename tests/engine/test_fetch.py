"""Whom the replica fetches media from for a request, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from penstock.engines.vllm.media.fetch import CheckedConnection, Refused, is_public

pytestmark = pytest.mark.parity("S23")


@asynccontextmanager
async def site() -> AsyncIterator[int]:
    """The port of a server with `/here`, and `/away?to=URL`, which redirects; it is a proxy, too."""

    async def here(request: web.Request) -> web.Response:
        return web.Response(body=b"here")

    async def away(request: web.Request) -> web.Response:
        raise web.HTTPFound(request.query["to"])

    app = web.Application()
    app.add_routes([web.get("/here", here), web.get("/away", away)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connection(*hosts: str) -> AsyncIterator[CheckedConnection]:
    made = CheckedConnection(hosts)
    try:
        yield made
    finally:
        await (await made.get_async_client()).close()


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07::1", "64:ff9b::5db8:d70e"])
def test_address_of_the_internet_is_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "224.0.0.1"),
        "169.254.169.254",  # where clouds keep a machine's credentials
        *("::1", "::", "fe80::1%eth0", "fd00:ec2::254", "ff02::1"),
        "168.63.129.16",  # the same on Azure
        *("64:ff9b:1::1", "fec0::1", "::7f00:1", "192.88.99.1", "3fff::1", "5f00::1"),
        *("::ffff:127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::"),  # IPv4 inside
    ],
)
def test_own_and_private_addresses_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
async def test_private_address_is_refused_under_any_name(host):
    async with site() as port, connection() as fetching:
        with pytest.raises(Refused):
            await fetching.async_get_bytes(f"http://{host}:{port}/here")


async def test_private_address_is_refused_in_the_blocking_form():
    async with site() as port:
        with pytest.raises(Refused):
            await asyncio.to_thread(CheckedConnection().get_bytes, f"http://127.0.0.1:{port}/here")
        assert await asyncio.to_thread(
            CheckedConnection(["127.0.0.1"]).get_bytes, f"http://127.0.0.1:{port}/here"
        )


async def test_named_host_may_be_private():
    async with site() as port, connection("localhost") as fetching:
        assert await fetching.async_get_bytes(f"http://localhost:{port}/here") == b"here"


async def test_named_host_cannot_redirect_to_another():
    async with site() as port, connection("localhost") as fetching:
        with pytest.raises(Refused):
            await fetching.async_get_bytes(f"http://localhost:{port}/away?to=http://127.0.0.1:{port}/here")
        assert await fetching.async_get_bytes(f"http://localhost:{port}/away?to=/here") == b"here"


async def test_public_host_cannot_redirect_to_a_private_address(monkeypatch):
    """The environment's proxy, which may be private itself, stands for the internet here."""
    async with site() as port, connection() as fetching:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "127.0.0.2")
        assert await fetching.async_get_bytes("http://pictures.example/here") == b"here"
        with pytest.raises(Refused):
            await fetching.async_get_bytes(f"http://pictures.example/away?to=http://127.0.0.2:{port}/here")


async def test_requests_that_come_at_once_share_a_client():
    async with connection() as made:
        first, second = await asyncio.gather(made.get_async_client(), made.get_async_client())
        assert first is second
