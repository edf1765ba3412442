"""The gateway as a Serve deployment: wires Serve's membership to the gateway's table.

With a port in its `GatewayConfig` it opens that port itself (`penstock serve`); without one, Serve's HTTP
brings the requests (`serve.run`). It is the same ASGI app both times.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from penstock.asgi import ASGIApp
from penstock.config.derive.prefill import prefill_name
from penstock.config.schema.jobs import JobsConfig
from penstock.config.schema.routing import SERVE_ROUTER
from penstock.processes import cpu_turns
from penstock.serve.control.link import ControlLink
from penstock.serve.control.state import TIMEOUT_S
from penstock.serve.control.updates import Updates
from penstock.serve.fleet import membership
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.admin import FLEET, ORGANIZATION, PLANNED, STATUS, USAGE
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.body import Fields
from penstock.serve.gateway.catalogue import LiveState
from penstock.serve.gateway.dispatch import Choose
from penstock.serve.gateway.telemetry import process_totals
from penstock.serve.http.private_listener import ListenerClient
from penstock.serve.http.serve_proxy import behind_haproxy, behind_serve
from penstock.serve.http.server import Port, serve_on
from penstock.serve.http.tls import Certificate
from penstock.serve.jobs.deployment import has_left_overs
from penstock.serve.jobs.forwarding import JobsForwarder
from penstock.serve.router.deployment import RouterDeployment
from penstock.serve.router.traffic_shift import TrafficShifts
from penstock.serve.tenancy.reporting import Settle
from penstock.serve.tenancy.store import UsageStore, usage_file
from penstock.serve.tenancy.usage import Settlement, Totals

log = logging.getLogger(__name__)

_OWN_PORT = "the gateway's own port: 'penstock serve', or GatewayConfig(port=8000)"
_PROXY = (
    "Requests come through Ray Serve's proxy, which spends some 300 us on each piece of a stream. "
    f"The fast form is {_OWN_PORT}; next best is HAProxy: RAY_SERVE_ENABLE_HA_PROXY=1 before Ray starts."
)
_KNOWN_S, _LOOK_S = 1.0, 0.02
"""How long a gateway that starts waits to know its replicas. Until then `/health` would answer 503."""

_STATUS_S = 15.0  # for an answer by control that waits for no replica
_FLEET_S = 120.0
_PLANNED_S = 400.0  # vLLM may take three minutes to check arguments, and another apply's come first
_START_S = 60.0  # for a replica that Serve starts to say so
_WAKE_S = 2 * TIMEOUT_S + 60.0  # one model goes to sleep, and another one wakes
_LINGER_S = 1.0  # a client with less between two requests loses none when the gateway ends
_HAPROXY = f"Requests come through Ray Serve's HAProxy. The fastest form is {_OWN_PORT}."
_READ = ("messages", "prompt", "input")  # what routers of Serve's kind read of a request


class LLMRouter:
    """OpenAI-compatible gateway to many models. Bind it with `LLMRouter.as_deployment().bind([...])`."""

    async def __init__(
        self,
        servers: Sequence[DeploymentHandle[Any]],
        live: LiveState,
        control: DeploymentHandle[Any] | None,
        prefill: Mapping[str, DeploymentHandle[Any]] | None = None,
        jobs: tuple[JobsConfig, DeploymentHandle[Any]] | None = None,
    ) -> None:
        """servers: in the order of the models of `live`, which is what the gateway begins with. control: None
        where the application has none: nothing is then operated, woken on demand or shifted. prefill: handles
        to the prefill replicas by model, for their metrics only. jobs: files and batches, if there are any.

        Raises: ConfigError when the gateway's own port is taken, or its certificate cannot be used.
        """
        gateway = live.gateway
        self._live, self._updates = live, Updates(self._take_over, lambda why: self._shifts.report(why))
        self._handles = {card.id: handle for card, handle in zip(live.cards, servers, strict=True)}
        self._prefill = {prefill_name(model_id): handle for model_id, handle in (prefill or {}).items()}
        context, app_name = ray.get_runtime_context(), serve.get_replica_context().app_name
        node_id = context.get_node_id()
        figures = process_totals.folder_of(node_id, app_name)  # the same for all gateways on this node
        self._table = table = Table(node_id)
        self._control = ControlLink(control, node_id) if control is not None else None
        self._shifts = TrafficShifts(table, self._handles, new_handle, self._control)
        self._jobs = JobsForwarder(ListenerClient(jobs[1], node_id)) if jobs else None
        self.gateway = Gateway(
            gateway,
            live.cards,
            table,
            unreachable=self._open_network,
            operate=self._operate if control is not None else None,
            wake=self._wake,
            routers=self._routers(live),
            shared_figures=figures if gateway.processes > 1 else None,
            jobs=self._jobs,
            settle=self._control.settle if self._control else own_store(app_name, gateway.port),
        )
        await self.gateway.start()
        self._shifts.start(self.gateway.splits)
        for name, handle in self._prefill.items():
            self._follow_prefill(name, handle)
        self._port: Port | None = None
        if gateway.port is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KNOWN_S):
                    while not self._shifts.all_known():  # noqa: ASYNC110 - two sources, within 0.2 s
                        await asyncio.sleep(_LOOK_S)
            self._port = await serve_on(
                self.gateway,
                gateway.host,
                gateway.port,
                group=f"{context.gcs_address}/{app_name}",  # the same after an update
                is_shared=gateway.processes > 1,
                connections=self.gateway.connections,
                certificate=Certificate(gateway.tls.cert, gateway.tls.key) if gateway.tls else None,
            )
        may_have_left = functools.partial(has_left_overs, app_name=app_name, port=gateway.port)
        if jobs is not None and self._jobs is not None and await asyncio.to_thread(may_have_left, jobs[0]):
            self._jobs.start()
        cpu_turns.wait()
        gc.collect()
        gc.freeze()  # collecting all imported objects would pause every stream

    def _routers(self, live: LiveState) -> dict[str, Choose]:
        return {
            card.id: HandleRouter(
                functools.partial(self._shifts.handle, card.id),
                max(live.gateway.wait_for_replica_s, card.start_s or 0.0),
            ).chosen
            for card in live.cards
            if card.routing_policy == SERVE_ROUTER
        }

    def _follow_prefill(self, name: str, handle: Any) -> None:
        membership.follow(name, handle, functools.partial(self._table.set_members, name))

    async def reconfigure(self, user_config: Any) -> None:
        """Serve's hook: takes over a `LiveState`. Called after the start, and in updates."""
        await self._updates.receive(user_config)

    async def _take_over(self, user_config: Any) -> None:
        if user_config == self._live.dump():
            return
        before, handles = self._live, dict[str, Any]()
        live = LiveState.parse(user_config, before)
        for model, name in live.deployments.items():
            is_same = name == before.deployments.get(model)
            if is_same and live.routers.get(model) == before.routers.get(model):
                handles[model] = self._handles[model]
            else:
                handles[model] = await asyncio.to_thread(new_handle, name)
        prefill = {
            name: self._prefill.get(name) or await asyncio.to_thread(new_handle, name)
            for name in map(prefill_name, live.prefill)
        }
        await self.gateway.reconfigure(live.gateway, live.cards, self._routers(live))
        self._live, self._handles = live, handles
        self._shifts.follow(handles)
        for name in self._prefill.keys() - prefill.keys():
            membership.unfollow(name, self._prefill[name])
            self._table.set_members(name, {})
        for name in prefill.keys() - self._prefill.keys():
            self._follow_prefill(name, prefill[name])
        self._prefill = prefill
        log.info("An update is taken over: models %s", ", ".join(live.deployments))

    async def _open_network(self, model_id: str) -> None:
        """Has replicas on other nodes listen on the network, which they do on demand only."""
        log.info("%s: asking replicas on other nodes to listen on the network", model_id)
        prefill = self._prefill.get(model_id)
        handles = [prefill] if prefill is not None else self._shifts.handles(model_id)
        # Serve refuses to call a deployment without replicas, which must not keep another one from its call.
        await asyncio.gather(*(handle.broadcast("listen_on_network").results_async() for handle in handles))

    async def _wake(self, model_id: str) -> None:
        """Serve starts a replica for a call by handle if there is none, and answers when it has started."""
        if not self._table.members(model_id):
            log.info("%s: a request waits and there is no replica", model_id)
            with contextlib.suppress(TimeoutError):  # it still starts, or hangs: the next call asks anew
                async with asyncio.timeout(_START_S):
                    await self._shifts.handle(model_id).is_sleeping.remote()
        elif self._control is not None and any(
            card.on_demand for card in self._live.cards if card.id == model_id
        ):
            about = {"model": model_id, "idle_s": self.gateway.idle_s()}
            await self._control.ask("wake", about, _WAKE_S)

    async def _operate(self, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Asks control. Raises: what control raises, such as BadRequest; Unavailable."""
        assert self._control is not None
        if operation in (STATUS, USAGE, ORGANIZATION):
            return await self._control.ask(operation, arguments, _STATUS_S)
        if operation.startswith(FLEET):
            limit_s = _PLANNED_S if operation in PLANNED else _FLEET_S
            return await self._control.ask(operation, arguments, limit_s)
        limit_s = arguments.get("timeout_s", TIMEOUT_S) + _STATUS_S
        return await self._control.ask("perform", {"operation": operation, **arguments}, limit_s)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve's hook, also called when the gateway has its own port."""
        if self._port is None:
            log.warning(_HAPROXY if behind_haproxy() else _PROXY)
        return behind_serve(self.gateway)

    async def check_health(self) -> None:
        """Serve's hook: a gateway that lost its port must be restarted."""
        if self._port is not None:
            self._port.check()

    async def stop(self) -> None:
        """Stops accepting, finishes open requests, closes."""
        self.gateway.drain()
        self._updates.close()
        if self._port is not None:
            await self._port.close(self._live.drain_s, _LINGER_S)
        self._shifts.close()
        if self._jobs is not None:
            self._jobs.close()
        await self.gateway.close()

    async def __del__(self) -> None:
        """Serve's shutdown hook. Serve's ingress wrapper awaits it only when it is `async` itself."""
        if "gateway" in self.__dict__:
            await self.stop()

    @classmethod
    def as_deployment(cls, deployment_options: Mapping[str, Any] | None = None) -> RouterDeployment:
        """A deployment to `.bind([...])` with model applications, configs, or both."""
        return RouterDeployment(cls, dict(deployment_options or {}))


def new_handle(deployment: str, application: str | None = None) -> DeploymentHandle[Any]:
    """With a router of its own. Serve returns the same handle each time, whose router names the replicas when
    one comes or goes only, and stays of the class that it had.
    """
    return copy.copy(serve.get_deployment_handle(deployment, application))


def own_store(app_name: str, port: int | None) -> Settle:
    """Of a gateway without control. It is opened when it is used."""
    open_store = functools.cache(UsageStore)

    async def settle(settlement: Settlement) -> Totals:
        return await asyncio.to_thread(lambda: open_store(usage_file(app_name, port)).settle(settlement))

    return settle


class HandleRouter:
    """Asks a router of Ray Serve's kind for a request's replica, by a call that lasts as long as the request.

    The bytes go from the gateway to that replica as all others. It costs a call by handle for each request.
    """

    def __init__(self, handle: Callable[[], Any], wait_s: float) -> None:
        """handle: to the deployment that answers now. wait_s: for a replica; the gateway then picks one."""
        self._handle = handle
        self._wait_s = wait_s
        self._streaming: tuple[Any, Any] = (None, None)
        self._logged: set[str] = set()

    @contextlib.asynccontextmanager
    async def chosen(self, fields: Fields, session: str) -> AsyncGenerator[str]:
        """The id of the replica; "" when the router failed, or found none in time."""
        with contextlib.ExitStack() as calls:
            yield await self._ask(fields, session, calls)

    async def _ask(self, fields: Fields, session: str, calls: contextlib.ExitStack) -> str:
        try:
            handle = self._stream()
            if session:
                handle = handle.options(session_id=session)
            call = handle.routed.remote(_request(fields))
            calls.callback(call.cancel)
            async with asyncio.timeout(self._wait_s):
                return await anext(call)
        except Exception as error:  # the router is the user's code; the rest is Serve's and Ray's
            if (kind := type(error).__name__) not in self._logged:
                self._logged.add(kind)
                log.warning("The request router failed; the gateway picks instead.", exc_info=error)
            return ""

    def _stream(self) -> Any:
        """A handle for streams, made once for each deployment: every new one costs Serve a little."""
        handle = self._handle()
        if self._streaming[0] is not handle:
            self._streaming = handle, handle.options(stream=True)
        return self._streaming[1]


def _request(fields: Fields) -> SimpleNamespace:
    """What routers read of a request: an object with `messages` or `prompt`."""
    found: dict[str, Any] = {"model": fields.model}
    for name in _READ:
        if raw := bytes(getattr(fields, name)):
            found["prompt" if name == "input" else name] = msgspec.json.decode(raw)
    return SimpleNamespace(**found)
