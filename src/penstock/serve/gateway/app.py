"""The front door: one ASGI app for all models and endpoints, on its own port or behind Serve's HTTP.

Per request it runs once: who asks, for what, which model; then `dispatch` finds a replica and `relay` moves
bytes. It knows neither Ray nor engines.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import errors
from penstock.asgi import Receive, Scope, Send
from penstock.config import GatewayConfig
from penstock.config.derive.prefill import prefill_name
from penstock.serve.fleet.links import Fleet
from penstock.serve.fleet.table import Table
from penstock.serve.gateway import admin, body, routes, stored_responses
from penstock.serve.gateway.adapter_listing import Listing
from penstock.serve.gateway.body import Body, Room
from penstock.serve.gateway.catalogue import Catalogue, ModelCard
from penstock.serve.gateway.dispatch import Dispatch, Question
from penstock.serve.gateway.request import Request
from penstock.serve.gateway.response import ClientGone, Reply
from penstock.serve.gateway.routes import By, Route
from penstock.serve.gateway.telemetry import engine_metrics, timing
from penstock.serve.gateway.telemetry.json_logs import write_json
from penstock.serve.gateway.telemetry.tracing import tracing
from penstock.serve.gateway.wakeup import Waking
from penstock.serve.http.connection_limits import Connections
from penstock.transport.connection import Headers

if TYPE_CHECKING:
    from penstock.serve.gateway.telemetry.spans import Tracing

log = logging.getLogger(__name__)

_JSON = [(b"content-type", b"application/json")]
_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]
_PROMETHEUS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


Operate = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Takes the name of an operation, and its arguments with `model`, `replica` and `timeout_s` among them."""


