"""What the gateway answers itself: what it is, the list of models, health, and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

import msgspec

from penstock import __version__
from penstock.config.derive.prefill import prefill_name
from penstock.metrics import GatewayFigures
from penstock.serve.fleet.links import ReplicaLinks
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.adapter_listing import Listing
from penstock.serve.gateway.catalogue import Catalogue
from penstock.serve.gateway.description import openapi
from penstock.serve.gateway.description.engine_documents import EngineDocuments
from penstock.serve.gateway.dispatch import Dispatch
from penstock.serve.gateway.request import ClientRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.routes import ALL, Handler, Route
from penstock.serve.gateway.telemetry import engine_metrics

JSON = [(b"content-type", b"application/json")]
_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]
_PROMETHEUS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
_PAGE = [
    (b"content-type", b"text/html; charset=utf-8"),
    (  # it asks no other host for anything
        b"content-security-policy",
        b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]

_DOCS = (files("penstock.serve.gateway.description") / "page.html").read_bytes()
_ABOUT = {
    "service": "penstock",
    "about": "OpenAI's and Anthropic's APIs for large language models",
    "models": "/v1/models",
    "documentation": "/docs",
    "openapi": "/openapi.json",
    "version": "/version",
    "health": "/health",
    "metrics": "/metrics",
}


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """One method for each handler; all have the same arguments."""

    _catalogue: Catalogue
    _table: Table
    _listing: Listing
    _links: ReplicaLinks
    _dispatch: Dispatch
    _figures: Callable[[], GatewayFigures]
    _documents: EngineDocuments
    _keyed: bool
    _administered: bool
    _has_jobs: bool

    async def root(self, request: ClientRequest, route: Route, reply: ClientResponse) -> None:
        """Says nothing that needs a key."""
        places = {name: request.root + at if at.startswith("/") else at for name, at in _ABOUT.items()}
        await reply.whole(200, JSON, msgspec.json.encode(places))

    async def docs(self, request: ClientRequest, route: Route, reply: ClientResponse) -> None:
        """A page over `/openapi.json`, without facts of the service."""
        await reply.whole(200, _PAGE, _DOCS)

    async def version(self, request: ClientRequest, route: Route, reply: ClientResponse) -> None:
        models = self._catalogue.models.values()
        found = await asyncio.gather(*(self._documents.get(model.id, "/version") for model in models))
        engines = {
            model.id: {"engine": model.engine, "version": (said or {}).get("version")}
            for model, said in zip(models, found, strict=True)
        }
        content = msgspec.json.encode({"version": __version__, "models": engines})
        await reply.whole(200, JSON, content)

    async def openapi(self, request: ClientRequest, route: Route, reply: ClientResponse) -> None:
        models = self._catalogue.models.values()
        found = await asyncio.gather(*(self._documents.get(model.id, "/openapi.json") for model in models))
        whole = await asyncio.to_thread(  # it has thousands of parts
            openapi.document,
            [
                openapi.Described(
                    model.id, said, model.paths, (model.id, *model.aliases), bool(model.adapter_slots)
                )
                for model, said in zip(models, found, strict=True)
            ],
            [
                openapi.Endpoint(one.path, one.methods, one.handler is Handler.ENGINE, one.public)
                for one in ALL
                if one.handler is not Handler.JOBS or self._has_jobs
            ],
            root=request.root,
            keyed=self._keyed,
            administered=self._administered,
            has_default=self._catalogue.default is not None,
        )
        await reply.whole(200, JSON, msgspec.json.encode(whole))

    async def models(self, request: ClientRequest, route: Route, reply: ClientResponse) -> None:
        lengths = {model_id: self._table.max_model_len(model_id) for model_id in self._catalogue.models}
        if route.argument is None:
            content = self._catalogue.show_all(lengths, await self._listing.all())
        else:
            model, adapter = self._catalogue.find(route.argument)
            adapters = await self._listing.adapters(model.id) if adapter else ()
            name = None if adapter else route.argument
            content = self._catalogue.show(model, adapter, lengths[model.id], adapters, name)
        await reply.whole(200, JSON, content)

    async def health(self, request: ClientRequest, route: Route, reply: ClientResponse) -> None:
        """200 when every model can answer. For load balancers and Kubernetes. Lists models with the key."""
        models = {model_id: self._counts(model_id) for model_id in self._catalogue.models}
        healthy = all(
            counts["ready"] or counts["resting"] or self._catalogue.models[model_id].start_s is not None
            for model_id, counts in models.items()
        )
        found: dict[str, object] = {"status": "ok" if healthy else "unavailable"}
        content = msgspec.json.encode(found | {"models": models} if request.has_key else found)
        await reply.whole(200 if healthy else 503, JSON, content)

    def _counts(self, model_id: str) -> dict[str, int]:
        """resting: asleep or paused on request. wanted: replicas that Ray Serve should run."""
        members = self._table.members(model_id)
        resting = sum(replica.state in ("asleep", "paused") for replica in members)
        ready, wanted = len(self._table.ready(model_id)), self._table.wanted.get(model_id, len(members))
        return {"ready": ready, "resting": resting, "replicas": len(members), "wanted": wanted}

    async def alive(self, request: ClientRequest, route: Route, reply: ClientResponse) -> None:
        await reply.whole(200, _TEXT, b"success")

    async def metrics(self, request: ClientRequest, route: Route, reply: ClientResponse) -> None:
        shown = {model_id for model_id, model in self._catalogue.models.items() if model.engine_metrics}
        shown |= {prefill_name(model_id) for model_id in shown}
        replicas = [r for r in self._table if r.model_id in shown and r.state in ("ready", "draining")]
        engine_series = await engine_metrics.scrape(replicas, self._links)
        await reply.whole(200, _PROMETHEUS, self._dispatch.metrics.text(self._figures()) + engine_series)
