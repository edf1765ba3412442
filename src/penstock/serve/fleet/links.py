"""Keeps a link to every member of the table, and the connections to it.

It stands between the table, which it feeds, and the replicas. It decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table
from penstock.transport import headers, link
from penstock.transport.pool import Pool

log = logging.getLogger(__name__)

_RETRY_FIRST_S, _RETRY_MOST_S = 0.05, 1.0
_ASK_AGAIN_S = 10.0  # for the network, while a replica on another node goes on refusing
_MOST_BYTES = 8 << 20  # of an answer that is read whole
_SHOWN_BYTES = 500
_ASK_LIMIT_S = 30.0  # for their answers
_ASK_GAP_S = 1.0  # between two questions to the replicas of one model


class Fleet:
    """Links and pools of all members. Lives on the table's event loop."""

    def __init__(
        self, table: Table, gateway_id: str, unreachable: Callable[[str], Awaitable[None]] | None
    ) -> None:
        """unreachable: asks the replicas of a model to listen on the network."""
        self._table = table
        self._gateway_id = gateway_id
        self._unreachable = unreachable
        self._asked: dict[str, float] = {}
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._pools: dict[Replica, Pool] = {}
        self._carrying: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[None]] = set()

    def join(self, replica: Replica) -> None:
        """Begins to follow a member."""
        pool = self._pools[replica] = Pool(replica.address, self._table.node_id)
        self._tasks[replica] = asyncio.create_task(self._follow(replica, pool))
        carrying = asyncio.create_task(self._carry(replica, pool))
        self._carrying.add(carrying)
        carrying.add_done_callback(self._carrying.discard)

    def leave(self, replica: Replica) -> None:
        """Lets a member go; what it is answering goes on."""
        self._tasks.pop(replica).cancel()
        self._pools.pop(replica).close()

    def pool(self, replica: Replica) -> Pool | None:
        """Its connections; None when it has left."""
        return self._pools.get(replica)

    async def get(self, replica: Replica, path: str, limit_s: float) -> bytes:
        """What the replica itself answers there.

        Raises: OSError, also when it has left or answers anything but 200; TimeoutError.
        """
        pool = self._pools.get(replica)
        if pool is None:
            raise ConnectionAbortedError("it has left")
        own = headers.own(replica.address.secret, self._gateway_id, headers.request_id(None))
        head = headers.to_replica("GET", path.encode(), [], own, 0)
        async with asyncio.timeout(limit_s):
            connection = await pool.acquire()
            try:
                connection.request(head)
                status, body = (await connection.head()).status, b""
                while piece := await connection.read():
                    body += piece
                    if len(body) > _MOST_BYTES:
                        raise ConnectionAbortedError(f"its answer is larger than {_MOST_BYTES} bytes")
            finally:
                pool.release(connection)
        if status != 200:
            raise ConnectionAbortedError(
                f"it answered {status}: {body[:_SHOWN_BYTES].decode(errors='replace')}"
            )
        return body

    async def close(self) -> None:
        """Ends all links, trunks and idle connections."""
        tasks = [*self._tasks.values(), *self._carrying, *self._asking]
        for replica in list(self._tasks):
            self.leave(replica)
        for task in (*self._carrying, *self._asking):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, replica: Replica, pool: Pool) -> None:
        """Listens to its link; when the link is lost, tries for a new one for as long as it is a member."""
        retry_s, ask_due = _RETRY_FIRST_S, 0.0
        while True:
            hellos, now = replica.hellos, asyncio.get_running_loop().time()
            try:
                await self._listen(replica, pool)
            except ConnectionRefusedError:
                if now >= ask_due and not replica.address.is_local(self._table.node_id):
                    ask_due = now + _ASK_AGAIN_S if self._ask_for_network(replica.model_id) else now
            except (OSError, TimeoutError, msgspec.DecodeError) as error:
                log.debug("link to replica %s of %s: %s", replica.id, replica.model_id, error)
            retry_s = _RETRY_FIRST_S if replica.hellos > hellos else min(2 * retry_s, _RETRY_MOST_S)
            await asyncio.sleep(retry_s)

    async def _listen(self, replica: Replica, pool: Pool) -> None:
        def received(message: link.Message) -> None:
            if isinstance(message, link.Report):
                self._table.report(replica, message)
            elif isinstance(message, link.LoadedAdapters):
                self._table.adapters(replica, message)
            else:
                self._table.hello(replica, message)

        connection = await pool.connect()
        try:
            await link.listen(connection, replica.address.secret, self._gateway_id, received)
        finally:
            self._table.lost(replica)
            connection.abort()

    async def _carry(self, replica: Replica, pool: Pool) -> None:
        """Keeps its trunk, once it has left only for the streams that are open."""
        while self._pools.get(replica) is pool:
            try:
                await self._deal(replica, pool)
            except (OSError, TimeoutError) as error:
                log.debug("trunk of replica %s of %s: %s", replica.id, replica.model_id, error)
            await asyncio.sleep(_RETRY_MOST_S)

    async def _deal(self, replica: Replica, pool: Pool) -> None:
        carrier = await pool.connect()
        try:
            await pool.trunk.follow(carrier, replica.address.secret, self._gateway_id)
        finally:
            carrier.abort()

    def _ask_for_network(self, model_id: str) -> bool:
        """Whether it was asked for now: one question serves all replicas of a model that refuse together.

        Nobody waits for its answer: one replica that hangs would hold up the others.
        """
        now = asyncio.get_running_loop().time()
        if self._unreachable is None or now - self._asked.get(model_id, -_ASK_GAP_S) < _ASK_GAP_S:
            return False
        self._asked[model_id] = now
        asking = asyncio.create_task(self._ask(self._unreachable(model_id), model_id))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        return True

    async def _ask(self, question: Awaitable[None], model_id: str) -> None:
        try:
            async with asyncio.timeout(_ASK_LIMIT_S):
                await question
        except TimeoutError:
            log.warning("not all replicas of %s listen on the network after %g s", model_id, _ASK_LIMIT_S)
        except Exception:  # whatever the caller's question meets, the next refusal asks again
            log.exception("asking the replicas of %s to listen on the network failed", model_id)
