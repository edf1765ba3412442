"""Bounds what clients hold of a port before a request is accepted: connections, heads, time.

A connection counts while it waits: it is new, idle, in the middle of a head, or refused. It does not count
while a request that the app has accepted is open. Limits are per address, so that one client cannot take what
others need; `limits` has the figures. Those that wait are read a few at a time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Protocol


class WaitingConnection(Protocol):
    """A client's connection. since: when it began to wait for something with a time limit; `inf` for none."""

    since: float

    def cut(self, reason: str) -> None:
        """Ends the connection at once."""
        ...


class Peer:
    """One address: its connections that wait, oldest first, and the bytes of their heads."""

    __slots__ = ("head_bytes", "key", "open", "waiting")

    def __init__(self, key: str) -> None:
        self.key = key
        self.open = 0
        self.waiting: OrderedDict[WaitingConnection, None] = OrderedDict()
        self.head_bytes = 0


class Connections:
    """Those of one port, by the addresses of clients. counts: connections that were ended, by reason."""

    def __init__(self, per_address: int = 4096) -> None:
        """per_address: connections that may wait. All addresses together may take half of our open files."""
        self._per_address = per_address
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._most = files // 2 if files != resource.RLIM_INFINITY else sys.maxsize
        self._peers: dict[str, Peer] = {}
        self.waiting = 0
        self.open = 0
        self.counts: Counter[str] = Counter()

    def join(self, address: str, connection: WaitingConnection) -> Peer:
        """Counts a new connection; ends the one that has waited longest where there are too many."""
        key = _key(address)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(key)
        peer.open += 1
        self.open += 1
        self.wait(peer, connection)
        if len(peer.waiting) > self._per_address:
            next(iter(peer.waiting)).cut("too_many_connections")
        elif self.waiting > self._most:
            fullest = max(self._peers.values(), key=lambda peer: len(peer.waiting))
            next(iter(fullest.waiting)).cut("too_many_connections")
        return peer

    def leave(self, peer: Peer, connection: WaitingConnection) -> None:
        """It has ended."""
        self.accept(peer, connection)
        peer.open -= 1
        self.open -= 1
        if not peer.open:
            del self._peers[peer.key]

    def wait(self, peer: Peer, connection: WaitingConnection) -> None:
        """It counts from now on."""
        if connection not in peer.waiting:
            peer.waiting[connection] = None
            self.waiting += 1

    def accept(self, peer: Peer, connection: WaitingConnection) -> None:
        """It does not count any more. Safe to call twice."""
        if connection in peer.waiting:
            del peer.waiting[connection]
            self.waiting -= 1


class ReadLimiter:
    """Limits reads of new requests per turn of the event loop, so that many at once do not stall streams."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._loop = asyncio.get_running_loop()
        self._done = 0  # in this turn
        self._later: deque[Callable[[], None]] = deque()

    def take(self, work: Callable[[], None]) -> bool:
        """Calls `work` now or in one of the next turns; returns whether it was now."""
        if not self._done:
            self._loop.call_soon(self._next)
        if self._done >= self._per_turn:
            self._later.append(work)
            return False
        self._done += 1
        work()
        return True

    def _next(self) -> None:
        self._done = 0
        for _ in range(min(len(self._later), self._per_turn)):
            self.take(self._later.popleft())


def expire(connections: list[WaitingConnection], before: float) -> None:
    """Ends those that wait since `before` or earlier for what must come in time."""
    for connection in connections:
        if connection.since <= before:
            connection.cut("timeout")


def _key(address: str) -> str:
    """The network of an IPv6 address: a host has all 2**64 addresses of it."""
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address.partition("%")[0])
    return str(found.ipv4_mapped or ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))
