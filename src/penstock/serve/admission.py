"""One model's line: a request goes to a replica at once, waits its turn, or is told that the line is full.

It stands between the gateway and the table: the table says who could take a request, the line says who may.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from penstock.errors import Overloaded, Unavailable
from penstock.serve.cards import ModelCard
from penstock.serve.table import Replica, Table, Tried
from penstock.serve.timing import PICK, QUEUE, Timing

_RETRY_AFTER_S = 1


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request in the line."""

    replica: asyncio.Future[Replica]
    tried: Tried
    timer: asyncio.TimerHandle | None = None


class Line:
    """First come, first served; requests that lost their replica go before all others."""

    def __init__(self, card: ModelCard, table: Table, wait_for_replica_s: float) -> None:
        """wait_for_replica_s: how long a request waits while no replica of the model is ready."""
        self._card = card
        self._table = table
        self._wait_s = wait_for_replica_s
        self._returned: dict[_Waiter, None] = {}
        self._queued: dict[_Waiter, None] = {}

    def __len__(self) -> int:
        return len(self._returned) + len(self._queued)

    async def take(self, tried: Tried, times: Timing) -> Replica:
        """A replica with room, counted as used until `give_back`.

        tried: replicas that failed this request; with some, it was admitted before and is not refused.
        Raises: Overloaded when the line is full, Unavailable when no replica became ready in time.
        """
        times.begin(PICK)
        if not self._queued or tried:
            replica = self._table.pick(self._card.id, self._card.max_ongoing_requests, tried)
            if replica is not None:
                replica.in_flight += 1
                return replica
        if not tried:
            self._refuse_when_full()
        times.begin(QUEUE)
        return await self._wait(tried)

    def give_back(self, replica: Replica) -> None:
        """The request has ended there; the next one in the line may go."""
        replica.in_flight -= 1
        self.offer(replica)

    def offer(self, replica: Replica) -> None:
        """Sends on whoever waits and fits: `replica` has become ready, or may have room."""
        if not self._returned and not self._queued:
            return
        for waiter in list(self._returned):
            self._grant(waiter, replica)
        while self._queued and self._grant(next(iter(self._queued)), replica):
            pass

    def _refuse_when_full(self) -> None:
        most = self._card.max_queued_requests
        if most < 0 or len(self._queued) < most:
            return
        if most == 0 and not self._table.ready(self._card.id):
            raise self._unavailable()
        raise Overloaded(
            f"Model '{self._card.id}' is at its limit and {len(self._queued)} requests are waiting "
            f"(max_queued_requests is {most}). Try again later.",
            retry_after_s=_RETRY_AFTER_S,
        )

    async def _wait(self, tried: Tried) -> Replica:
        waiter = _Waiter(asyncio.get_running_loop().create_future(), tried)
        line = self._returned if tried else self._queued
        line[waiter] = None
        self._set_timer(waiter)
        try:
            return await waiter.replica
        except asyncio.CancelledError:
            granted = waiter.replica
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.give_back(granted.result())  # granted and abandoned in the same moment
            raise
        finally:
            line.pop(waiter, None)
            if waiter.timer is not None:
                waiter.timer.cancel()

    def _grant(self, waiter: _Waiter, replica: Replica) -> bool:
        room = replica.state == "ready" and replica.ongoing < self._card.max_ongoing_requests
        if not room or replica in waiter.tried:
            return False
        self._returned.pop(waiter, None)
        self._queued.pop(waiter, None)
        if waiter.replica.done():
            return True  # cancelled, or out of time, in this very moment
        replica.in_flight += 1
        waiter.replica.set_result(replica)
        return True

    def _set_timer(self, waiter: _Waiter) -> None:
        waiter.timer = asyncio.get_running_loop().call_later(self._wait_s, self._give_up, waiter)

    def _give_up(self, waiter: _Waiter) -> None:
        """Ends a wait for a replica. A wait for room among ready ones goes on to the deadline."""
        if waiter.replica.done():
            return
        if any(replica not in waiter.tried for replica in self._table.ready(self._card.id)):
            self._set_timer(waiter)
        else:
            waiter.replica.set_exception(self._unavailable())

    def _unavailable(self) -> Unavailable:
        members = len(self._table.members(self._card.id))
        state = f"{members} starting or restarting" if members else "none running"
        return Unavailable(
            f"No replica of model '{self._card.id}' is ready ({state}). Try again later.",
            retry_after_s=_RETRY_AFTER_S,
        )
