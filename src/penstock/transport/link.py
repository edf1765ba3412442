"""The link: one long response in which a replica reports its state. Its end means that the replica is dead.

It carries lines of JSON: a `Hello`, then a `LoadReport` for each change and at least once a second, and
`AdapterReport` when one was loaded or evicted. Here are the messages and the receiving side, which gateways
and batch share; the replica's side is `serve.replica.inbound.status_link`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Literal
from urllib.parse import quote

import msgspec

from penstock import __version__, tiers
from penstock.transport.connection import ReplicaConnection

PATH = "/_penstock/link"
ALIASES_PATH = "/_penstock/aliases"  # GET: tells the replica the names in `ALIASES`
ADAPTERS_PATH = "/_penstock/adapters"  # GET: names of the adapters that a request may name, as a JSON list
BEAT_S = 1.0  # a report at least this often
COALESCE_S = 0.1  # and at most this often, unless the state changes
SILENCE_S = 5.0  # without a line for so long, the link counts as lost
BYTES_PER_TOKEN = 4  # of English text; for shares and estimates only
_LOOKS = 5  # in that time

# Headers between gateway and replica. Of x-penstock- headers clients send only the tier's, which the gateway
# reads, and receive only `x-penstock-model`, which it writes.
SECRET = b"x-penstock-secret"
GATEWAY = b"x-penstock-gateway"
ADAPTER = b"x-penstock-adapter"  # on a request: the adapter's name, URL-quoted; absent for the base model
ALIASES = b"x-penstock-aliases"  # on any request of Penstock itself: the model's, each URL-quoted, by commas
TIER = tiers.HEADER.encode()  # on a request: its class of work; absent for `default`
TENANT = b"x-penstock-tenant"  # on a request: what the ids of stored responses say of their tenant
SHARE = b"x-penstock-share"  # on a request: its price over its tenant's weight, and the tenant
OWNER = b"x-penstock-owner"  # on a request for files and batches: whose they are, and what may be in them
RETRY = b"x-penstock-retry"  # on a response: another replica may take the request, which was ...
UNTOUCHED = b"untouched"  # refused before the engine saw it, or
INTERRUPTED = b"interrupted"  # being worked on when the engine died, or
REFUSED = b"refused"  # the continuation of a stream that this one cannot continue
CHUNKED = (b"transfer-encoding", b"chunked")
WEIGHTS = b"penstock-weights"  # on a response, for clients: the version of updated weights

State = Literal["ready", "asleep", "paused", "draining"]
"""Of a replica; only ready ones receive requests."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first line, of this process. Units: max_model_len, kv_tokens (of the KV cache) in tokens."""

    model_id: str
    max_model_len: int | None = None
    kv_tokens: int | None = None
    pid: int = msgspec.field(default_factory=os.getpid)
    version: str = __version__


class LoadReport(msgspec.Struct, frozen=True, tag="report"):
    """State and load. Units: requests, tokens; kv_usage from 0 to 1.

    waiting_tokens: of prompts not yet prefilled, those that the engine has not been called for included.
    elsewhere: open requests from other gateways than the one that receives this. batch_limit: batch requests
    that may run in it, None where nothing limits them. Of them batch_running run, batch_waiting wait for that
    in the replica, and batch_requeued were aborted for online ones so far. serves: stands for the model, its
    weights and what else tokens follow from beside the request; "" where streams cannot be continued.
    """

    state: State = "ready"
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    elsewhere: int = 0
    batch_limit: int | None = None
    batch_running: int = 0
    batch_waiting: int = 0
    batch_requeued: int = 0
    serves: str = ""


class AdapterReport(msgspec.Struct, frozen=True, tag="adapters"):
    """All loaded adapters. Sent after the hello, by replicas that take adapters, and at each change."""

    loaded: tuple[str, ...] = ()


def turned_away(state: bytes) -> list[tuple[bytes, bytes]]:
    """Header fields of a response after which another replica may be asked."""
    return [(RETRY, state), (b"connection", b"close")]


Message = Hello | LoadReport | AdapterReport

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Message).decode


def request_head(
    method: str, path: str, secret: str, sender: str, more: tuple[bytes, bytes] | None = None
) -> bytes:
    """Head of a request to a replica from Penstock itself, such as the one for a link. more: a field."""
    fields = [(SECRET, secret.encode()), (GATEWAY, sender.encode()), (b"host", b"replica")]
    lines = [b"%b: %b\r\n" % field for field in (*fields, *([more] if more else []))]
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method.encode(), path.encode(), b"".join(lines))


def aliases_field(aliases: Iterable[str]) -> tuple[bytes, bytes] | None:
    """The field that tells a replica names of its model; None without any."""
    quoted = ",".join(quote(alias, safe="") for alias in aliases).encode()
    return (ALIASES, quoted) if quoted else None


def line(message: Message) -> bytes:
    """One line of the link."""
    return _encode(message) + b"\n"


async def listen(
    connection: ReplicaConnection,
    secret: str,
    gateway_id: str,
    received: Callable[[Message], None],
    aliases: Iterable[str] = (),
) -> None:
    """Calls `received` for every message, until the link ends; it always ends by raising.

    aliases: names that the replica takes for its model from now on, beside those that it knows.
    Raises: ConnectionError at its end, TimeoutError after silence, msgspec.DecodeError for an invalid line.
    """
    connection.request(request_head("GET", PATH, secret, gateway_id, aliases_field(aliases)))
    await read_lines(partial(read, connection), lambda text: received(_decode(text)), SILENCE_S)
    raise ConnectionResetError("the replica ended the link")


async def read(connection: ReplicaConnection) -> bytes:
    """More of the response. Raises: ConnectionError, also when its status is not 200."""
    if (head := await connection.head()).status != 200:
        raise ConnectionAbortedError(f"it refused the link with status {head.status}")
    return await connection.read()


async def read_lines(
    read: Callable[[], Awaitable[bytes]], received: Callable[[bytes], None], silence_s: float
) -> None:
    """Calls `received` for every line, until `read` returns nothing.

    Silence is told by counted looks, not by the clock: a process that was stopped finds its timers due before
    it reads what came meanwhile.
    Raises: TimeoutError after silence, or a look later; what `read` and `received` raise.
    """
    async with asyncio.timeout(None) as limit:
        loop, looks, rest = asyncio.get_running_loop(), 0, b""

        def look() -> None:
            nonlocal looks, next_look
            next_look = loop.call_later(silence_s / _LOOKS, look)
            if looks == _LOOKS:
                limit.reschedule(loop.time())
            looks += 1

        next_look: asyncio.Handle = loop.call_soon(look)
        try:
            while piece := await read():
                looks = 0
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    received(line)
        finally:
            next_look.cancel()
