"""The process of files and batches, as a Serve deployment of at most one replica.

It starts with the first request for them, or for batches that an earlier one has left, and ends when none is
unfinished. Gateways reach it by HTTP at a listener of its own. A call of `stay` keeps it alive: a gateway's
while it asks, its own while it runs batches.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from penstock import json_logs
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.config import GatewayConfig, Settings
from penstock.config.schema.jobs import JobsConfig
from penstock.errors import Error, Unavailable
from penstock.openai.asgi_response import send_error
from penstock.serve.gateway.catalogue import Catalogue, ServedModel
from penstock.serve.gateway.request import ClientRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.http.server import Port
from penstock.serve.http.sockets import bind
from penstock.serve.jobs.forwarding import JobsForwarder
from penstock.transport import link
from penstock.transport.address import Address

NAME = "LLMJobs"
_PAUSE_S = 0.5
_IDLE_S = 60.0

HEALTH_CHECKS: Mapping[str, Any] = {"health_check_period_s": 1.0, "health_check_timeout_s": 1.7}
"""Of processes without an engine. Serve replaces them after three failures in a row: 5 to 6 s of silence."""

OPTIONS: Mapping[str, Any] = {
    "name": NAME,
    "max_ongoing_requests": 1_000_000,  # each gateway keeps a call open
    "autoscaling_config": {
        "min_replicas": 0,
        "initial_replicas": 0,
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
    name = app_name if port is None else f"{app_name}-{port}"
    return str(Settings.read().cache_folder() / "jobs" / name)


class LLMJobs:
    """Of one application."""

    async def __init__(
        self,
        config: JobsConfig,
        servers: Sequence[DeploymentHandle[Any]],
        cards: Sequence[ServedModel],
        gateway: GatewayConfig,
    ) -> None:
        """servers and cards: in the same order, as for the gateway."""
        from penstock.jobs.app import make_app
        from penstock.jobs.replicas import Fleet
        from penstock.jobs.service import JobService

        json_logs.configure()
        app_name = serve.get_replica_context().app_name
        catalogue = Catalogue(cards, gateway.default_model)

        def resolve(name: str | None) -> tuple[str, str]:
            model, adapter = catalogue.resolve(name)
            return model.id, adapter

        deployments = {card.id: server.deployment_name for card, server in zip(cards, servers, strict=True)}
        self._fleet = Fleet(app_name, deployments, resolve)
        self._service = JobService(
            config,
            storage_url(config, app_name, gateway.port),
            resolve,
            self._fleet.pool,
            line_bytes=gateway.max_body_bytes,
            own_endpoints=own_endpoints(cards),
        )
        self._app = make_app(self._service)
        self._open, self._unused = 0, asyncio.Event()
        self._unused.set()
        await self._listen()
        await self._service.start()
        own: DeploymentHandle[Any] = serve.get_deployment_handle(NAME, app_name)
        self._staying = asyncio.create_task(self._stay_while_busy(own))

    async def _listen(self) -> None:
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(f"\0penstock-{secrets.token_hex(8)}")
        self._network = bind(ray.util.get_node_ip_address(), 0)
        host, port = self._network.getsockname()[:2]
        self._address = Address(
            replica_id=NAME,
            node_id=ray.get_runtime_context().get_node_id(),
            unix=unix.getsockname().decode(),
            host=host,
            port=port,
            secret=secrets.token_urlsafe(32),
        )
        self._ports = [await Port.open(self._serve, unix)]

    async def address(self, node_id: str) -> dict[str, str | int | None]:
        """Of its listener, for a gateway on this node or another: only then it listens on the network."""
        if not self._address.is_local(node_id) and len(self._ports) == 1:
            self._ports.append(await Port.open(self._serve, self._network))
        return self._address.to_metadata()

    async def stay(self) -> None:
        """Returns when no batch is unfinished and no request is open; Serve keeps the process until then."""
        await self._service.wait_idle()
        await self._unused.wait()

    async def _stay_while_busy(self, own: DeploymentHandle[Any]) -> None:
        """Serve counts the calls of a process: with one of its own it stays while all gateways are gone."""
        while True:
            await self._service.wait_busy()
            with suppress(RayError, RayServeException):
                await own.stay.remote()
            await asyncio.sleep(_PAUSE_S)

    async def check_health(self) -> None:
        """Serve's hook."""
        for port in self._ports:
            port.check()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(link.SECRET, b"")
        if not hmac.compare_digest(given, self._address.secret.encode()):
            return await send_error(send, Unavailable("Only gateways may ask here."), scope["path"])
        app: ASGIApp = self._app
        self._open += 1
        self._unused.clear()
        try:
            await app(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open:
                self._unused.set()

    async def stop(self) -> None:
        """Unfinished batches go on in the next process."""
        self._staying.cancel()
        ports, self._ports = self._ports, []
        await asyncio.gather(*(port.close(grace_s=5.0) for port in ports))
        await self._service.close()
        await self._fleet.close()

    async def __del__(self) -> None:
        """Serve's shutdown hook."""
        if "_ports" in self.__dict__:
            await self.stop()


def own_endpoints(cards: Sequence[ServedModel]) -> dict[str, frozenset[str]]:
    """Models by the endpoints of their server classes that batches may ask."""
    found = defaultdict[str, set[str]](set)
    for card in cards:
        for path in card.batch_paths:
            found[path].add(card.id)
    return {path: frozenset(models) for path, models in found.items()}


class JobsLink:
    """A gateway's end: finds the process, and keeps it while it has work."""

    def __init__(self, handle: DeploymentHandle[Any], node_id: str) -> None:
        self._handle, self._node_id = handle, node_id
        self._forward = JobsForwarder(self._find, node_id)
        self._staying: asyncio.Task[None] | None = None
        self._again = False

    async def answer(self, request: ClientRequest, reply: ClientResponse) -> None:
        """Raises: as `JobsForwarder`."""
        self.hold()
        await self._forward(request, reply)

    async def _find(self) -> Address:
        """Raises: Unavailable."""
        try:
            return Address.from_metadata(await self._handle.address.remote(self._node_id))
        except (RayError, RayServeException) as error:
            raise Unavailable("Files and batches cannot be started now.") from error

    def hold(self) -> None:
        """Keeps the process until it is idle, or starts it."""
        self._again = True
        if self._staying is None or self._staying.done():
            self._staying = asyncio.create_task(self._stay())

    async def _stay(self) -> None:
        while self._again:
            self._again = False
            try:
                await self._handle.stay.remote()
            except (RayError, RayServeException):  # it was killed
                self._again = True
                await asyncio.sleep(_PAUSE_S)

    def close(self) -> None:
        if self._staying is not None:
            self._staying.cancel()


def has_left_overs(config: JobsConfig, app_name: str, port: int | None) -> bool:
    """Whether there may be unfinished batches of an earlier process; cheap, so it is not sure."""
    url = storage_url(config, app_name, port)
    with suppress(OSError, Error):
        return "://" in url or (Path(url) / "batches").is_dir()
    return True
