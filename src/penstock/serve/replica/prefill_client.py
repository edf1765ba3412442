"""A decode replica's client of the prefill replicas of its model.

It dispatches to them as a gateway does to replicas. When one joins, one prompt is computed there and fetched,
so that the engines are connected before a client waits.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from ray.serve.handle import DeploymentHandle

from penstock import asgi
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.asgi_client import ask
from penstock.config import LLMConfig
from penstock.config.derive.prefill import prefill_half, prefill_name
from penstock.engine_control import DEFAULT_WEIGHTS
from penstock.errors import Error
from penstock.layers.adapters import adapter_of
from penstock.layers.prefill import WHERE, for_prefill
from penstock.request_context import tier
from penstock.serve.fleet import membership
from penstock.serve.fleet.links import ReplicaLinks
from penstock.serve.fleet.membership import Members
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.body import BodyBudget, RequestBody
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.gateway.dispatch import Dispatch
from penstock.serve.gateway.request import UpstreamRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.telemetry.timing import Timing
from penstock.transport import headers
from penstock.transport.address import Address
from penstock.transport.link import WEIGHTS

log = logging.getLogger(__name__)

_JSON = b"application/json"
_WARM_PATH, _WARM_TOKENS = "/v1/completions", 256
_WARM_SCOPE: Scope = {"type": "http", "path": _WARM_PATH, "headers": [(b"content-type", _JSON)]}
_WARM_LIMIT_S = 60.0


class PrefillClient:
    """Follows the prefill replicas of one model; `layers.prefill` calls it."""

    def __init__(
        self,
        config: LLMConfig,
        handle: DeploymentHandle[Any],
        engine_app: ASGIApp,
        weights: Callable[[], str],
        node_id: str,
    ) -> None:
        """engine_app: of the engine that decodes, without the layers before it. weights: their version."""
        half = prefill_half(config)
        assert half is not None
        self._model_id = config.model_id
        self._handle = handle
        self._engine_app = engine_app
        self._weights = weights
        self._table = Table(node_id)
        self._card = ServedModel.of(half)
        # Without a queue: the prompt is computed here instead.
        no_queue = replace(self._card, max_queued_requests=0, max_queued_batch=0)
        self._dispatch, self._links = self._dispatch_to(self._table, no_queue, wait_s=0.0)
        self._warming: set[asyncio.Task[None]] = set()
        membership.follow(prefill_name(self._model_id), handle, self._members)

    async def close(self) -> None:
        membership.unfollow(prefill_name(self._model_id), self._handle)
        for task in self._warming:
            task.cancel()
        if self._warming:
            await asyncio.wait(self._warming)
        await self._links.close()

    def _dispatch_to(self, table: Table, card: ServedModel, wait_s: float) -> tuple[Dispatch, ReplicaLinks]:
        """A gateway's way to the replicas in `table`; the caller closes the links."""
        sender = uuid.uuid4().hex
        links = ReplicaLinks(table, sender, self._open_network)
        dispatch = Dispatch([card], table, links, sender, wait_s)
        table.watch(links.join, links.leave, dispatch.offer)
        return dispatch, links

    async def _open_network(self, model_id: str) -> None:
        await self._handle.broadcast("listen_on_network").results_async()

    async def ask(self, scope: Scope, body: bytes, dispatch: Dispatch | None = None) -> bytes | None:
        """A prefill replica's response, as work of the caller's class; None if there is none."""
        dispatch = dispatch or self._dispatch
        path, fields, content = scope["path"], scope["headers"], RequestBody(BodyBudget(0))
        name = headers.request_id(dict(fields).get(headers.REQUEST_ID))
        adapter = adapter_of(scope)
        upstream = UpstreamRequest(name, "POST", path.encode(), fields, content, adapter, tier=tier.get())

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await dispatch.answer(self._model_id, upstream, ClientResponse(send, name, Timing(), path=path))

        try:
            content.content = body
            await content.look(_JSON)
            if content.fields.model != self._model_id:  # an alias that is newer than the prefill replica
                content.name_model(self._model_id)
            answer = await ask(app, path, body)
        except Error as error:
            log.info("%s: no prefill replica took a prompt: %s", self._model_id, error)
            return None
        theirs = answer.headers.get(WEIGHTS.decode(), DEFAULT_WEIGHTS)
        if answer.status == 200 and theirs == self._weights():  # the cache of other weights is useless
            return answer.body
        why = answer.body[:500]
        log.info("%s: no prefill replica computed a prompt: %d %s", self._model_id, answer.status, why)
        return None

    def _members(self, members: Members) -> None:
        known = {replica.id for replica in self._table.members(self._model_id)}
        self._table.set_members(self._model_id, members)
        for address in members.values():
            if address.replica_id not in known:
                task = asyncio.create_task(self._warm(address))
                self._warming.add(task)
                task.add_done_callback(self._warming.discard)

    async def _warm(self, address: Address) -> None:
        table = Table(self._table.node_id)
        dispatch, links = self._dispatch_to(table, self._card, _WARM_LIMIT_S)
        prompt = {"model": self._model_id, "prompt": [0] * _WARM_TOKENS, "max_tokens": 1}
        try:
            async with asyncio.timeout(_WARM_LIMIT_S):
                table.set_members(self._model_id, {address.replica_id: address})
                prefill = msgspec.json.encode(for_prefill(_WARM_PATH, prompt))
                answer = await self.ask(_WARM_SCOPE, prefill, dispatch)
                if where := (asgi.parsed(answer or b"") or {}).get(WHERE):
                    fetch = msgspec.json.encode({**prompt, WHERE: where})
                    await ask(self._engine_app, _WARM_PATH, fetch)  # the time limit ends one from a dead peer
        except TimeoutError:  # the first real prompt connects them instead
            log.info("%s: prefill replica %s is not warm yet", self._model_id, address.replica_id)
        finally:
            await links.close()
