"""Admission queue of one model: dispatch now, wait in the order of classes and arrival, or reject with 429.

Stands between the gateway and the table: the table knows which replicas have room, the queue decides whose
turn it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from penstock.errors import Overloaded, Unavailable
from penstock.metrics import ModelMetrics
from penstock.serve.fleet.replica import Lease, Replica, Tried
from penstock.serve.fleet.table import Table
from penstock.serve.gateway import stored_responses
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.gateway.telemetry.timing import PICK, QUEUE, Timing
from penstock.serve.routing.policy import Learns, Pick, Policy, RoutingRequest
from penstock.serve.tenancy.fairness import Charge, FairLine
from penstock.tiers import DEFAULT, FLEX, PRIORITY, Tier

_RETRY_AFTER_S = 1
_DRAIN_WAIT_S = 1.0  # for a replica, while the gateway stops
_LOOK_AGAIN_S = 1.0  # at the replicas of a request that waits for room, at least
_BATCH_OPTION = "batch.max_queued_requests"

_ORDER = (PRIORITY, DEFAULT, FLEX)  # in which the classes go


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request that wants a slot. lease, timer: once it waits."""

    asked: RoutingRequest
    tried: Tried
    tier: Tier
    only: Replica | None = None
    charge: Charge | None = None
    lease: asyncio.Future[Lease] = field(init=False)
    timer: asyncio.TimerHandle | None = None

    def takes(self, replica: Replica) -> bool:
        return replica is self.only if self.only else replica not in self.tried