class Gateway:
    """ASGI app. Everything happens on the loop that calls `start`, which is the table's too."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Sequence[ModelCard],
        table: Table,
        *,
        unreachable: Callable[[str], Awaitable[None]] | None = None,
        operate: Operate | None = None,
        wake: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """unreachable: called with a model's id when a replica on another node refuses TCP connections.
        operate: does what is asked under `/admin`. wake: has a model started, or woken, for which requests
        wait; returns when that is done, or is nobody's business here.

        Raises: ConfigError when the default model is none of `models`, or a routing policy cannot be had.
        """
        self._config = config
        self._catalogue = Catalogue(models, config.default_model)
        self._paths = routes.own(path for card in models for path in card.paths)
        self._table = table
        self._id = uuid.uuid4().hex
        self._fleet = Fleet(table, self._id, unreachable)
        self._listing = Listing(models, table, self._fleet)
        self._room = Room(config.max_bodies_bytes)
        self.connections = Connections(config.max_connections_per_address)
        self._waking = Waking(wake, lambda model_id: self._dispatch.is_wanted(model_id))
        self._dispatch = Dispatch(
            models, table, self._fleet, self._id, config.wait_for_replica_s, self._waking.begin
        )
        self._unresolved = self._dispatch.metrics("").on("")
        self._tracing: Tracing | None = None
        self._key = config.api_key.get_secret_value().encode() if config.api_key else None
        self._admin_key = config.admin_key.get_secret_value().encode() if config.admin_key else None
        self._operate = operate
        self._own: dict[By, Callable[[Request, Route, Reply], Awaitable[None]]] = {
            By.ENGINE: self._ask_engine,
            By.MODELS: self._show_models,
            By.HEALTH: self._show_health,
            By.ALIVE: self._show_alive,
            By.METRICS: self._show_metrics,
            By.ADMIN: self._administer,
        }

    async def start(self) -> None:
        """Begins to follow the table's replicas."""
        if self._config.log_format == "json":
            write_json()
        self._tracing = await asyncio.to_thread(tracing)  # its imports, where there are any, take long
        self._table.watch(self._fleet.join, self._fleet.leave, self._dispatch.offer)

    async def close(self) -> None:
        """Ends links and idle connections. Close the port before: it waits for open requests."""
        self._waking.close()
        await self._listing.close()
        await self._fleet.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def idle_s(self) -> dict[str, float]:
        """Seconds since a request for each model came here; of models that have had one."""
        return self._dispatch.idle_s()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._serve(Request(scope, receive), send)
        elif scope["type"] == "lifespan":
            await _live(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, request: Request, send: Send) -> None:
        reply = Reply(send, request.id, request.timing, request.outlet, request.path)
        request.metrics = self._unresolved
        error = None
        try:
            error = await self._attempt(request, reply)
            if error is not None:
                await reply.fail(error, request.advice(error))
        except ClientGone:
            request.gone = True
        except asyncio.CancelledError:  # by the server, which closes or lost the client
            request.gone = True
            raise
        finally:
            request.account(reply, error)

    async def _attempt(self, request: Request, reply: Reply) -> errors.Error | None:
        """Answers, or says why not. Here foreign exceptions end: what they say is for the log.

        Raises: ClientGone.
        """
        limit_s = self._config.request_timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await self._answer(request, reply)
        except errors.Error as error:
            return error
        except ClientGone:
            raise
        except Exception as cause:
            if isinstance(cause, TimeoutError) and limit.expired():
                return errors.DeadlineExceeded(
                    f"The request was not finished within {limit_s:g} s, the time limit."
                )
            error = errors.Error()
            error.__cause__ = cause
            return error
        return None

    async def _answer(self, request: Request, reply: Reply) -> None:
        route = self._authorized_route(request)
        request.route = route
        if route.by is not By.ENGINE:
            request.metrics = None  # probes and listings are not requests to a model
        if request.method == "OPTIONS":
            await reply.whole(204, [(b"allow", route.allow.encode())], b"")
        else:
            if request.outlet is not None and not route.public:
                request.outlet.accept(body_in_time=True)
            routes.check_method(route, request.method)
            await self._own[route.by](request, route, reply)

    def _authorized_route(self, request: Request) -> Route:
        """The route; without the key only a public one, so that nothing else can be told apart."""
        try:
            route = routes.find(request.path, self._paths)
        except errors.NotFound:
            self._check_key(request, self._key)
            raise
        if route.by is By.ADMIN:
            if self._admin_key is None or self._operate is None:
                self._check_key(request, self._key)
                raise routes.unknown(request.path)
            self._check_key(request, self._admin_key)
        elif not route.public:
            self._check_key(request, self._key)
        return route

    def _check_key(self, request: Request, wanted: bytes | None) -> None:
        if wanted is None:
            return
        bearer = request.fields.get(b"authorization", b"")
        scheme, _, key = bearer.partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else request.fields.get(b"x-api-key", b"")
        if not hmac.compare_digest(given, wanted):
            raise errors.Unauthorized(
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            )

    async def _ask_engine(self, request: Request, route: Route, reply: Reply) -> None:
        fields, passing = request.fields, request.headers
        if self._tracing is not None:
            request.trace = self._tracing.begin(request.traced(route))
            passing = request.trace.passed_on(passing)
        request.timing.begin(timing.RECEIVE)
        content = Body(self._room)
        reply.begun = content.drop
        try:
            await content.read(request.receive, fields.get(b"content-length"), self._config.max_body_bytes)
            request.timing.begin(timing.GATEWAY)
            kind = fields.get(b"content-type", b"")
            content.fields = await body.look(content.content, kind, free=route.own)
            await self._pass_on(request, route, reply, passing, content)
        finally:
            content.drop()

    async def _pass_on(
        self, request: Request, route: Route, reply: Reply, passing: Headers, content: Body
    ) -> None:
        named = content.fields.model or request.queried("model")
        keeper = stored_responses.keeper(self._table, route, content.fields)
        card, adapter = self._resolve(route, named or (keeper.model_id if keeper else None))
        if keeper is not None and keeper.model_id != card.id:
            raise stored_responses.lost()
        request.metrics = self._dispatch.metrics(card.id).on(route.path)
        reply.gaps = request.metrics.inter_token
        method = "GET" if request.method == "HEAD" else request.method
        question = Question(request.id, method, request.target, passing, content, adapter, keeper)
        async with request.while_connected():
            await self._dispatch.answer(card.id, question, reply)

    def _resolve(self, route: Route, named: str | None) -> tuple[ModelCard, str]:
        if route.own:
            return self._catalogue.resolve_for(route.path, named)
        return self._catalogue.resolve(named)

    async def _administer(self, request: Request, route: Route, reply: Reply) -> None:
        """200 when all replicas have done it; 502 when one has not: the answer says which, and why."""
        assert self._operate is not None
        operation, content = route.argument or "", Body(self._room)
        try:
            await content.read(
                request.receive, request.fields.get(b"content-length"), self._config.max_body_bytes
            )
            asked = admin.asked(operation, content.content, request.queried("model"))
        finally:
            content.drop()
        found = await self._operate(operation, asked)
        await reply.whole(200 if found.get("ok", True) else 502, _JSON, admin.shown(found))

    async def _show_models(self, request: Request, route: Route, reply: Reply) -> None:
        lengths = {model_id: self._table.max_model_len(model_id) for model_id in self._catalogue.cards}
        if route.argument is None:
            content = self._catalogue.show_all(lengths, await self._listing.all())
        else:
            card, adapter = self._catalogue.find(route.argument)
            adapters = await self._listing.adapters(card.id) if adapter else ()
            content = self._catalogue.show(card, adapter, lengths[card.id], adapters)
        await reply.whole(200, _JSON, content)

    async def _show_health(self, request: Request, route: Route, reply: Reply) -> None:
        """200 when every model can answer: what a load balancer or Kubernetes asks."""
        models = {model_id: self._counts(model_id) for model_id in self._catalogue.cards}
        healthy = all(
            counts["ready"] or counts["resting"] or self._catalogue.cards[model_id].start_s is not None
            for model_id, counts in models.items()
        )
        content = msgspec.json.encode({"status": "ok" if healthy else "unavailable", "models": models})
        await reply.whole(200 if healthy else 503, _JSON, content)

    def _counts(self, model_id: str) -> dict[str, int]:
        """resting: asleep or paused, because somebody wants it so."""
        members = self._table.members(model_id)
        resting = sum(replica.state in ("asleep", "paused") for replica in members)
        return {"ready": len(self._table.ready(model_id)), "resting": resting, "replicas": len(members)}

    async def _show_alive(self, request: Request, route: Route, reply: Reply) -> None:
        await reply.whole(200, _TEXT, b"success")

    async def _show_metrics(self, request: Request, route: Route, reply: Reply) -> None:
        told = {model_id for model_id, card in self._catalogue.cards.items() if card.engine_metrics}
        told |= {prefill_name(model_id) for model_id in told}
        asked = [r for r in self._table if r.model_id in told and r.state in ("ready", "draining")]
        engines = await engine_metrics.scrape(asked, self._fleet)
        await reply.whole(200, _PROMETHEUS, self._dispatch.metrics_text(self.connections) + engines)


async def _live(receive: Receive, send: Send) -> None:
    """Says yes to a server that announces its start and its end."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
