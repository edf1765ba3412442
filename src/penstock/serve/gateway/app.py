"""The front door: one ASGI app for all models and endpoints, on its own port or behind Serve's HTTP.

Per request it runs once: who asks, for what, which model; then `dispatch` finds a replica and `relay` moves
bytes. It knows neither Ray nor engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock import errors, json_logs, tiers
from penstock.asgi import ASGIApp, ClientGone, Receive, Scope, Send, lifespan
from penstock.config import GatewayConfig
from penstock.metrics import GatewayFigures
from penstock.openai.response_items import tenant_mark
from penstock.serve.fleet.links import ReplicaLinks
from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table
from penstock.serve.gateway import admin, routes, stored_responses
from penstock.serve.gateway.auth import Auth, given
from penstock.serve.gateway.body import BodyBudget, Fields, RequestBody
from penstock.serve.gateway.catalogue import Catalogue, ServedModel
from penstock.serve.gateway.dispatch import Choose, Dispatch
from penstock.serve.gateway.own_answers import JSON, Listing, OwnAnswers
from penstock.serve.gateway.request import ClientRequest, UpstreamRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.routes import Handler
from penstock.serve.gateway.routing_features import sticky_key
from penstock.serve.gateway.telemetry import timing
from penstock.serve.gateway.telemetry.process_totals import ProcessTotals
from penstock.serve.gateway.telemetry.shadows import Shadow, ShadowAnswer, Shadows
from penstock.serve.gateway.telemetry.tracing import tracing
from penstock.serve.gateway.tenants.meter import Asked
from penstock.serve.gateway.tenants.registry import Tenants, read_keys
from penstock.serve.http import cors
from penstock.serve.http.connection_limits import Connections
from penstock.serve.routing.split import Splits
from penstock.serve.tenancy import limits
from penstock.serve.tenancy.keys import DEFAULT_TENANT, Grant
from penstock.serve.tenancy.reporting import Settle
from penstock.tiers import Tier
from penstock.transport import link
from penstock.transport.connection import Headers

if TYPE_CHECKING:
    from penstock.serve.gateway.telemetry.spans import Tracing

log = logging.getLogger(__name__)

_USAGE_ON_REQUEST = ("/v1/chat/completions", "/v1/completions")  # of streams; others always report it
_FREE = (  # beside what is stored, which was counted before
    *("/tokenize", "/detokenize", "/tokenizer_info", "/v1/responses/input_tokens"),
    *("/v1/messages/count_tokens", "/v1/messages/render", "/v1/responses/render"),
    *(f"{path}/{what}render" for path in ("/v1/chat/completions", "/v1/completions") for what in ("", "de")),
)
_PIECES = 10_000  # of an answer that is written beside its shadow's
_RESPONSES = "/v1/responses"  # there, engines repeat the `service_tier` of the body


@cache
def _mark(tenant: str) -> str:
    """Responses without a mark are the default tenant's."""
    return "" if tenant == DEFAULT_TENANT else tenant_mark(tenant)


Operate = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Called with an operation's name and its arguments, `model`, `replica` and `timeout_s` among them."""

AnswerRequest = Callable[[ClientRequest, ClientResponse], Awaitable[None]]
"""Answers a request, here or in another process."""


