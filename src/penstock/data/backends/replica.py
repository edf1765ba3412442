"""One replica, reached at its own listener: its load, its requests from here, and whether it lives.

Its link reports its load ten times a second, and its death at once. Above it: the replica set, which chooses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from penstock.data.backends.http_client import ConnectFailed, ConnectionLost
from penstock.data.backends.limits import QueueDepth
from penstock.data.backends.protocol import Response
from penstock.data.rows.request import with_fields
from penstock.engine import Load
from penstock.tiers import FIELD, FLEX
from penstock.transport import link
from penstock.transport.address import Address
from penstock.transport.continuation import StreamRecord
from penstock.transport.pool import Pool
from penstock.transport.rows import RowSender

log = logging.getLogger(__name__)

_Reached = TypeVar("_Reached")

_RESPONSES = "/v1/responses"  # there, engines repeat the class that the body names


class ReplicaClient:
    """A replica from its discovery until it is lost, which is final."""

    def __init__(self, address: Address, node_id: str, sender: str, changed: Callable[[], None]) -> None:
        """node_id: of this process. sender: its name. changed: called when it is ready, draining, or lost."""
        self.id = address.replica_id
        self.hello: link.Hello | None = None
        self.takes_adapters = False
        self.in_flight = 0
        self.lost = False
        self._secret, self._sender = address.secret, sender
        self._pool = Pool(address, node_id)
        self._changed = changed
        self._report: link.LoadReport | None = None
        self._load = Load()
        self._reported = 0
        """Requests from here in it, at its last report."""
        self._queue_depth = QueueDepth()
        self._opening: asyncio.Task[RowSender] | None = None
        self._link = asyncio.create_task(self._follow_link())

    @property
    def ready(self) -> bool:
        """Whether new requests may go to it."""
        return not self.lost and self._report is not None and self._report.state == "ready"

    @property
    def serves(self) -> str:
        """As in `LoadReport`."""
        return self._report.serves if self._report is not None else ""

    @property
    def busy(self) -> int:
        """Requests in it, from all senders, as far as known."""
        return (self._report.elsewhere if self._report else 0) + self.in_flight

    def load(self) -> Load:
        """As last reported; rows that wait in the replica count as those that wait in its engine."""
        return self._load

    def available_slots(self) -> int:
        """How many more requests to send now."""
        if not self.ready:
            return 0
        load = self.load()
        sent_since = self.in_flight - self._reported
        return self._queue_depth.available_slots(load, load.running + load.waiting + sent_since)

    async def send(
        self, path: str, body: bytes, adapter: str | None, record: StreamRecord | None = None
    ) -> Response:
        """record: what the row goes on with, if this replica serves the same; gets what it makes.

        Raises: ConnectFailed when it was not sent; ConnectionLost when the replica died with it.
        """
        if record is not None and record.origin and record.serves != self.serves:
            record.restart()
        if path == _RESPONSES:
            body = with_fields(body, {FIELD: FLEX})
        self.in_flight += 1
        try:
            response = await self._send(path, body, adapter, record)
        finally:
            self.in_flight -= 1
        self._queue_depth.on_response(self.load())
        return response

    async def _send(
        self, path: str, body: bytes, adapter: str | None, record: StreamRecord | None
    ) -> Response:
        """Raises: as `send`."""
        rows = await self._rows()
        try:
            response = await rows.send(path, body, adapter or "", record)
        except ConnectionRefusedError as error:
            raise ConnectFailed(str(error)) from error
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        return Response(response.status, response.body, response.headers)

    async def _rows(self) -> RowSender:
        """The connection for rows, opened by the first of them. Raises: ConnectFailed."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.create_task(self._open_rows())
        return await asyncio.shield(self._opening)

    async def _open_rows(self) -> RowSender:
        carrier = await _reached(self._pool.connect())
        rows = RowSender(carrier, self._on_rows_lost)
        try:
            await _reached(rows.open(self._secret, self._sender))
        except BaseException:
            rows.close()
            raise
        return rows

    def _on_rows_lost(self) -> None:
        self._opening = None

    async def close(self) -> None:
        """Closes the link and the idle connections."""
        self.lost = True
        self._link.cancel()
        await asyncio.wait({self._link})
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            (rows,) = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(rows, RowSender):
                rows.close()
        self._pool.close()

    async def _follow_link(self) -> None:
        """Returns when the replica is lost. One that is silent gets no rows until it is heard again."""
        try:
            while True:
                connection = await _reached(self._pool.connect())
                try:
                    await link.listen(connection, self._secret, self._sender, self._on_message)
                except TimeoutError:
                    log.info("Replica %s is silent.", self.id)
                    self._report = None
                    self._pool.fail("it is silent")
                    self._changed()
                finally:
                    connection.abort()
        except (ConnectFailed, OSError, msgspec.DecodeError) as error:
            log.info("Replica %s is lost: %s", self.id, error)
        finally:
            self.lost = True
            self._changed()

    def _on_message(self, message: link.Message) -> None:
        was_ready = self.ready
        if isinstance(message, link.LoadReport):
            self._report, self._reported = message, self.in_flight
            waiting = message.waiting + message.batch_waiting
            self._load = Load(message.running, waiting, message.waiting_tokens, message.kv_usage)
        elif isinstance(message, link.AdapterReport):
            self.takes_adapters = True
        else:
            self.hello = message
        if self.ready != was_ready:
            self._changed()


async def _reached(connecting: Awaitable[_Reached]) -> _Reached:
    """Raises: ConnectFailed."""
    try:
        return await connecting
    except (OSError, TimeoutError) as error:
        raise ConnectFailed(str(error) or "no connection in time") from error
