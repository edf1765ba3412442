"""What the gateway answers itself: the list of models, health, and metrics."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.config.derive.prefill import prefill_name
from penstock.serve.fleet.links import ReplicaLinks
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.adapter_listing import Listing
from penstock.serve.gateway.catalogue import Catalogue
from penstock.serve.gateway.dispatch import Dispatch
from penstock.serve.gateway.request import ClientRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.routes import Route
from penstock.serve.gateway.telemetry import engine_metrics
from penstock.serve.http.connection_limits import Connections

JSON = [(b"content-type", b"application/json")]
_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]
_PROMETHEUS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """One method for each handler; all have the same arguments."""

    _catalogue: Catalogue
    _table: Table
    _listing: Listing
    _links: ReplicaLinks
    _dispatch: Dispatch
    _connections: Connections

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
        """200 when every model can answer. For load balancers and Kubernetes."""
        models = {model_id: self._counts(model_id) for model_id in self._catalogue.models}
        healthy = all(
            counts["ready"] or counts["resting"] or self._catalogue.models[model_id].start_s is not None
            for model_id, counts in models.items()
        )
        content = msgspec.json.encode({"status": "ok" if healthy else "unavailable", "models": models})
        await reply.whole(200 if healthy else 503, JSON, content)

    def _counts(self, model_id: str) -> dict[str, int]:
        """resting: asleep or paused on request."""
        members = self._table.members(model_id)
        resting = sum(replica.state in ("asleep", "paused") for replica in members)
        return {"ready": len(self._table.ready(model_id)), "resting": resting, "replicas": len(members)}

    async def alive(self, request: ClientRequest, route: Route, reply: ClientResponse) -> None:
        await reply.whole(200, _TEXT, b"success")

    async def metrics(self, request: ClientRequest, route: Route, reply: ClientResponse) -> None:
        shown = {model_id for model_id, model in self._catalogue.models.items() if model.engine_metrics}
        shown |= {prefill_name(model_id) for model_id in shown}
        replicas = [r for r in self._table if r.model_id in shown and r.state in ("ready", "draining")]
        engine_series = await engine_metrics.scrape(replicas, self._links)
        await reply.whole(200, _PROMETHEUS, self._dispatch.metrics_text(self._connections) + engine_series)
