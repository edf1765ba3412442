"""The link between control and a follower: one HTTP exchange in which both send lines of JSON.

Followers are replicas, which report a `ReplicaStatus` and hear an `Update`, and gateways, which report a
`GatewayStatus` and hear `Routes`. Calls by Serve's handles would not do: the process that is called waits for
each caller to take its reply, and answers nobody else meanwhile. Here a follower that hangs fills its own
socket, and its link ends after `GONE_S` of silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock.asgi import Receive, Scope, Send
from penstock.errors import Unavailable
from penstock.openai import errors
from penstock.serve.control.state import FOLLOW_S, GONE_S, Done, GatewayStatus, ReplicaStatus, Routes, Update
from penstock.serve.http import direct_writer
from penstock.serve.http.private_listener import ListenerClient
from penstock.serve.tenancy.usage import Settlement, Totals
from penstock.transport.connection import ReplicaConnection
from penstock.transport.link import CHUNKED, read, read_lines, request_head

log = logging.getLogger(__name__)

PATH = "/_penstock/control"
"""Of the link. Below it, each of `serve.control.deployment`'s calls."""

_FIND_S = 5.0
_AGAIN_S = 1.0
_HEARD_S = 2 * GONE_S  # an outcome that was said so long ago, on a link that lasts, has been heard
_SETTLE_S = 5.0
_SHIFTING_S = 0.2  # between two reports of a gateway that moves a model, or has a canary
_WARN_S = 30.0  # without control before a warning is logged: a restart of control takes less

FromFollower = ReplicaStatus | GatewayStatus | Done
_T = TypeVar("_T", Update, Routes)
_decode = msgspec.json.Decoder(FromFollower).decode


def _encode(message: Any) -> bytes:
    """An outcome holds what an engine's workers return, an error the names of files."""
    try:
        return msgspec.json.encode(message, enc_hook=repr)
    except UnicodeEncodeError:  # of lone surrogates, which are replaced
        plain = msgspec.to_builtins(message, enc_hook=repr, str_keys=True)
        return json.dumps(plain, ensure_ascii=False).encode(errors="replace")


async def serve(
    scope: Scope,
    receive: Receive,
    send: Send,
    hear: Callable[[FromFollower], None],
    updates: Callable[[ReplicaStatus | GatewayStatus], AsyncGenerator[Update | Routes]],
) -> None:
    """Control's side, until the follower ends the link or is silent, or there are no more updates.

    hear: called with each message. updates: called after the first status, for what is sent. Raises: what
    they do.
    """
    first = asyncio.get_running_loop().create_future()

    def received(line: bytes) -> None:
        message = _decode(line)
        hear(message)
        if not isinstance(message, Done) and not first.done():
            first.set_result(message)

    async def read() -> bytes:
        while (message := await receive())["type"] == "http.request":
            if piece := message.get("body", b""):
                return piece
        return b""

    async def talk() -> None:
        async with aclosing(updates(await first)) as due:
            async for update in due:
                line = _encode(update) + b"\n"
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    await send({"type": "http.response.start", "status": 200, "headers": []})
    try:
        await _until_one_ends(talk(), read_lines(read, received, GONE_S))
    except TimeoutError:
        log.info("A follower's link ends: it is silent")
        if (writer := direct_writer.of(scope)) is not None:
            writer.abort()


