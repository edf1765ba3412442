"""Keeps a link, a multiplexed connection and a pool of connections to every member of the table.

It stands between the table, which it updates, and the replicas. It decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table
from penstock.transport import link
from penstock.transport.pool import Pool

log = logging.getLogger(__name__)

_RETRY_FIRST_S, _RETRY_MOST_S = 0.05, 1.0
_MULTIPLEXED_S = 1.0  # for the multiplexed connection, before a replica's first report counts
_ASK_AGAIN_S = 10.0  # while a replica on another node refuses connections
_MOST_BYTES = 8 << 20  # of a response that is read whole
_SHOWN_BYTES = 500
_ANNOUNCE_S = 1.0
_ASK_LIMIT_S = 30.0  # for all replicas to answer
_ASK_GAP_S = 1.0  # between two calls to the replicas of one model


class ReplicaLinks:
    """Runs on the table's event loop."""

    def __init__(
        self,
        table: Table,
        gateway_id: str,
        unreachable: Callable[[str], Awaitable[None]] | None,
        aliases: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """unreachable: has the replicas of a model listen on the network. aliases: by model."""
        self._table = table
        self._gateway_id = gateway_id
        self._unreachable = unreachable
        self._aliases = aliases or {}
        self._called_at: dict[str, float] = {}
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._pools: dict[Replica, Pool] = {}
        self._background: set[asyncio.Task[None]] = set()

    def join(self, replica: Replica) -> None:
        """Begins to follow a member."""
        pool = self._pools[replica] = Pool(replica.address, self._table.node_id)
        self._tasks[replica] = asyncio.create_task(self._follow(replica, pool))
        self._start(self._keep_multiplexed(replica, pool))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def leave(self, replica: Replica) -> None:
        """Ends the link to a member; open requests continue."""
        self._tasks.pop(replica).cancel()
        self._pools.pop(replica).close()

    def pool(self, replica: Replica) -> Pool | None:
        """Its connections; None once it has left."""
        return self._pools.get(replica)

    async def announce(self, aliases: Mapping[str, Sequence[str]]) -> None:
        """Has replicas take these names for their models, beside those that they know: returns when they do.

        A replica that does not answer in time is told with its next link.
        """
        before, self._aliases = self._aliases, aliases
        try:
            await asyncio.gather(
                *(
                    self._announce(replica, names)
                    for replica in self._table
                    if set(names := aliases.get(replica.model_id, ())) - set(before.get(replica.model_id, ()))
                )
            )
        except BaseException:  # the next call has to tell those that have not answered
            self._aliases = before
            raise

    async def _announce(self, replica: Replica, names: Sequence[str]) -> None:
        try:
            await self.get(replica, link.ALIASES_PATH, _ANNOUNCE_S, link.aliases_field(names))
        except (OSError, TimeoutError) as error:
            log.warning("%s was not told the aliases %s: %s", replica.id, ", ".join(names), error)

    async def get(
        self, replica: Replica, path: str, limit_s: float, field: tuple[bytes, bytes] | None = None
    ) -> bytes:
        """The body of the replica's response to GET `path`. field: one more of the request's header.

        Raises: OSError, also when it has left or its status is not 200; TimeoutError.
        """
        pool = self._pools.get(replica)
        if pool is None:
            raise ConnectionAbortedError("it has left")
        head = link.request_head("GET", path, replica.address.secret, self._gateway_id, field)
        async with asyncio.timeout(limit_s):
            connection = await pool.acquire()
            try:
                connection.request(head)
                status, body = await connection.whole(_MOST_BYTES)
            finally:
                pool.release(connection)
        if status != 200:
            raise ConnectionAbortedError(
                f"it answered {status}: {body[:_SHOWN_BYTES].decode(errors='replace')}"
            )
        return body

    async def close(self) -> None:
        """Ends all links, multiplexed and idle connections."""
        tasks = [*self._tasks.values(), *self._background]
        for replica in list(self._tasks):
            self.leave(replica)
        for task in self._background:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _follow(self, replica: Replica, pool: Pool) -> None:
        """Receives reports; reconnects when the link is lost, as long as the replica is a member."""
        retry_s, ask_due = _RETRY_FIRST_S, 0.0
        while True:
            hellos, now = replica.hellos, asyncio.get_running_loop().time()
            try:
                await self._listen(replica, pool)
            except ConnectionRefusedError:
                if now >= ask_due and not replica.address.is_local(self._table.node_id):
                    ask_due = now + _ASK_AGAIN_S if self._ask_for_network(replica.model_id) else now
            except (OSError, msgspec.DecodeError) as error:
                log.debug("link to replica %s of %s: %s", replica.id, replica.model_id, error)
            except Exception:
                log.exception("link to replica %s of %s", replica.id, replica.model_id)
                await asyncio.sleep(_RETRY_MOST_S)
            retry_s = _RETRY_FIRST_S if replica.hellos > hellos else min(2 * retry_s, _RETRY_MOST_S)
            await asyncio.sleep(retry_s)

    async def _listen(self, replica: Replica, pool: Pool) -> None:
        def received(message: link.Message) -> None:
            if isinstance(message, link.LoadReport):
                self._table.report(replica, message)
            elif isinstance(message, link.AdapterReport):
                self._table.adapters(replica, message)
            else:
                self._table.hello(replica, message)

        connection = await pool.connect()
        try:
            with suppress(TimeoutError):  # a stream that begins before cannot go on elsewhere
                async with asyncio.timeout(_MULTIPLEXED_S):
                    await pool.multiplexer.settled.wait()
            secret, aliases = replica.address.secret, self._aliases.get(replica.model_id, ())
            await link.listen(connection, secret, self._gateway_id, received, aliases)
        except TimeoutError:
            log.info("replica %s of %s is silent: its requests move on", replica.id, replica.model_id)
            pool.fail("it is silent")
        finally:
            connection.abort()
            self._table.lost(replica)

    async def _keep_multiplexed(self, replica: Replica, pool: Pool) -> None:
        """Keeps the multiplexed connection; after the replica has left, only until its open streams end."""
        retry_s = _RETRY_FIRST_S
        while self._pools.get(replica) is pool:
            carrier = None
            try:
                carrier = await pool.connect()
                await pool.multiplexer.follow(carrier, replica.address.secret, self._gateway_id)
            except OSError as error:
                log.debug("multiplexer of replica %s of %s: %s", replica.id, replica.model_id, error)
            except Exception:
                log.exception("multiplexer of replica %s of %s", replica.id, replica.model_id)
            finally:
                if carrier is not None:
                    carrier.abort()
                    retry_s = _RETRY_MOST_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _RETRY_MOST_S)

    def _ask_for_network(self, model_id: str) -> bool:
        """Whether a call was made: one call serves all replicas of a model that refuse at the same time.

        Nothing waits for it: one hung replica would delay the links to the others.
        """
        now = asyncio.get_running_loop().time()
        if self._unreachable is None or now - self._called_at.get(model_id, -_ASK_GAP_S) < _ASK_GAP_S:
            return False
        self._called_at[model_id] = now
        self._start(self._ask(self._unreachable(model_id), model_id))
        return True

    async def _ask(self, call: Awaitable[None], model_id: str) -> None:
        try:
            async with asyncio.timeout(_ASK_LIMIT_S):
                await call
        except TimeoutError:
            log.warning("not all replicas of %s listen on the network after %g s", model_id, _ASK_LIMIT_S)
        except Exception:  # the next refusal asks again
            log.exception("asking the replicas of %s to listen on the network failed", model_id)