class AdmissionQueue:
    """By class: priority, default, then flex, which is batch and has a limit of its own. In a class tenants
    take turns, and each one's requests go in the order in which they came. Requests that lost their replica
    go before all others.
    """

    def __init__(
        self,
        model: ServedModel,
        table: Table,
        policy: Policy,
        metrics: ModelMetrics,
        wait_for_replica_s: float,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """wait_for_replica_s: how long a request waits while no replica of the model is ready.
        wake: called when a request waits and no replica is ready.

        wait_s: as `wait_for_replica_s`, or longer for a model that starts slowly.
        """
        self._table = table
        self._metrics = metrics
        self._wake = wake
        self._removed = False
        self._returned: OrderedDict[_Waiter, None] = OrderedDict()  # finding a dict's first key is slow
        self._by_tier: dict[Tier, FairLine[_Waiter]] = {tier: FairLine() for tier in _ORDER}
        self.follow(model, policy, wait_for_replica_s)

    def follow(self, model: ServedModel, policy: Policy, wait_for_replica_s: float) -> None:
        """Takes over what has changed of the model. Requests that wait keep their places."""
        self._model = model
        self._policy = policy
        self._learns = policy if isinstance(policy, Learns) else None
        self.wait_s = max(wait_for_replica_s, model.start_s or 0.0)
        self._table.limit(model.id, model.max_ongoing_requests, model.adapter_slots)
        for replica in self._table.ready(model.id):
            self.offer(replica)

    def remove(self) -> None:
        """The model is served no longer: ends all waits, and those that would begin later."""
        self._removed = True
        for waiter in self._waiters():
            if not waiter.lease.done():
                waiter.lease.set_exception(self._unavailable())

    def _waiters(self) -> list[_Waiter]:
        return [waiter for queue in (self._returned, *self._by_tier.values()) for waiter in queue]

    def __len__(self) -> int:
        return len(self._returned) + sum(map(len, self._by_tier.values()))

    def waiting(self, tier: Tier) -> int:
        """Requests of this class that wait, without those that lost their replica."""
        return len(self._by_tier[tier])

    def _ahead(self, tier: Tier) -> bool:
        """Whether others go before a new request of this class."""
        return any(self._by_tier[other] for other in _ORDER[: _ORDER.index(tier) + 1])

    async def acquire(
        self,
        asked: RoutingRequest,
        tried: Tried,
        times: Timing,
        only: Replica | None = None,
        patient: bool = True,
        tier: Tier = DEFAULT,
        charge: Charge | None = None,
    ) -> Lease:
        """A slot of a replica, held until `release`.

        tried: replicas that failed this request. Such a request was admitted before and is not rejected, but
        where nothing may wait at all.
        only: the one replica that can answer, since it stores what the request refers to. patient: whether
        to wait when no replica is ready. tier: the request's class. charge: what it costs its tenant.
        Raises: Overloaded when the queue is full, or later when a request of a higher class fills it;
        Unavailable when no replica became ready in time.
        """
        times.begin(PICK)
        waiter = _Waiter(asked, tried, tier, only, charge)
        if (tried or only or not self._ahead(tier)) and (lease := self._at_once(waiter)):
            return lease
        ready = self._table.ready(self._model.id)
        if self._removed or (not patient and all(replica in tried for replica in ready)):
            raise self._unavailable()
        if not tried or not (self.wait_s or self._model.max_queued_requests):
            self._make_room(waiter)
        times.begin(QUEUE)
        return await self._wait(waiter)

    def at_once(self, asked: RoutingRequest, tried: Tried, tier: Tier) -> Lease | None:
        """A slot of a replica that has room now, before all that wait. Arguments: as for `acquire`."""
        return self._at_once(_Waiter(asked, tried, tier))

    def _at_once(self, waiter: _Waiter) -> Lease | None:
        only = waiter.only
        candidates = self._table.candidates(self._model.id, waiter.tried, batch=waiter.tier == FLEX)
        if only is not None:
            pick = Pick(only, "kept") if only in candidates else None
        else:
            pick = self._policy.pick(waiter.asked, candidates, asyncio.get_running_loop().time())
        return self._lease(waiter, pick) if pick is not None else None

    def release(self, lease: Lease) -> None:
        """The request has ended; the next one in the queue may go."""
        self._table.release(lease)
        self.offer(lease.replica)

    def served_elsewhere(self, tier: str, tenant: str, price: float) -> None:
        """Another gateway has served so many priced tokens of a tenant: its turns here come later."""
        if (line := self._by_tier.get(cast("Tier", tier))) is not None:
            line.add(tenant, price)

    def offer(self, replica: Replica) -> None:
        """Dispatches queued requests to `replica`, which has become ready or may have room.

        The one whose turn it is goes, wherever its prefix is cached: affinity is a preference, no reason to
        wait.
        """
        if not len(self):
            return
        for waiter in list(self._returned):
            if waiter.only is replica and replica.state == "gone" and not waiter.lease.done():
                waiter.lease.set_exception(stored_responses.lost())
            self._grant(waiter, replica)
        for queue in self._by_tier.values():
            while queue and self._grant(queue.first(), replica):
                pass
            if queue:
                break
        if len(self) and not self._table.candidates(self._model.id).ready:
            self._wake()  # it fell asleep, or was lost, while they waited

    def _lease(self, waiter: _Waiter, pick: Pick) -> Lease:
        asked = waiter.asked
        if waiter.charge is not None:
            self._by_tier[waiter.tier].take(waiter.charge)
        self._metrics.picked(pick.why)
        if self._learns is not None:
            self._learns.sent(asked, pick.replica, asyncio.get_running_loop().time())
        tokens = max(0, asked.tokens - pick.saved_tokens)
        return self._table.acquire(pick.replica, tokens, asked.adapter, waiter.tier == FLEX)

    def _make_room(self, waiter: _Waiter) -> None:
        """Refuses this request when the queue is full, or another one in its place: the youngest of the
        tenant with most that wait in a lower class, or in this one, where that has more than its own.

        One that waits for `only` takes no place from others.
        """
        tier = waiter.tier
        classes = (FLEX,) if tier == FLEX else (PRIORITY, DEFAULT)  # those that share a limit
        most, option = self._model.max_queued_requests, "max_queued_requests"
        if tier == FLEX:
            most, option = self._model.max_queued_batch, _BATCH_OPTION
        waiting = sum(map(self.waiting, classes))
        if most < 0 or waiting < most:
            return
        if most == 0 and not self._table.ready(self._model.id):
            raise self._unavailable()
        refusal = Overloaded(
            f"Model '{self._model.id}' is at its limit and {waiting} requests are waiting "
            f"({option} is {most}). Try again later.",
            retry_after_s=_RETRY_AFTER_S,
        )
        lower = self._by_tier[classes[-1]]
        if waiter.only:
            raise refusal
        if tier != classes[-1] and lower:
            youngest = lower.youngest()
        elif (youngest := self._by_tier[tier].gives_way(waiter.charge)) is None:
            raise refusal
        self._remove(youngest)
        if not youngest.lease.done():
            youngest.lease.set_exception(refusal)

    async def _wait(self, waiter: _Waiter) -> Lease:
        waiter.lease = asyncio.get_running_loop().create_future()
        # One that waits for `only` blocks no other.
        if waiter.tried or waiter.only:
            self._returned[waiter] = None
        else:
            self._by_tier[waiter.tier].put(waiter, waiter.charge)
        self._set_timer(waiter)
        if not self._table.candidates(self._model.id).ready:
            self._wake()
        try:
            return await waiter.lease
        except asyncio.CancelledError:
            granted = waiter.lease
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.release(granted.result())  # granted and abandoned at the same moment
            raise
        finally:
            self._remove(waiter)
            if waiter.timer is not None:
                waiter.timer.cancel()

    def _grant(self, waiter: _Waiter, replica: Replica) -> bool:
        candidates = self._table.candidates(self._model.id, batch=waiter.tier == FLEX)
        if not waiter.takes(replica) or replica not in candidates:
            return False
        if not waiter.lease.done():  # else cancelled or timed out at this very moment
            waiter.lease.set_result(self._lease(waiter, Pick(replica, "queue")))
        self._remove(waiter)
        return True

    def _remove(self, waiter: _Waiter) -> None:
        self._returned.pop(waiter, None)
        self._by_tier[waiter.tier].discard(waiter, waiter.charge)

    def drain(self) -> None:
        """Ends waits for a replica: the gateway stops, and another one takes requests. A wait for room among
        ready replicas goes on.
        """
        self.wait_s = _DRAIN_WAIT_S
        for waiter in self._waiters():
            if waiter.timer is not None:
                waiter.timer.cancel()
            self._give_up(waiter)

    def _set_timer(self, waiter: _Waiter) -> None:
        wait_s = self.wait_s if waiter.timer is None else max(self.wait_s, _LOOK_AGAIN_S)
        waiter.timer = asyncio.get_running_loop().call_later(wait_s, self._give_up, waiter)

    def _give_up(self, waiter: _Waiter) -> None:
        """Ends a wait for a replica. A wait for room among ready ones goes on to the deadline."""
        if waiter.lease.done():
            return
        if any(waiter.takes(replica) for replica in self._table.ready(self._model.id)):
            self._set_timer(waiter)
        else:
            waiter.lease.set_exception(self._unavailable())

    def _unavailable(self) -> Unavailable:
        if self._removed:
            return removed(self._model.id)
        states = Counter(replica.state for replica in self._table.members(self._model.id))
        resting = states["asleep"] + states["paused"]
        said = {
            "asleep": states["asleep"],
            "paused": states["paused"],
            "starting or restarting": states.total() - resting,
        }
        state = ", ".join(f"{count} {what}" for what, count in said.items() if count) or "none running"
        return Unavailable(
            f"No replica of model '{self._model.id}' is ready ({state}). Try again later.",
            retry_after_s=_RETRY_AFTER_S,
        )


def removed(model_id: str) -> Unavailable:
    """For a request that came before its model was removed. One that is sent again may find its successor."""
    return Unavailable(
        f"The model '{model_id}' has just been removed. Send the request again, or see GET /v1/models.",
        retry_after_s=_RETRY_AFTER_S,
    )
