"""Bounds what clients hold of a port before a request is accepted: connections, heads, time.

A connection counts while it waits: it is new, idle, in the middle of a head, or refused. It does not count
while a request that the app has accepted is open. Limits are per address, so that one client cannot take what
others need; `limits` has the figures. What they send is parsed a little at a time.
"""

from __future__ import annotations

import asyncio
import heapq
import ipaddress
import itertools
import resource
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.serve.http import limits


class WaitingConnection(Protocol):
    """A client's connection. since: when it began to wait for something with a time limit; `inf` for none."""

    since: float

    def cut(self, reason: str) -> None:
        """Ends the connection at once."""
        ...


@dataclass(eq=False, slots=True)
class Peer:
    """One address: its connections that wait, oldest first, and the bytes of their heads."""

    key: str
    open: int = 0
    waiting: OrderedDict[WaitingConnection, None] = field(default_factory=OrderedDict)
    head_bytes: int = 0


class Connections:
    """Those of one port, by the addresses of clients. counts: connections that were ended, by reason."""

    def __init__(self, per_address: int = 4096, most: int | None = None) -> None:
        """per_address, most: connections that may wait, of one address and of all; without `most` half of our
        open files.
        """
        self.per_address = per_address
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._most = most or (files // 2 if files != resource.RLIM_INFINITY else sys.maxsize)
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
        if len(peer.waiting) > self.per_address:
            next(iter(peer.waiting)).cut("too_many_connections")
        elif self.waiting > self._most:
            fullest = max(self._peers.values(), key=lambda peer: len(peer.waiting))
            next(iter(fullest.waiting)).cut("too_many_connections")
        return peer

    def oldest(self, address: str) -> WaitingConnection | None:
        """The one that the next of this address would end; None while the address has room."""
        peer = self._peers.get(_key(address))
        return next(iter(peer.waiting)) if peer and len(peer.waiting) >= self.per_address else None

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


class WorkLimiter:
    """Limits the work with what clients send in one iteration of the event loop: streams go on between two.

    left: of this iteration's work; work subtracts from it. request: what a new request counts.
    """

    def __init__(self, requests_at_once: int) -> None:
        self.request = limits.WORK_AT_ONCE // requests_at_once
        self.left = limits.WORK_AT_ONCE
        self._loop = asyncio.get_running_loop()
        self._counting = False
        self._later: list[tuple[int, int, Callable[[], None]]] = []  # a heap
        self._number = itertools.count()

    def has_room(self) -> bool:
        """Whether more may be done in this iteration."""
        if not self._counting:
            self._counting = True
            self._loop.call_soon(self._next)
        return self.left > 0

    def later(self, done: int, work: Callable[[], None]) -> None:
        """Calls `work` in one of the next iterations: first those with the least `done`, then in order."""
        heapq.heappush(self._later, (done, next(self._number), work))

    def take(self, work: Callable[[], None]) -> None:
        """Calls `work` now or in one of the next iterations. It counts as much as a request."""
        if self.has_room():
            self.left -= self.request
            work()
        else:
            self.later(0, lambda: self.take(work))

    async def room(self) -> None:
        """Returns in an iteration that has room, for work that counts as much as a request."""
        room = asyncio.Event()
        self.take(room.set)
        await room.wait()

    def _next(self) -> None:
        self.left, self._counting = limits.WORK_AT_ONCE, False
        while self._later and self.has_room():
            heapq.heappop(self._later)[2]()


def _key(address: str) -> str:
    """The network of an IPv6 address: a host has all 2**64 addresses of it."""
    if ":" not in address:
        return address
    found = ipaddress.IPv6Address(address.partition("%")[0])
    return str(found.ipv4_mapped or int(found) >> 64)
