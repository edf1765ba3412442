"""The process of files and batches, as a Serve deployment of at most one replica.

It starts with the first request for them, or for batches that an earlier one has left, and ends when none is
unfinished. Gateways reach it by HTTP at a listener of its own, whose address they ask for by handle. It keeps
itself alive by a call of `stay`: one by a gateway could hang it together with that gateway.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from penstock import json_logs
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.config import Settings
from penstock.config.schema.jobs import JobsConfig
from penstock.config.schema.settings import service_name
from penstock.errors import Error
from penstock.serve.control.link import ControlLink
from penstock.serve.control.state import NAME as CONTROL
from penstock.serve.control.state import CanaryState
from penstock.serve.control.updates import Updates
from penstock.serve.gateway.body import fields
from penstock.serve.gateway.catalogue import Catalogue, LiveState, ServedModel
from penstock.serve.gateway.routing_features import sticky_key
from penstock.serve.gateway.tenants.registry import Tenants, read_keys
from penstock.serve.http.private_listener import PrivateListener
from penstock.serve.routing.split import Splits
from penstock.serve.tenancy.usage import UsageRow

if TYPE_CHECKING:  # `penstock.jobs` is loaded in the process itself
    from penstock.jobs.records import BatchRecord
    from penstock.jobs.runner import RowCounts
    from penstock.jobs.validation import Resolve

NAME = "LLMJobs"
_PAUSE_S = 0.5
_IDLE_S = 60.0
_CANARY_S, _ANSWER_S = 1.0, 5.0

HEALTH_CHECKS: Mapping[str, Any] = {"health_check_period_s": 1.0, "health_check_timeout_s": 1.7}
"""Of processes without an engine. Serve replaces them after three failures in a row: 5 to 6 s of silence."""

OPTIONS: Mapping[str, Any] = {
    "name": NAME,
    "max_ongoing_requests": 1_000_000,
    "autoscaling_config": {
        "min_replicas": 0,
        "max_replicas": 1,
        "target_ongoing_requests": 1_000_000,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": _IDLE_S,
    },
    **HEALTH_CHECKS,
    "graceful_shutdown_wait_loop_s": 0.2,
    "graceful_shutdown_timeout_s": 10.0,
}


def storage_url(config: JobsConfig, app_name: str, port: int | None) -> str:
    """Where files and batches lie; by default apart from those of other services of this machine."""
    if config.storage is not None:
        return config.storage
    return str(Settings.read().cache_folder() / "jobs" / service_name(app_name, port))


class LLMJobs:
    """Of one application."""

    async def __init__(
        self,
        config: JobsConfig,
        live: LiveState,
    ) -> None:
        """live: what it begins with."""
        from penstock.jobs.app import make_app
        from penstock.jobs.replicas import Fleet
        from penstock.jobs.service import JobService

        json_logs.configure()
        app_name = serve.get_replica_context().app_name
        self._live, self._updates = live, Updates(self._take_over, lambda why: None)
        self._splits = Splits()
        self._find_models(live)
        context = ray.get_runtime_context()
        self._control = ControlLink(serve.get_deployment_handle(CONTROL, app_name), context.get_node_id())
        self._tenants = Tenants(live.gateway, self._control.settle) if live.gateway.keyed else None
        self._fleet = Fleet(app_name, live.deployments)
        self._fleet.isolate_cache = live.gateway.isolate_cache
        self._service = JobService(
            config,
            storage_url(config, app_name, live.gateway.port),
            self._resolve,
            self._fleet.pool,
            line_bytes=live.gateway.max_body_bytes,
            own_endpoints=own_endpoints(live.cards),
            resolve_only=self._resolve_only,
            count=self._count,
        )
        self._app = make_app(self._service)
        self._open, self._unused = 0, asyncio.Event()
        self._unused.set()
        self._own: DeploymentHandle[Any] = serve.get_deployment_handle(NAME, app_name)
        self._staying: asyncio.Task[None] | None = None
        self._following = asyncio.create_task(self._follow_canaries())
        self._listener = await PrivateListener.open(
            self._serve, NAME, context.get_node_id(), ray.util.get_node_ip_address()
        )
        if self._tenants is not None:
            await self._tenants.start()
        await self._service.start()
        self._hold()

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's hook, as the gateway's: batches go on with other models and names."""
        await self._updates.receive(user_config)

    async def _take_over(self, user_config: Any) -> None:
        if user_config == self._live.dump():
            return
        live, tenants = LiveState.parse(user_config, self._live), self._tenants
        found = await read_keys(live.gateway) if live.gateway.keyed else None
        new = Tenants(live.gateway, self._control.settle) if found is not None and tenants is None else None
        try:  # until it has started, nothing has changed
            if new is not None:
                await new.start()
            self._find_models(live)
        except BaseException:
            if new is not None:
                await new.close()
            raise
        self._live = live
        self._service.line_bytes = live.gateway.max_body_bytes
        self._service.own_endpoints = own_endpoints(live.cards)
        self._fleet.follow(live.deployments)
        self._fleet.isolate_cache = live.gateway.isolate_cache
        if tenants is None:
            self._tenants = new
        elif found is not None:
            tenants.follow(live.gateway, found)
        else:
            self._tenants = None
            await tenants.close()

    def _find_models(self, live: LiveState) -> None:
        self._catalogue = Catalogue(live.cards, live.gateway.default_model)
        self._splits.follow({one.id: one.version for one in live.cards if one.version is not None})

    async def _follow_canaries(self) -> None:
        """Takes over their shares, while there are any."""
        while True:
            with suppress(Error, msgspec.ValidationError):
                if self._splits.has_canary:
                    found = await self._control.ask("canaries", {}, _ANSWER_S)
                    self._splits.hear(msgspec.convert(found, dict[str, CanaryState]))
            await asyncio.sleep(_CANARY_S)

    def _pick(self, body: bytes, versions: Sequence[ServedModel]) -> ServedModel:
        by_id = {model.id: model for model in versions}
        return by_id[self._splits.pick([*by_id], sticky_key(versions[0], fields(body)))]

    def _resolve(self, name: str | None, body: bytes, only: frozenset[str] | None = None) -> tuple[str, str]:
        """only: names that a key may use."""
        model, adapter = self._catalogue.only(only).resolve(name, None, partial(self._pick, body))
        return model.id, adapter

    def _resolve_only(self, names: Sequence[str]) -> Resolve:
        return partial(self._resolve, only=frozenset(names))

    def _count(self, record: BatchRecord, counts: RowCounts) -> bool:
        """What a tenant's batch has completed. Returns whether its budget is used up."""
        if not record.key or self._tenants is None:
            return False
        return self._tenants.add_rows(record.tenant, record.key, record.models, UsageRow(*counts))

    async def address(self, node_id: str) -> dict[str, str | int | None]:
        """The address of its listener, for a gateway on that node."""
        return await self._listener.address(node_id)

    async def stay(self) -> None:
        """Returns when no batch is unfinished and no request is open; Serve keeps the process until then."""
        await self._service.wait_idle()
        while self._open:
            await self._unused.wait()
            await self._service.wait_idle()

    def _hold(self) -> None:
        """Keeps the process until it is idle. Called before any work begins."""
        self._again = True
        if self._staying is None or self._staying.done():
            self._staying = asyncio.create_task(self._stay())

    async def _stay(self) -> None:
        while self._again:
            self._again = False
            try:
                await self._own.stay.remote()
            except (RayError, RayServeException):
                self._again = True
                await asyncio.sleep(_PAUSE_S)

    async def check_health(self) -> None:
        """Serve's hook."""
        self._listener.check()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        self._open += 1
        self._unused.clear()
        self._hold()
        try:
            await app(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._unused.set()

    async def __del__(self) -> None:
        """Serve's shutdown hook. Unfinished batches go on in the next process."""
        if "_listener" not in self.__dict__:
            return
        if self._staying is not None:
            self._staying.cancel()
        self._following.cancel()
        self._updates.close()
        await self._listener.close(grace_s=5.0)
        await self._service.close()
        await self._fleet.close()
        if self._tenants is not None:
            await self._tenants.close()


def own_endpoints(cards: Sequence[ServedModel]) -> dict[str, frozenset[str]]:
    """Models by the endpoints of their server classes that batches may ask."""
    found = defaultdict[str, set[str]](set)
    for card in cards:
        for path in card.batch_paths:
            found[path].add(card.id)
    return {path: frozenset(models) for path, models in found.items()}


def has_left_overs(config: JobsConfig, app_name: str, port: int | None) -> bool:
    """Whether there may be unfinished batches of an earlier process; cheap, so it is not sure."""
    url = storage_url(config, app_name, port)
    with suppress(OSError, Error):
        return "://" in url or (Path(url) / "batches").is_dir()
    return True
