"""The replicas of a Penstock deployment on Ray Serve, reached at their own listeners, as gateways do.

Between the window and the replicas. Serve lists them, regularly and whenever one is lost; their links report
their load. No row passes through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from penstock.data.backends import serve_lookup
from penstock.data.backends.http_client import ConnectFailed, ConnectionLost
from penstock.data.backends.protocol import Response, RowInterrupted
from penstock.data.backends.replica import ReplicaClient
from penstock.data.rows.request import RowRequest, with_fields
from penstock.engine import Progress, no_progress
from penstock.errors import BadRequest, ConfigError, EngineStartFailed, Unavailable
from penstock.openai.errors import form
from penstock.transport import link
from penstock.transport.address import Address
from penstock.transport.continuation import RecordBudget, StreamRecord

log = logging.getLogger(__name__)

_REFRESH_S, _RETRY_S, _GAP_S = 2.0, 0.5, 0.1
_DISCOVERY_S = 10.0  # for all replicas to give their addresses
_CHECK_S = 2.0
_WAIT_S = 30.0  # for a replica to take a row
_GROUPS = 1024
"""Groups whose replicas are remembered: rows of a job come group after group."""

_RETRY_HEADER, _UNTOUCHED, _REFUSED = map(bytes.decode, (link.RETRY, link.UNTOUCHED, link.REFUSED))


class ReplicaSet:
    """The replicas of one deployment, shared with its other clients.

    deployment_name: required where the application serves several models.
    """

    def __init__(self, app_name: str, deployment_name: str | None = None) -> None:
        self._app_name = app_name
        self._deployment_name = deployment_name
        self._sender = f"batch-{secrets.token_hex(8)}"
        self._deployment: serve_lookup.FoundDeployment | None = None
        self._replicas: dict[str, ReplicaClient] = {}
        self._affinity = GroupAffinity()
        self._records = RecordBudget()
        self._change = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None
        self._discovering = asyncio.Lock()
        self._starting: asyncio.Task[None] | None = None

    async def start(self, progress: Progress = no_progress) -> None:
        """Returns when a replica is ready; a deployment scaled to zero starts one.

        Raises: Unavailable; ConfigError for unknown names; EngineStartFailed when Serve reports it.
        """
        async with self._discovering:  # one task for all calls
            if self._deployment is None:
                self._deployment = await asyncio.to_thread(
                    serve_lookup.find_deployment, self._app_name, self._deployment_name
                )
            if self._refreshing is None or self._refreshing.done():
                await self._refresh(self._deployment)
                self._refreshing = asyncio.create_task(self._keep_refreshing(self._deployment))
        if not self._ready():
            progress("waiting for a replica")
            await self._wait_ready()

    async def stop(self) -> None:
        tasks = {task for task in (self._refreshing, self._starting) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._refreshing = self._starting = None
        replicas, self._replicas = list(self._replicas.values()), {}
        await asyncio.gather(*(replica.close() for replica in replicas))

    async def send(self, request: RowRequest) -> Response:
        record = StreamRecord(self._records)
        try:
            if request.made is not None:
                record.take_over(*request.made)
            return await self._send_until_answered(request, record)
        except RowInterrupted as error:
            error.keep(record.made(), request.made)
            raise
        finally:
            record.close()

    async def _send_until_answered(self, request: RowRequest, record: StreamRecord) -> Response:
        excluded: set[str] = set()
        while True:
            try:
                replica = await self._choose(excluded, request.group)
            except EngineStartFailed as error:
                raise Unavailable(str(error)) from error
            try:
                response = await self._send(replica, request, record)
            except BadRequest as error:
                return Response(error.status, form(request.path).envelope(error))
            except ConnectFailed as error:
                log.info("Replica %s cannot be reached: %s", replica.id, error)
                excluded.add(replica.id)
                continue
            except ConnectionLost as error:
                raise RowInterrupted("The replica died while it ran this request.") from error
            retry = response.headers.get(_RETRY_HEADER)
            if retry is None:
                return response
            if retry == _REFUSED:
                record.restart()
            elif retry == _UNTOUCHED:
                excluded.add(replica.id)
            else:
                raise RowInterrupted("The replica's engine died while it ran this request.")

    def available_slots(self, in_flight: int) -> int:
        unassigned, slots, any_ready = in_flight, 0, False
        for replica in self._replicas.values():  # once for each row, so in one pass
            unassigned -= replica.in_flight
            if replica.ready:
                slots, any_ready = slots + replica.available_slots(), True
        if not any_ready:
            return max(0, 1 - in_flight)  # one row, which starts a replica of a deployment scaled to zero
        return max(0, slots - max(0, unassigned))

    def _ready(self) -> list[ReplicaClient]:
        return [replica for replica in self._replicas.values() if replica.ready]

    async def _choose(self, excluded: set[str], group: int) -> ReplicaClient:
        """That of the request's group while it has a slot, else the one with the most.

        Raises: Unavailable when none takes requests for a while.
        """
        candidates = [one for one in self._ready() if one.id not in excluded]
        return self._affinity.choose(candidates or await self._wait_candidates(excluded), group)

    async def _wait_candidates(self, excluded: set[str]) -> list[ReplicaClient]:
        """Replicas that are ready later; `excluded` counts no longer. Raises: Unavailable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                while True:
                    if not self._ready():
                        await self._wait_ready()
                    else:
                        await self._wait_change(_RETRY_S)
                    excluded.clear()
                    if candidates := self._ready():
                        return candidates
        raise Unavailable(f"No replica of application '{self._app_name}' took the request in {_WAIT_S:g} s.")

    async def _send(self, replica: ReplicaClient, request: RowRequest, record: StreamRecord) -> Response:
        """Raises: ConnectFailed, ConnectionLost; BadRequest for requests that no replica takes."""
        assert replica.hello is not None
        own = replica.hello.model_id
        named = request.model or own
        if request.prompt is not None:
            raise BadRequest("A deployment does not take an engine prompt; put the input into the body.")
        adapter = named.removeprefix(f"{own}:") if named.startswith(f"{own}:") else None
        if adapter is not None and not replica.takes_adapters:
            raise BadRequest(f"Model '{own}' takes no adapters: it has no lora_config.", param="model")
        body = with_fields(request.body, {"model": named})
        return await replica.send(request.path, body, adapter, record)

    async def _keep_refreshing(self, deployment: serve_lookup.FoundDeployment) -> None:
        try:
            while True:
                await self._wait_change(_REFRESH_S if self._ready() else _RETRY_S)
                await asyncio.sleep(_GAP_S)
                await self._refresh(deployment)
        finally:
            self._on_change()  # where it failed, `_start_replica` raises why

    async def _refresh(self, deployment: serve_lookup.FoundDeployment) -> None:
        """Raises: ConfigError when it is not a deployment of Penstock's."""
        try:
            response = deployment.handle.broadcast("listener_address", serve_lookup.node_id())
            found = await response.results_async(timeout_s=_DISCOVERY_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            log.debug("%s: %s", deployment, error)
            found = []
        if (this := asyncio.current_task()) is not None and this.cancelling():
            raise asyncio.CancelledError  # Ray's awaitables sometimes swallow it
        for address in found:
            if isinstance(address, dict):
                self._add(address)
            elif isinstance(address, RayTaskError) and serve_lookup.is_no_method(address.cause):
                raise ConfigError(f"{deployment} is not one of Penstock's: each row must name a `method`.")
        await self._drop_lost()

    def _add(self, metadata: dict[str, object]) -> None:
        replica_id = str(metadata["replica_id"])
        if replica_id not in self._replicas:
            address = Address.from_metadata(metadata)
            self._replicas[replica_id] = ReplicaClient(
                address, serve_lookup.node_id(), self._sender, self._on_change
            )

    async def _drop_lost(self) -> None:
        lost = [replica for replica in self._replicas.values() if replica.lost and not replica.in_flight]
        for replica in lost:
            del self._replicas[replica.id]
            await replica.close()

    def _on_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _wait_change(self, limit_s: float) -> None:
        """Returns when a replica comes, goes, or begins to drain, or after `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._change.wait()

    async def _wait_ready(self) -> None:
        """Returns when a replica is ready; one call to Serve for all that wait. Raises: as `start`."""
        if self._deployment is None:
            raise Unavailable(f"Call `start` before sending requests to application '{self._app_name}'.")
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start_replica(self._deployment))
        await asyncio.shield(self._starting)

    async def _start_replica(self, deployment: serve_lookup.FoundDeployment) -> None:
        """A call by handle makes Serve start a replica of a deployment scaled to zero."""
        call = deployment.handle.options(method_name="listener_address")
        pending = call.remote(serve_lookup.node_id())
        try:
            while not self._ready():
                if self._refreshing is not None and self._refreshing.done():
                    self._refreshing.result()  # nobody looks for replicas any more
                await self._wait_change(_CHECK_S)
                await deployment.check()
        finally:
            pending.cancel()  # else Serve would start one for it after all


class GroupAffinity:
    """Remembers where the last request of each group went: that replica has computed how they begin."""

    def __init__(self) -> None:
        self._replicas: dict[int, str] = {}  # by group, the latest last

    def choose(self, candidates: Sequence[ReplicaClient], group: int) -> ReplicaClient:
        """The group's replica while it has a slot, else the one with the most. group: see `RowRequest`."""
        last = self._replicas.pop(group, None)
        chosen = next((one for one in candidates if one.id == last and one.available_slots()), None)
        if chosen is None:
            chosen = max(candidates, key=lambda replica: (replica.available_slots(), -replica.busy))
        if group:
            self._replicas[group] = chosen.id
            if len(self._replicas) > _GROUPS:
                del self._replicas[next(iter(self._replicas))]
        return chosen
