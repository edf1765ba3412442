"""What an address may hold of a port, and how work is spread over turns of the event loop."""

import asyncio
import math
import resource
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any

import pytest

from penstock.serve.http import limits
from penstock.serve.http.connection_limits import Connections, Peer, WorkLimiter
from penstock.serve.http.protocol import BoundedProtocol


class Connection:
    """A client's, which leaves when it is cut, as a real one does."""

    since = math.inf

    def __init__(self, port: Connections, address: str) -> None:
        self._port = port
        self.reasons: list[str] = []
        self.peer: Peer = port.join(address, self)

    def cut(self, reason: str) -> None:
        self.reasons.append(reason)
        self.leave()

    def leave(self) -> None:
        self._port.leave(self.peer, self)


def joined(port: Connections, *addresses: str) -> list[Connection]:
    return [Connection(port, address) for address in addresses]


def cut(connections: list[Connection]) -> list[int]:
    """Which of them were ended, by their numbers."""
    assert {reason for one in connections for reason in one.reasons} <= {"too_many_connections"}
    return [number for number, one in enumerate(connections) if one.reasons]


def test_an_address_with_too_many_connections_loses_its_oldest_and_no_other_does():
    port = Connections(per_address=2)
    first = joined(port, "b", "a", "a", "b")
    assert cut(first) == []
    joined(port, "a")
    assert cut(first) == [1]
    assert (port.open, port.waiting) == (4, 4)


def test_where_all_have_too_many_the_address_with_the_most_loses_its_oldest():
    port = Connections(per_address=9, most=4)
    first = joined(port, "a", "b", "b", "c")
    assert cut(first) == []
    joined(port, "d")
    assert cut(first) == [1]
    assert (port.open, port.waiting) == (4, 4)


@pytest.mark.parametrize(("files", "most"), [(8, 4), (9, 4), (resource.RLIM_INFINITY, 20)])
def test_half_of_our_files_may_be_connections_that_wait(files: int, most: int, patched):
    patched(resource, "getrlimit", lambda kind: (1, files))
    port = Connections()
    joined(port, *(str(number) for number in range(20)))
    assert port.waiting == most


def test_the_oldest_of_an_address_is_known_when_it_has_no_room():
    port = Connections(per_address=2)
    assert port.oldest("a") is None
    first, second, other = joined(port, "a", "a", "b")
    assert (port.oldest("a"), port.oldest("b")) == (first, None)
    first.leave()
    assert port.oldest("a") is None
    port.accept(second.peer, second)
    joined(port, "a")
    port.wait(second.peer, second)
    assert port.oldest("a") is not None
    assert port.oldest("a") is not second
    other.leave()
    assert (port.open, port.waiting) == (2, 2)


def test_a_connection_counts_once_while_it_waits_and_not_while_its_request_is_open():
    port = Connections()
    one, other = joined(port, "a", "a")
    for _ in range(2):
        port.accept(one.peer, one)
        assert (port.open, port.waiting, len(one.peer.waiting)) == (2, 1, 1)
    for _ in range(2):
        port.wait(one.peer, one)
        assert (port.open, port.waiting) == (2, 2)
    one.leave()
    assert joined(port, "a")[0].peer is other.peer
    other.leave()
    assert (port.open, port.waiting, other.peer.open) == (1, 1, 1)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("2001:db8:0:2::1", "2001:db8:0:2:ffff::9", True),
        ("2001:db8:0:2::1", "2001:db8:0:3::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
    ],
)
def test_the_addresses_of_one_host_count_together(first: str, second: str, same: bool):
    one, other = joined(Connections(), first, second)
    assert (one.peer is other.peer) is same


def test_an_address_is_forgotten_with_its_last_connection():
    port = Connections()
    before = joined(port, "a")[0]
    before.leave()
    assert joined(port, "a")[0].peer is not before.peer


# -- work in turns


async def turns(done: list[str]) -> list[str]:
    """What is done in each turn, until there is a turn without anything."""
    seen, in_turns = 0, list[str]()
    while not in_turns or in_turns[-1]:
        in_turns.append("".join(done[seen:]))
        seen = len(done)
        await asyncio.sleep(0)
    return in_turns


async def test_so_many_requests_are_taken_in_a_turn_and_the_rest_in_their_order():
    work, done = WorkLimiter(requests_at_once=4), list[str]()
    for name in "abcdefghij":
        work.take(lambda name=name: done.append(name))
    assert await turns(done) == ["abcd", "efgh", "ij", ""]
    work.take(lambda: done.append("k"))
    assert done[-1] == "k"


async def test_of_what_waits_that_comes_first_of_which_least_is_done():
    work, done = WorkLimiter(requests_at_once=1), list[str]()
    work.take(lambda: done.append("a"))
    for much, name in ((2, "f"), (1, "d"), (1, "e")):
        work.later(much, lambda name=name: work.take(lambda: done.append(name)))
    for name in "bc":
        work.take(lambda name=name: done.append(name))
    assert await turns(done) == ["a", "b", "c", "d", "e", "f", ""]


async def test_work_counts_as_what_it_is_and_leaves_the_rest_to_the_next_turn():
    work, done = WorkLimiter(requests_at_once=2), list[str]()
    assert work.has_room()
    work.left -= limits.WORK_AT_ONCE // 2
    for name in "ab":
        work.take(lambda name=name: done.append(name))
    assert await turns(done) == ["a", "b", ""]


async def test_whoever_waits_for_room_goes_on_when_there_is_some():
    work, done = WorkLimiter(requests_at_once=2), list[str]()

    async def waits(name: str) -> None:
        await work.room()
        done.append(name)

    tasks = [asyncio.create_task(waits(name)) for name in "abcde"]
    await asyncio.sleep(0)
    assert len(done) == 2
    await asyncio.gather(*tasks)
    assert "".join(sorted(done)) == "abcde"


async def test_a_look_at_a_connection_under_tls_that_has_just_ended_finds_nothing():
    """The port looks while it closes, in the turn of the loop between the two ends of such a connection."""
    loop, app = asyncio.get_running_loop(), asyncio.Protocol()
    under: Any = SSLProtocol(loop, app, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), None, server_side=True)
    ended: Any = object.__new__(BoundedProtocol)
    ended.transport = under._get_app_transport()
    under.connection_lost(None)
    ended.end_if_received()
    assert (ended.transport.is_closing(), ended._received) == (True, False)
