"""What the gateway answers itself: what it is, the list of models, health, and metrics."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import msgspec

from penstock import __version__
from penstock.config.derive.prefill import prefill_name
from penstock.metrics import GatewayFigures
from penstock.serve.fleet.links import ReplicaLinks
from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table
from penstock.serve.gateway import openapi
from penstock.serve.gateway.auth import Auth
from penstock.serve.gateway.catalogue import Catalogue, ServedModel
from penstock.serve.gateway.dispatch import Dispatch
from penstock.serve.gateway.request import ClientRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.routes import ALL
from penstock.serve.gateway.telemetry import engine_metrics
from penstock.transport import link

log = logging.getLogger(__name__)

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

FRESH_S = 5.0
"""How long a list of adapters is reused."""

_WAIT_S = 3.0  # for such a list; after that the last known one is shown
_ASK_S = 60.0  # a store of thousands of adapters may need that long, once
_DOCUMENT_S = 10.0  # vLLM takes a second to describe its endpoints for the first time
_DOCS = (files("penstock.serve.gateway") / "page.html").read_bytes()
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
    """One method for each handler; all have the same arguments.

    documents: JSON by which engines describe themselves, by replica and path, as long as the replica is.
    """

    _catalogue: Catalogue
    _table: Table
    _listing: Listing
    _links: ReplicaLinks
    _dispatch: Dispatch
    _figures: Callable[[], GatewayFigures]
    _auth: Auth
    _documents: dict[tuple[str, str], openapi.Document] = field(
        default_factory=dict[tuple[str, str], openapi.Document]
    )

    async def root(self, request: ClientRequest, reply: ClientResponse) -> None:
        """Says nothing that needs a key."""
        places = {name: request.root + at if at.startswith("/") else at for name, at in _ABOUT.items()}
        await reply.whole(200, JSON, msgspec.json.encode(places))

    async def docs(self, request: ClientRequest, reply: ClientResponse) -> None:
        """A page over `/openapi.json`, without facts of the service."""
        await reply.whole(200, _PAGE, _DOCS)

    async def version(self, request: ClientRequest, reply: ClientResponse) -> None:
        engines = {
            model.id: {"engine": model.engine, "version": (said or {}).get("version")}
            for model, said in await self._described("/version", request)
        }
        content = msgspec.json.encode({"version": __version__, "models": engines})
        await reply.whole(200, JSON, content)

    async def openapi(self, request: ClientRequest, reply: ClientResponse) -> None:
        whole = await asyncio.to_thread(  # it has thousands of parts
            openapi.document,
            await self._described("/openapi.json", request),
            [one for one in ALL if one.handler != "jobs" or self._auth.has_jobs],
            root=request.root,
            keyed=self._auth.keyed,
            administered=self._auth.administered,
            has_default=self._catalogue.only(request.models).default is not None,
        )
        await reply.whole(200, JSON, msgspec.json.encode(whole))

    async def _described(self, path: str, request: ClientRequest) -> list[openapi.Described]:
        """What an engine of each model that the client may use answers to GET `path`."""
        models = self._catalogue.only(request.models).models.values()
        found = await asyncio.gather(*(self._document(model.id, path) for model in models))
        return list(zip(models, found, strict=True))

    async def _document(self, model_id: str, path: str) -> openapi.Document | None:
        """None when no replica is ready, or has it."""
        ready = self._table.ready(model_id)
        for replica in ready:
            if (replica.id, path) in self._documents:
                return self._documents[replica.id, path]
        if not ready:
            return None
        try:
            text = await self._links.get(ready[0], path, _DOCUMENT_S)
            found = msgspec.json.decode(text, type=dict[str, Any])
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            log.debug("replica %s of %s has no %s: %s", ready[0].id, model_id, path, error)
            return None
        present = {replica.id for replica in self._table}
        for key in [known for known in self._documents if known[0] not in present]:
            del self._documents[key]
        self._documents[ready[0].id, path] = found
        return found

    async def models(self, request: ClientRequest, reply: ClientResponse) -> None:
        catalogue = self._catalogue.only(request.models)
        lengths = {model_id: self._table.max_model_len(model_id) for model_id in catalogue.models}
        name = request.route.argument
        if name is None:
            content = catalogue.show_all(lengths, await self._listing.all())
        else:
            model, adapter = catalogue.find(name)
            adapters = await self._listing.adapters(model.id) if adapter else ()
            content = catalogue.show(model, adapter, lengths[model.id], adapters, name)
        await reply.whole(200, JSON, content)

    async def health(self, request: ClientRequest, reply: ClientResponse) -> None:
        """200 when every model can answer. For load balancers and Kubernetes. Lists models with the key."""
        models = {model_id: self._counts(model_id) for model_id in self._catalogue.models}
        healthy = all(
            counts["ready"] or counts["resting"] or self._catalogue.models[model_id].start_s is not None
            for model_id, counts in models.items()
        )
        found: dict[str, object] = {"status": "ok" if healthy else "unavailable"}
        if request.has_key:
            found["models"] = {
                model_id: models[model_id] for model_id in self._catalogue.only(request.models).models
            }
        content = msgspec.json.encode(found)
        await reply.whole(200 if healthy else 503, JSON, content)

    def _counts(self, model_id: str) -> dict[str, Any]:
        """resting: asleep or paused on request. wanted: replicas that Ray Serve should run."""
        members = self._table.members(model_id)
        resting = sum(replica.state in ("asleep", "paused") for replica in members)
        ready, wanted = len(self._table.ready(model_id)), self._table.wanted.get(model_id, len(members))
        counts = {"ready": ready, "resting": resting, "replicas": len(members), "wanted": wanted}
        return {**counts, **self._dispatch.splits.shown(model_id)}

    async def alive(self, request: ClientRequest, reply: ClientResponse) -> None:
        await reply.whole(200, _TEXT, b"success")

    async def metrics(self, request: ClientRequest, reply: ClientResponse) -> None:
        shown = {model_id for model_id, model in self._catalogue.models.items() if model.engine_metrics}
        shown |= {prefill_name(model_id) for model_id in shown}
        replicas = [r for r in self._table if r.model_id in shown and r.state in ("ready", "draining")]
        engine_series = await engine_metrics.scrape(replicas, self._links)
        await reply.whole(200, _PROMETHEUS, self._dispatch.metrics.text(self._figures()) + engine_series)


@dataclass(slots=True)
class _Known:
    names: tuple[str, ...] = ()
    until: float = 0.0
    asking: asyncio.Task[None] | None = None


class Listing:
    """The adapters of all models behind one gateway, each as listed by one of its replicas.

    Replicas have the path and the credentials; the gateway reads no storage itself. Both cache the list for
    some seconds, and the gateway shows the last known list when no replica can answer.
    """

    def __init__(self, models: Sequence[ServedModel], table: Table, links: ReplicaLinks) -> None:
        self._known = {model.id: _Known() for model in models if model.adapter_slots}
        self._table = table
        self._links = links

    async def adapters(self, model_id: str) -> Sequence[str]:
        """Names, sorted; none for a model that takes no adapters."""
        known = self._known.get(model_id)
        if known is None:
            return ()
        ready = self._table.ready(model_id)
        if ready and asyncio.get_running_loop().time() >= known.until:
            if known.asking is None:
                known.asking = asyncio.create_task(self._ask(random.choice(ready), known))
            await asyncio.wait([known.asking], timeout=_WAIT_S)
        return known.names

    async def all(self) -> Mapping[str, Sequence[str]]:
        """By model; all are queried at the same time."""
        names = await asyncio.gather(*map(self.adapters, self._known))
        return dict(zip(self._known, names, strict=True))

    async def close(self) -> None:
        """Cancels open queries."""
        asking = [known.asking for known in self._known.values() if known.asking]
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)

    async def _ask(self, replica: Replica, known: _Known) -> None:
        try:
            known.names = msgspec.json.decode(
                await self._links.get(replica, link.ADAPTERS_PATH, _ASK_S), type=tuple[str, ...]
            )
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("The adapters of model '%s' cannot be listed now: %s", replica.model_id, error)
        finally:
            known.until = asyncio.get_running_loop().time() + FRESH_S
            known.asking = None