class Gateway:
    """ASGI app. Runs on the event loop that calls `start`, which is the table's, too."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Sequence[ServedModel],
        table: Table,
        *,
        unreachable: Callable[[str], Awaitable[None]] | None = None,
        operate: Operate | None = None,
        wake: Callable[[str], Awaitable[None]] | None = None,
        routers: Mapping[str, Choose] | None = None,
        shared_figures: Path | None = None,
        jobs: AnswerRequest | None = None,
        settle: Settle | None = None,
    ) -> None:
        """unreachable: called with a model's id when a replica on another node refuses TCP connections.
        operate: performs operations of `/admin`. wake: starts or wakes a model for which requests wait;
        returns when that is done, or where another component does it. routers: of models whose replicas
        another component picks. shared_figures: a folder in which gateways of one port, each a process, add
        up what they count. jobs: answers requests for files and batches; None where there are none. settle:
        hands tenants' usage to its store.

        Raises: ConfigError when the default model is none of `models`, or a routing policy cannot be had.
        """
        self._table = table
        self._id = uuid.uuid4().hex
        self._links = ReplicaLinks(
            table, self._id, unreachable, {model.id: model.aliases for model in models}
        )
        self._bodies = BodyBudget(config.max_bodies_bytes)
        self.connections = Connections(config.max_connections_per_address)
        self._dispatch = Dispatch(
            models, table, self._links, self._id, config.wait_for_replica_s, wake, routers or {}
        )
        self._shadows = Shadows(self._dispatch.metrics.shadows)
        self._settle_usage = settle
        self._tenants = self._make_tenants(config) if config.keyed else None
        self._unresolved = self._dispatch.metrics.model("").on("")
        self._tracing: Tracing | None = None
        self._operate = operate
        self._jobs = jobs
        self._totals = ProcessTotals(shared_figures, self._figures) if shared_figures else None
        self._draining = False
        self._adopt(config, models)

    def _adopt(self, config: GatewayConfig, models: Sequence[ServedModel]) -> None:
        """Makes what follows from the config and the models; requests that come later find it."""
        self._config = config
        self._catalogue = Catalogue(models, config.default_model)
        self._listing = Listing(models, self._table, self._links)
        self._bodies.limit = config.max_bodies_bytes
        self.connections.per_address = config.max_connections_per_address
        self._auth = Auth(
            config,
            routes.own(path for model in models for path in model.paths),
            administered=self._operate is not None,
            has_jobs=self._jobs is not None,
            keys=self._tenants.keys if self._tenants is not None and config.keyed else None,
        )
        self._http: ASGIApp = self._serve if config.cors is None else cors.allowing(config.cors, self._serve)
        own = OwnAnswers(
            self._catalogue,
            self._table,
            self._listing,
            self._links,
            self._dispatch,
            self._figures if self._totals is None else self._totals.total,
            self._auth,
        )
        self._handlers: dict[Handler, AnswerRequest | None] = {
            "engine": self._ask_engine,
            "root": own.root,
            "docs": own.docs,
            "openapi": own.openapi,
            "version": own.version,
            "models": own.models,
            "health": own.health,
            "alive": own.alive,
            "metrics": own.metrics,
            "admin": self._administer,
            "jobs": self._jobs,
        }

    async def reconfigure(
        self, config: GatewayConfig, models: Sequence[ServedModel], routers: Mapping[str, Choose]
    ) -> None:
        """Goes on with another config and other models, whose replicas the table has then or later.

        Open requests go on as they began. What the port is made of stays, and the log's format. Arguments and
        errors: as for `__init__`; ConfigError also for a file of keys that cannot be read. After an error, or
        when it is cancelled, everything is as before.
        """
        Catalogue(models, config.default_model)
        for model in models:
            self._dispatch.policy(model)
        keys = await read_keys(config)
        new = self._make_tenants(config) if self._tenants is None and config.keyed else None
        try:
            if new is not None:
                await new.start(is_late=True)
            await self._links.announce({model.id: model.aliases for model in models})
        except BaseException:
            if new is not None:
                await new.close()
            raise
        self._tenants = new or self._tenants
        if self._tenants is not None:
            self._tenants.follow(config, keys)
        self._dispatch.follow(models, config.wait_for_replica_s, routers)
        if self._draining:
            self._dispatch.drain()
        self._adopt(config, models)

    def _make_tenants(self, config: GatewayConfig) -> Tenants:
        return Tenants(config, self._settle_usage, self._dispatch.metrics, self._dispatch.served_elsewhere)

    async def start(self) -> None:
        """Starts to follow the table's replicas."""
        json_logs.configure(self._config.log_format)
        self._tracing = await asyncio.to_thread(tracing)  # its imports, where there are any, take long
        self._table.watch(self._links.join, self._links.leave, self._dispatch.offer)
        if self._tenants is not None:
            await self._tenants.start()
        if self._totals is not None:
            self._totals.join()

    def _figures(self) -> GatewayFigures:
        if self._tenants is not None:
            self._tenants.count()
        return self._dispatch.figures(self.connections)

    def drain(self) -> None:
        """Call it before the port closes. Requests that wait for a replica fail now, those that the port cuts
        when it has closed: clients that try again reach another gateway.
        """
        self._draining = True
        self._dispatch.drain()

    async def close(self) -> None:
        """Ends links and idle connections. Close the port before: it waits for open requests."""
        self.drain()
        self._dispatch.close()
        await self._shadows.close()
        await self._listing.close()
        await self._links.close()
        if self._tenants is not None:
            await self._tenants.close()
        if self._totals is not None:
            self._totals.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    @property
    def splits(self) -> Splits:
        """The versions of models, whose weights control changes, too."""
        return self._dispatch.splits

    def idle_s(self) -> dict[str, float]:
        """Seconds since a request for each model came here; of models that have had one."""
        return self._dispatch.idle_s()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = ClientRequest(scope, receive)
        reply = ClientResponse(send, request.id, request.timing, request.writer, request.path)
        request.metrics = self._unresolved
        error = None
        try:
            error = await self._answer_or_error(request, reply)
            if error is not None:
                self._show_limits(request, reply)
                reply.meter = None
                await reply.fail(error)
        except ClientGone:
            request.gone = True
        except asyncio.CancelledError:  # by the server, which lost the client
            request.gone = True
            raise
        finally:
            if request.grant is not None:  # first: nothing may keep what was reserved
                self._settle(request.grant, request, reply, error)
            request.account(reply, error)
            self._count_version(request, reply)

    async def _answer_or_error(self, request: ClientRequest, reply: ClientResponse) -> errors.Error | None:
        """Answers, or returns the error. Foreign exceptions end here: their text goes to the log only.

        Raises: ClientGone.
        """
        limit_s = self._config.request_timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await self._handle(request, reply)
        except errors.Error as error:
            return error
        except ClientGone:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not self._draining:
                raise
            task.uncancel()
            return errors.Unavailable(
                "This gateway is being stopped. Send the request again.", retry_after_s=1
            )
        except Exception as cause:
            if isinstance(cause, TimeoutError) and limit.expired():
                return errors.DeadlineExceeded(
                    f"The request was not finished within {limit_s:g} s, the time limit."
                )
            error = errors.Error()
            error.__cause__ = cause
            return error
        return None

    async def _handle(self, request: ClientRequest, reply: ClientResponse) -> None:
        if self._tenants is not None and (tokens := self._tenants.tokens) is not None:
            found = await tokens.find(given(request))
            if isinstance(found, errors.Error):
                request.refusal = found
            else:
                request.grant = found
        request.route = route = self._auth.route(request)
        if route.handler == "jobs":
            request.metrics = self._dispatch.metrics.model("").on(route.path)
        elif route.handler != "engine":
            request.metrics = None  # probes and listings are not requests to a model
        if request.method == "OPTIONS":
            await reply.whole(204, [(b"allow", route.allow.encode())], b"")
        else:
            if request.writer is not None and not route.public:
                request.writer.accept(bounds_body=True)
            routes.check_method(route, request.method)
            handle = self._handlers[route.handler]
            assert handle is not None  # else the route would be unknown
            if route.handler == "jobs":
                self._reserve(request, reply, None, "", "", tiers.FLEX)
            elif route.handler != "engine":
                self._show_limits(request, reply)
            await handle(request, reply)

    async def _ask_engine(self, request: ClientRequest, reply: ClientResponse) -> None:
        fields, passing = request.fields, request.headers
        if self._tracing is not None:
            request.trace = self._tracing.begin(request.facts(), fields, request.timing)
            passing = request.trace.passed_on(passing)
            reply.last = deque(maxlen=3)  # of a stream: its usage, an end of its protocol's, `[DONE]`
        request.timing.begin(timing.RECEIVE)
        content = RequestBody(self._bodies)
        try:
            await content.read(request.receive, request.content_length, self._config.max_body_bytes)
            request.timing.begin(timing.GATEWAY)
            kind = fields.get(b"content-type", b"")
            await content.look(kind, free=request.route.own)
            if content.is_object and b"json" not in kind.lower():  # engines may go by it
                passing = [*(field for field in passing if field[0] != b"content-type"), *JSON]
            await self._ask_model(request, reply, passing, content)
        finally:
            content.drop()

    async def _ask_model(
        self, request: ClientRequest, reply: ClientResponse, passing: Headers, content: RequestBody
    ) -> None:
        route = request.route
        named = content.fields.model or request.queried("model")
        catalogue = self._catalogue.only(request.models)
        about, grant = stored_responses.is_about(route), request.grant
        mark = _mark(grant.tenant) if about and grant is not None else ""
        keeper = stored_responses.keeper(self._table, route, content.fields, mark)
        if route.argument and keeper is None and not named and catalogue.default is None:
            raise stored_responses.unknown(route.argument)  # no model is the default that could know it
        if route.argument and keeper is not None:
            catalogue = self._catalogue  # it is the tenant's, whatever its key may ask for now
        named = named or (keeper.model_id if keeper else None)
        pick = partial(self._pick, request, reply, content.fields, keeper)
        model, adapter = catalogue.resolve(named, route.path if route.own else None, pick)
        if keeper is not None and keeper.model_id != model.id:
            raise stored_responses.lost()
        request.metrics = reply.metrics = self._dispatch.metrics.model(model.id).on(route.path)
        tier = self._tier(request, content)
        if content.fields.model == "":
            content.name_model(model.name)  # engines know no empty name
        self._reserve(request, reply, content, model.id, adapter, tier)
        method = "GET" if request.method == "HEAD" else request.method
        upstream = UpstreamRequest(
            request.id,
            method,
            request.target,
            passing,
            content,
            adapter,
            keeper,
            tier,
            mark,
            request.meter,
            bool(request.picked),
        )
        shadow = self._shadow(request, reply, upstream)
        try:
            await request.while_connected(self._dispatch.answer(model.id, upstream, reply))
        finally:
            if shadow is not None and not shadow.done():
                text = b"".join(reply.last or ()).decode(errors="replace")
                seconds = time.monotonic() - request.timing.started_at
                shadow.set_result(ShadowAnswer(reply.answered_by, reply.status or 0, seconds, text))

    def _pick(
        self,
        request: ClientRequest,
        reply: ClientResponse,
        fields: Fields,
        keeper: Replica | None,
        versions: Sequence[ServedModel],
    ) -> ServedModel:
        """The version that answers: that of the replica which alone can, else by weight."""
        by_id = {model.id: model for model in versions}
        if keeper is not None and keeper.model_id in by_id:
            picked = keeper.model_id
        else:
            key = "" if (grant := request.grant) is None else f"{grant.tenant}/{grant.name}"
            key = sticky_key(versions[0], fields, request.headers, key)
            picked = self._dispatch.splits.pick([*by_id], key)
        request.picked = reply.answered_by = picked
        return by_id[picked]

    def _reserve(
        self,
        request: ClientRequest,
        reply: ClientResponse,
        content: RequestBody | None,
        model: str,
        adapter: str,
        tier: Tier,
    ) -> None:
        """Reserves what a tenant's request may take. content: None for one of files or batches.

        Raises: RateLimited, QuotaExhausted; BadRequest, Forbidden for one that asks for too much.
        """
        if (grant := request.grant) is None or self._tenants is None:
            return
        path = request.route.path
        if content is None or request.route.argument is not None or path in _FREE:
            request.meter = meter = self._tenants.begin(grant, Asked(free=True), model, adapter, tier)
        else:
            if self._config.isolate_cache:
                content.salt(grant.tenant, path)
            asked = content.asked(path, grant.most_tokens, self._table.max_model_len(model))
            if asked.streams and path in _USAGE_ON_REQUEST:
                asked.hides = content.ask_for_usage()
            request.meter = meter = self._tenants.begin(grant, asked, model, adapter, tier)
            reply.meter = meter.stream if asked.streams else meter.whole
        reply.more = limits.headers(grant.limited, meter.begun)

    def _show_limits(self, request: ClientRequest, reply: ClientResponse) -> None:
        """In an answer of this gateway's own."""
        if request.grant is not None and request.grant.limited and not reply.started:
            reply.more = limits.headers(request.grant.limited, int(time.monotonic()))

    def _settle(
        self, grant: Grant, request: ClientRequest, reply: ClientResponse, error: errors.Error | None
    ) -> None:
        """Charges what the request took; nothing where it was refused before it reached a replica."""
        assert self._tenants is not None
        if (meter := request.meter) is None:
            if error is not None and request.metrics is not None:
                self._tenants.refused(grant, request.metrics.model_id)
            return
        status = reply.status
        refused = not request.gone if status is None else status >= 400
        reached = reply.timing.failures > 0 or timing.REPLICA in dict(reply.timing.laps)
        failed = reply.broken or (refused and status is not None)
        tokens = meter.tokens(answered=reached and not refused)
        model = reply.answered_by or (request.metrics.model_id if request.metrics else "")
        self._tenants.end(meter, model, tokens, failed=failed, reached=reached)

    def _shadow(
        self, request: ClientRequest, reply: ClientResponse, upstream: UpstreamRequest
    ) -> asyncio.Future[ShadowAnswer] | None:
        """Asks another version as well, where the model has a shadow. Returns what waits for the client's
        answer.
        """
        if not request.picked or not upstream.body.is_object:
            return None
        may_store = stored_responses.is_about(request.route)
        if may_store and not stored_responses.stands_alone(request.route, upstream):
            return None
        found = self._dispatch.splits.shadow(request.picked)
        body = upstream.body.twin() if found is not None else None
        if found is None or body is None:
            return None
        (version, config), client = found, asyncio.get_running_loop().create_future()
        asked = replace(
            upstream, id=f"{request.id}-shadow", body=body, tier=tiers.FLEX, charge=None, is_split=False
        )

        async def ask(send: Send) -> None:
            if may_store:
                body.store_nothing()
            await self._dispatch.shadow(version, asked, ClientResponse(send, asked.id, timing.Timing()))

        about = {"request_id": request.id, "path": request.path, "request": msgspec.Raw(body.content)}
        task = self._shadows.begin(Shadow(version, ask, config.answers, about, client))
        if task is None:
            body.drop()
            return None
        task.add_done_callback(lambda _: body.drop())
        if config.answers is not None:
            reply.last = deque(maxlen=_PIECES)
        return client

    def _count_version(self, request: ClientRequest, reply: ClientResponse) -> None:
        """For the model's canary: what another version had to answer has failed, too."""
        picked, stood_in = request.picked, reply.answered_by != request.picked
        if picked and not self._draining and (stood_in or not request.gone):
            failed = stood_in or reply.broken or (reply.status or 0) >= 500
            self._dispatch.splits.ended(picked, failed=failed)

    def _tier(self, request: ClientRequest, content: RequestBody) -> Tier:
        """The request's class. The body names it to Responses alone: they repeat it. Raises: BadRequest."""
        named = tiers.of_header(request.fields.get(link.TIER))
        if content.is_object:
            named = named or tiers.of_body(content.fields.service_tier, request.route.path)
        tier = named or tiers.DEFAULT
        if tier == tiers.PRIORITY and not self._config.priority_tier:
            tier = tiers.DEFAULT
        if content.is_object:
            content.name_tier(tier if request.route.path == _RESPONSES else None)
        return tier

    async def _administer(self, request: ClientRequest, reply: ClientResponse) -> None:
        """200 when all replicas have done it; 502 when one has not: the answer says which one and why."""
        assert self._operate is not None
        operation, content = request.route.argument or "", RequestBody(self._bodies)
        try:
            await content.read(request.receive, request.content_length, self._config.max_body_bytes)
            if operation == admin.USAGE:
                named = ("by", "since", "until")
                arguments = {name: text for name in named if (text := request.queried(name))}
            elif operation.startswith(admin.ORGANIZATION):
                kind = operation.partition("/")[2]
                operation, arguments = admin.ORGANIZATION, {"kind": kind, "query": request.parameters()}
            elif operation.partition("/")[0] == admin.FLEET:
                match = request.fields.get(b"if-match")
                operation, arguments = admin.fleet_call(operation, request.method, content.content, match)
            else:
                arguments = admin.arguments(operation, content.content, request.queried("model"))
        finally:
            content.drop()
        if request.method != "GET" and operation != f"{admin.FLEET}/plan":
            grant = request.grant
            arguments["changed_by"] = "the admin key" if grant is None else f"key {grant.tenant}/{grant.name}"
        found = await self._operate(operation, arguments)
        if operation == admin.STATUS:
            found = admin.with_batch(found, self._table.ready)
        content = msgspec.json.encode(found, enc_hook=repr)  # workers' results need not be values of JSON
        await reply.whole(200 if found.get("ok", True) else 502, JSON, content)