async def _until_one_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Runs them at the same time and ends the others with the first. Raises: what that raises."""
    tasks = list(map(asyncio.create_task, works))
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


class ControlLink:
    """A follower's side: finds control, reports to it and hears from it."""

    def __init__(self, handle: Any, node_id: str) -> None:
        """handle: to control's deployment. node_id: of this process."""
        self._client = ListenerClient(handle, node_id)
        self._outbox: list[bytes] = []
        self._said: list[tuple[float, bytes]] = []  # on this link, and when
        self._changed = asyncio.Event()

    def report(self) -> None:
        """Has `follow` report now."""
        self._changed.set()

    def say(self, done: Done) -> None:
        """Sends an outcome before the next report. Raises: what encoding it to JSON raises."""
        self._outbox.append(_encode(done))
        self.report()

    async def follow(
        self,
        status: Callable[[], ReplicaStatus | GatewayStatus],
        kind: type[_T],
        received: Callable[[_T], None],
    ) -> None:
        """Reports `status` and calls `received` with what control sends, for ever."""
        loop = asyncio.get_running_loop()
        heard_at = warned_at = loop.time()

        def heard(line: bytes) -> None:
            nonlocal heard_at
            heard_at = loop.time()
            received(msgspec.json.decode(line, type=kind))

        while True:
            try:
                await self._exchange(status, heard)
                error: Exception = ConnectionResetError("it has ended the link")
            except (OSError, Unavailable) as failed:
                error = failed
            except Exception as failed:  # whatever ends a link, a follower needs the next one
                log.exception("The link to control has failed")
                error = failed
            now = loop.time()
            if is_long := now - max(heard_at, warned_at) > _WARN_S:
                warned_at = now
            level = logging.WARNING if is_long else logging.INFO
            log.log(level, "Control does not answer (%s: %s); asking again.", type(error).__name__, error)
            await asyncio.sleep(_AGAIN_S)

    async def ask(self, call: str, arguments: Mapping[str, Any], limit_s: float) -> Any:
        """The result of one of control's calls. Raises: Error, as control did, or Unavailable without it."""
        body = _encode(arguments)
        connection: ReplicaConnection | None = None
        try:
            async with asyncio.timeout(limit_s):
                connection = await self._open(f"{PATH}/{call}", body)
                status, answer = await connection.whole()
        except (OSError, TimeoutError) as error:
            self._client.forget()
            raise Unavailable(
                "Control does not answer now; try again in a moment.", retry_after_s=5
            ) from error
        finally:
            if connection is not None:
                connection.abort()
        if status != 200:
            self._client.forget()
            raise errors.parsed(answer)
        return msgspec.json.decode(answer)

    async def settle(self, settlement: Settlement) -> Totals:
        """Has control store usage. Raises: as `ask`."""
        found = await self.ask("settle", msgspec.to_builtins(settlement), _SETTLE_S)
        return msgspec.convert(found, Totals)

    async def _exchange(
        self, status: Callable[[], ReplicaStatus | GatewayStatus], heard: Callable[[bytes], None]
    ) -> None:
        connection = await self._open(PATH)
        try:
            listening = read_lines(partial(read, connection), heard, GONE_S)
            await _until_one_ends(self._report(connection, status), listening)
        finally:
            connection.abort()
            self._client.forget()  # another process may listen there by now
            self._outbox[:0] = [message for _, message in self._said]  # it may not have heard them
            self._said.clear()

    async def _report(
        self, connection: ReplicaConnection, status: Callable[[], ReplicaStatus | GatewayStatus]
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            now, at = status(), loop.time()
            lines = b"".join(message + b"\n" for message in (*self._outbox, _encode(now)))
            recent = (said for said in self._said if at - said[0] < _HEARD_S)
            self._said = [*recent, *((at, message) for message in self._outbox)]
            self._outbox.clear()
            connection.write(b"%x\r\n%b\r\n" % (len(lines), lines))
            often_s = FOLLOW_S
            if isinstance(now, GatewayStatus) and (now.shifting or now.canaries):
                often_s = _SHIFTING_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(often_s):  # `wait_for` can lose a cancellation
                    await self._changed.wait()

    async def _open(self, path: str, body: bytes | None = None) -> ReplicaConnection:
        """A connection on which the request was sent; without a body, that follows in chunks."""
        address, connection = await self._client.connect(_FIND_S)
        length = CHUNKED if body is None else (b"content-length", b"%d" % len(body))
        connection.request(request_head("POST", path, address.secret, "", length), body or b"")
        return connection
