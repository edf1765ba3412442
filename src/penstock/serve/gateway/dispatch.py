"""Dispatches one request to a replica, and to another one when that fails.

Stands between the gateway, which has resolved the model, and the relay. Holds the admission queues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import msgspec

from penstock.config.derive import names
from penstock.errors import EngineDead, Overloaded, Unavailable
from penstock.metrics import GatewayFigures, GatewayMetrics
from penstock.serve.fleet.links import ReplicaLinks
from penstock.serve.fleet.replica import Lease, Replica
from penstock.serve.fleet.table import Table
from penstock.serve.gateway import relay, stored_responses
from penstock.serve.gateway.admission import AdmissionQueue, removed
from penstock.serve.gateway.body import Fields, NoRoom
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.gateway.relay import OpenStream, OpenStreams
from penstock.serve.gateway.request import UpstreamRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.routing_features import FeatureReader
from penstock.serve.gateway.telemetry import timing
from penstock.serve.http.connection_limits import Connections
from penstock.serve.routing import policy
from penstock.serve.routing.policy import Policy
from penstock.serve.routing.split import Splits
from penstock.tiers import FLEX
from penstock.transport import headers, link
from penstock.transport.continuation import CONTINUE, RecordBudget, StreamRecord

log = logging.getLogger(__name__)

_WAKE_AGAIN_S = 1.0

_LEAVING = ("draining", "gone")
"""States of a replica that is being stopped, which ends its requests without being their fault."""


Choose = Callable[[Fields, str], AbstractAsyncContextManager[str]]
"""Picks a replica for a request and its session, not by the gateway's own table, for as long as the request
lasts: its id, or "" to leave it to the gateway."""


@dataclass(frozen=True, slots=True)
class _Served:
    """A model with what its requests need. fallbacks: ids. choose: of a router that picks elsewhere."""

    model: ServedModel
    policy: Policy
    reader: FeatureReader
    queue: AdmissionQueue
    fallbacks: Sequence[str]
    choose: Choose | None


class Dispatch:
    """Sends requests to replicas of their model."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        table: Table,
        links: ReplicaLinks,
        gateway_id: str,
        wait_for_replica_s: float,
        wake: Callable[[str], Awaitable[None]] | None = None,
        routers: Mapping[str, Choose] = MappingProxyType({}),
    ) -> None:
        """wake: as in `Gateway`. routers: of models whose replicas a router elsewhere picks.

        Raises: ConfigError for a routing policy that cannot be loaded."""
        self._table = table
        self._links = links
        self._gateway_id = gateway_id
        self.metrics = GatewayMetrics()
        self.splits = Splits(self.metrics, table.ready)
        self._served: dict[str, _Served] = {}
        self._loads: Counter[str] = Counter()
        self._closed: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        self._wake = wake
        self._waking: dict[str, asyncio.Task[None]] = {}
        self._streams = OpenStreams()
        self._records = RecordBudget()
        self.follow(models, wait_for_replica_s, routers)

    def follow(
        self, models: Sequence[ServedModel], wait_for_replica_s: float, routers: Mapping[str, Choose]
    ) -> None:
        """Serves these models from now on. Requests keep their places, policies what they have learned;
        those that wait for a model that is served no longer are refused.

        Raises: ConfigError as `__init__`; then nothing has changed.
        """
        versions = {model.id: model.version for model in models if model.version is not None}
        named = {model.id: (model.aliases, model.fallbacks) for model in models}
        fallbacks = names.fallbacks(named, {one: version.of for one, version in versions.items()})
        policies = {model.id: self.policy(model) for model in models}
        self.splits.follow(versions)
        before, self._served = self._served, {}
        for model in models:
            picking, known = policies[model.id], before.get(model.id)
            queue = known.queue if known is not None else self._queue(model, picking)
            queue.follow(model, picking, wait_for_replica_s)
            reader = FeatureReader(model, picking, self._table)
            choose = routers.get(model.id)
            self._served[model.id] = _Served(model, picking, reader, queue, fallbacks[model.id], choose)
        for model_id in before.keys() - self._served.keys():
            before[model_id].queue.remove()
            self.metrics.forget(model_id)
            self._used.pop(model_id, None)
            if (waking := self._waking.pop(model_id, None)) is not None:
                waking.cancel()

    def policy(self, model: ServedModel) -> Policy:
        """The one that it has, or another one where that has changed. Raises: ConfigError."""
        known = self._served.get(model.id)
        wanted = model.routing_policy, model.policy_options
        if known is not None and wanted == (known.model.routing_policy, known.model.policy_options):
            return known.policy
        return policy(*wanted)

    def _queue(self, model: ServedModel, picking: Policy) -> AdmissionQueue:
        metrics, wake = self.metrics.model(model.id), partial(self._begin_to_wake, model.id)
        return AdmissionQueue(model, self._table, picking, metrics, 0.0, wake)

    def _find(self, model_id: str) -> _Served:
        """Raises: Unavailable for a model that has been removed since the request came."""
        if (served := self._served.get(model_id)) is None:
            raise removed(model_id)
        return served

    def offer(self, replica: Replica) -> None:
        """Called for each report of a replica, and when it leaves: it may have room for a queued request, or
        for streams of one that drains. Serve may say so before the replica does.
        """
        if (served := self._served.get(replica.model_id)) is not None:
            served.queue.offer(replica)
            for other in self._streams.replicas(replica.model_id):
                if other.state in _LEAVING:
                    self._streams.move(other, served.queue)

    def served_elsewhere(self, model_id: str, tier: str, tenant: str, price: float) -> None:
        """Another gateway has served so many priced tokens."""
        if (served := self._served.get(model_id)) is not None:
            served.queue.served_elsewhere(tier, tenant, price)

    def drain(self) -> None:
        """No request waits for a replica any more."""
        for served in self._served.values():
            served.queue.drain()

    async def answer(self, model_id: str, request: UpstreamRequest, reply: ClientResponse) -> None:
        """Relays the answer of a replica of `model_id`, of another version, or of one of its fallbacks.

        Raises: Overloaded, Unavailable, EngineFailed; EngineDead when the response broke off after it had
        begun, or the request seems to kill engines.
        """
        self.metrics.model(model_id).asked(request.tier)
        fallbacks, versions = (), ()
        if not request.adapter and not request.keeper:
            versions = self.splits.others(model_id) if request.is_split else ()
            fallbacks = (*versions, *self._find(model_id).fallbacks)
        current = model_id
        for i, other in enumerate(fallbacks):
            served = self._served.get(current)
            may_start = served is not None and served.model.start_s is not None
            patient = may_start or not any(map(self._table.ready, fallbacks[i:]))
            reply.has_fallback = True
            try:
                return await self._answer(current, request, reply, patient)
            except (Overloaded, Unavailable, relay.EngineFailed) as error:
                if isinstance(error, EngineDead | NoRoom) or reply.started:
                    raise
                log.info("request %s for %s goes to %s: %s", request.id, model_id, other, error)
            self.metrics.fallbacks.labels(model_id, other).inc()
            reply.answered_by = other
            if other not in versions:
                request.body.name_model(other)
            current = other
        reply.has_fallback = False
        return await self._answer(current, request, reply)

    async def shadow(self, model_id: str, request: UpstreamRequest, reply: ClientResponse) -> None:
        """As `answer`, by no other model, and without waiting for a replica."""
        await self._answer(model_id, request, reply, patient=False)

    async def _answer(
        self, model_id: str, request: UpstreamRequest, reply: ClientResponse, patient: bool = True
    ) -> None:
        served = self._find(model_id)
        self._used[model_id] = time.monotonic()
        reply.timing.begin(timing.PICK)
        fields, queue, choose = request.body.fields, served.queue, served.choose
        asked = served.reader.read(request.adapter, fields, request.headers, len(request.body.content))
        stream = OpenStream(request, model_id, asked, reply, StreamRecord(self._records), self.metrics)
        if choose is None or request.keeper or not (patient or self._table.ready(model_id)):
            return await self._ask_until_answered(queue, stream, patient)
        async with choose(fields, asked.session) as replica_id:
            stream.asked = msgspec.structs.replace(asked, chosen=replica_id)
            return await self._ask_until_answered(queue, stream, patient)

    async def _ask_until_answered(self, queue: AdmissionQueue, stream: OpenStream, patient: bool) -> None:
        """Asks one replica after the other. patient: whether it waits for one while there is none."""
        request, reply, model_id = stream.request, stream.reply, stream.model_id
        try:
            while True:
                lease = stream.lease or await self._lease(queue, stream, patient)
                stream.lease, replica = None, lease.replica
                reply.timing.begin(timing.GATEWAY)
                self._streams.add(replica, stream)
                try:
                    return await self._ask(replica, stream)
                except relay.ReplicaFailed as failed:
                    died = failed.worked and replica.state not in _LEAVING
                    is_late = reply.timing.paused_s > queue.wait_s
                    stream.fail(replica, failed, died=died, refused=failed.refused)
                    if is_late and all(map(stream.tried.has_failed, self._table.ready(model_id))):
                        raise stream.end("no replica", failed) from failed
                    if request.keeper is not None and replica.state == "gone":
                        raise stored_responses.lost() from failed
                    log.info(
                        "replica %s of %s failed a request that goes on: %s", replica.id, model_id, failed
                    )
                finally:
                    self._streams.discard(replica, stream)
                    queue.release(lease)
                if not reply.started:
                    reply.timing.failed()
                    self.metrics.failovers.labels(model_id).inc()
        finally:
            stream.record.close()
            if stream.lease is not None:
                queue.release(stream.lease)

    async def _lease(self, queue: AdmissionQueue, stream: OpenStream, patient: bool) -> Lease:
        request, tried, reply = stream.request, stream.tried, stream.reply
        if stream.hold_s:
            await asyncio.sleep(stream.hold_s)
            stream.hold_s = 0.0
        if reply.started:  # no fallback can go on with it
            is_replaced = any(one.serves != tried.serves for one in self._table.ready(stream.model_id))
            patient = (patient or reply.has_fallback) and not is_replaced
        keeper, tier, charge = request.keeper, request.tier, request.charge
        waiting = queue.acquire(stream.asked, tried, reply.timing, keeper, patient, tier, charge)
        try:
            return await request.body.while_waiting(stream.model_id, waiting)
        except (Overloaded, Unavailable) as error:
            if not reply.started:
                raise
            raise stream.end("no replica", error) from error

    async def _ask(self, replica: Replica, stream: OpenStream) -> None:
        request, pool = stream.request, self._links.pool(replica)
        if pool is None:
            raise relay.ReplicaFailed("has left", worked=False)
        secret = replica.address.secret
        own = headers.own(secret, self._gateway_id, request.id, request.adapter, request.tier)
        if request.tenant:
            own.append((link.TENANT, request.tenant.encode()))
        if (charge := request.charge) is not None:
            own.append((link.SHARE, b"%.2f %b" % (charge.price / charge.weight, charge.tenant.encode())))
        record = stream.record
        if stream.reply.started or (record.is_handed_over and record.serves == replica.serves):
            own.append((CONTINUE, record.to_header()))
        else:
            record.restart()
        stream.given = bytes(record.data)
        size = len(request.body.content) + len(stream.given)
        head = headers.to_replica(request.method, request.target, request.headers, own, size)
        await relay.ask(pool, head, stream)

    def idle_s(self) -> dict[str, float]:
        """Seconds since the last request for each model that has had one."""
        now = time.monotonic()
        return {model_id: now - used for model_id, used in self._used.items()}

    def _begin_to_wake(self, model_id: str) -> None:
        """One task for each model, while requests wait for it."""
        if self._wake is not None and model_id not in self._waking:
            self._waking[model_id] = asyncio.create_task(self._keep_waking(self._wake, model_id))

    async def _keep_waking(self, wake: Callable[[str], Awaitable[None]], model_id: str) -> None:
        try:
            while (
                (served := self._served.get(model_id)) is not None
                and len(served.queue)
                and not self._table.candidates(model_id).ready
            ):
                try:
                    await wake(model_id)
                except Exception as error:  # of Serve, Ray or control
                    log.warning("Waking %s failed: %s", model_id, error)
                await asyncio.sleep(_WAKE_AGAIN_S)
        finally:
            if self._waking.get(model_id) is asyncio.current_task():
                del self._waking[model_id]

    def close(self) -> None:
        """Wakes no model any more."""
        for task in list(self._waking.values()):
            task.cancel()

    def figures(self, connections: Connections) -> GatewayFigures:
        """What this gateway has counted until now, and has open."""
        metrics, table = self.metrics, self._table
        metrics.connections.labels("waiting").set(connections.waiting)
        metrics.connections.labels("active").set(connections.open - connections.waiting)
        for reason, count in connections.counts.items():
            metrics.closed.labels(reason).inc(count - self._closed[reason])
            self._closed[reason] = count
        for model_id, share in self.splits.shares().items():
            metrics.share.labels(model_id).set(share)
        for model_id, served in self._served.items():
            ready, queue = table.ready(model_id), served.queue
            limited = [one for one in ready if one.batch_limit is not None]  # others report nothing of batch
            for gauge, value in (
                (metrics.open, table.leases(model_id)),
                (metrics.queued, len(queue)),
                (metrics.batch_queued, queue.waiting(FLEX)),
                (metrics.batch_limit, sum(one.batch_limit or 0 for one in limited)),
                (metrics.batch, sum(one.batch for one in limited)),
                (metrics.batch_requeued, sum(one.batch_requeued for one in limited)),
                (metrics.ready, len(ready)),
                (metrics.wanted, table.wanted.get(model_id, len(table.members(model_id)))),
            ):
                gauge.labels(model_id).set(value)
            metrics.failovers.labels(model_id)  # shown as 0 before the first
            metrics.streams_continued.labels(model_id)
            for other in served.fallbacks:
                metrics.fallbacks.labels(model_id, other)
            if served.model.adapter_slots:
                holders = table.candidates(model_id).holders
                metrics.adapters.labels(model_id).set(holders.loaded_count)
                metrics.adapter_loads.labels(model_id).inc(holders.loads - self._loads[model_id])
                self._loads[model_id] = holders.loads
        return metrics.figures()
