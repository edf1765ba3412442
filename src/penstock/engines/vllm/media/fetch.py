"""vLLM's http(s) client, restricted in where a request may have it fetch from.

Otherwise any client could make the replica read what only the replica can reach: a cloud's metadata service,
a neighbour's dashboard. An address that is not public is refused when the socket is created: by then names
are resolved and redirects followed, and no later DNS answer can change it.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies
from weakref import WeakKeyDictionary

import aiohttp
from vllm.connections import HTTPConnection

_WITH_IPV4 = (
    IPv6Network("64:ff9b::/96"),
    IPv6Network("::/96"),
    IPv6Network("::ffff:0:0:0/96"),
)  # in their last 32 bits
# Some versions of Python, or some clouds, treat these as public although they are not:
_NOT_PUBLIC = (
    IPv4Network("168.63.129.16/32"),  # Azure's services for its virtual machines
    *(IPv6Network("64:ff9b:1::/48"), IPv6Network("fec0::/10"), IPv6Network("3fff::/20")),
    *(IPv6Network("5f00::/16"), IPv4Network("192.88.99.0/24")),
)


class Refused(Exception):
    """A connection that the rules forbid. Not an OSError: those are retried."""


def is_public(address: str) -> bool:
    """Whether `address` is public, also when it is an IPv4 address embedded in IPv6."""
    found = ip_address(address)
    found = _inner(found) if isinstance(found, IPv6Address) else found
    listed = any(found in network for network in _NOT_PUBLIC)
    return found.is_global and not found.is_multicast and not listed


def _inner(address: IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address where packets to this one end."""
    if any(address in network for network in _WITH_IPV4):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    tunnelled = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or tunnelled or address


class CheckedConnection(HTTPConnection):
    """vLLM's http(s) client with our rules: only these `hosts`, or, with none, only public addresses."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        super().__init__()
        self._hosts = frozenset(host.lower() for host in hosts)
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = (
            WeakKeyDictionary()
        )

    async def get_async_client(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            proxies = frozenset() if self._hosts else await asyncio.to_thread(_proxy_addresses)
            if loop not in self._sessions:  # another request may have made it meanwhile
                self._sessions[loop] = self._session(proxies)
        return self._sessions[loop]

    def _session(self, proxies: frozenset[tuple[str, int]]) -> aiohttp.ClientSession:
        if self._hosts:
            return aiohttp.ClientSession(trust_env=True, middlewares=[self._only_named])
        connector = aiohttp.TCPConnector(
            socket_factory=functools.partial(_public_socket, proxies),
            happy_eyeballs_delay=None,  # it tries addresses in tasks, and would treat Refused as their crash
        )
        return aiohttp.ClientSession(trust_env=True, connector=connector)

    async def _only_named(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Checks each request of a redirect chain."""
        if (request.url.host or "") not in self._hosts:
            raise Refused
        return await send(request)

    def get_bytes(self, url: str, **options: Any) -> bytes:
        """The blocking form runs the other one in a thread, so the rules are in one place."""

        async def fetch() -> bytes:
            try:
                return await self.async_get_bytes(url, **options)
            finally:
                await (await self.get_async_client()).close()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, fetch()).result()


def _proxy_addresses() -> frozenset[tuple[str, int]]:
    """Addresses of the proxies in the environment, which apply their own rules to what they fetch."""
    found: set[tuple[str, int]] = set()
    for url in getproxies().values():
        parts = urlsplit(url if "//" in url else f"//{url}")
        try:
            infos = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
        except (OSError, ValueError):
            continue
        found |= {(str(info[4][0]), int(info[4][1])) for info in infos}
    return frozenset(found)


def _public_socket(proxies: frozenset[tuple[str, int]], info: Sequence[Any]) -> socket.socket:
    """aiohttp's socket factory: called with the very address that it will connect to."""
    family, kind, protocol, _, address = info
    if not is_public(address[0]) and (address[0], address[1]) not in proxies:
        raise Refused
    return socket.socket(family, kind, protocol)
