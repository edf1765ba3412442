"""A decode replica's client of the prefill replicas of its model: a gateway inside its process.

That picks, retries and excludes them as the public gateway does with replicas. When one joins, one prompt is
computed there and fetched, so that the engines are connected before a client waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from ray.serve.handle import DeploymentHandle

from penstock import asgi
from penstock.asgi import ASGIApp, Scope
from penstock.asgi_client import ask
from penstock.config import GatewayConfig, LLMConfig
from penstock.config.derive.prefill import prefill_half, prefill_name
from penstock.engine_control import DEFAULT_WEIGHTS
from penstock.layers.prefill import WHERE, for_prefill
from penstock.serve.fleet import membership
from penstock.serve.fleet.membership import Members
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.transport.address import Address
from penstock.transport.link import WEIGHTS

log = logging.getLogger(__name__)

_WARM_PATH, _WARM_TOKENS = "/v1/completions", 256
_WARM_LIMIT_S = 60.0


class PrefillClient:
    """For one model; `layers.prefill` calls it."""

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
        no_queue = replace(self._card, max_queued_requests=0)  # the prompt is computed here instead
        self._gateway = self._gateway_to(self._table, no_queue, wait_s=0.0)
        self._warming: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to follow the prefill replicas."""
        await self._gateway.start()
        membership.follow(prefill_name(self._model_id), self._handle, self._members)

    async def ask(self, scope: Scope, body: bytes) -> bytes | None:
        """A prefill replica's response; None if there is none."""
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        return await self._send(self._gateway, scope["path"], body, fields)

    async def close(self) -> None:
        for task in self._warming:
            task.cancel()
        await self._gateway.close()

    def _gateway_to(self, table: Table, card: ServedModel, wait_s: float) -> Gateway:
        config = GatewayConfig(api_key=None, admin_key=None, wait_for_replica_s=wait_s)
        return Gateway(config, [card], table, unreachable=self._open_network)

    async def _open_network(self, model_id: str) -> None:
        await self._handle.broadcast("listen_on_network").results_async()

    async def _send(
        self, gateway: Gateway, path: str, body: bytes, fields: Mapping[str, str]
    ) -> bytes | None:
        answer = await ask(gateway, path, body, fields)
        theirs = answer.headers.get(WEIGHTS.decode(), DEFAULT_WEIGHTS)
        if answer.status == 200 and theirs == self._weights():  # the cache of other weights is useless
            return answer.body
        why = answer.body[:500]
        log.info("%s: no prefill replica took a prompt: %d %s", self._model_id, answer.status, why)
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
        gateway = self._gateway_to(table, self._card, _WARM_LIMIT_S)
        prompt = {"model": self._model_id, "prompt": [0] * _WARM_TOKENS, "max_tokens": 1}
        try:
            async with asyncio.timeout(_WARM_LIMIT_S):
                await gateway.start()
                table.set_members(self._model_id, {address.replica_id: address})
                prefill = msgspec.json.encode(for_prefill(_WARM_PATH, prompt))
                answer = await self._send(gateway, _WARM_PATH, prefill, {})
                if where := (asgi.parsed(answer or b"") or {}).get(WHERE):
                    fetch = msgspec.json.encode({**prompt, WHERE: where})
                    await ask(self._engine_app, _WARM_PATH, fetch)  # the time limit ends one from a dead peer
        except TimeoutError:  # the first real prompt connects them instead
            log.info("%s: prefill replica %s is not warm yet", self._model_id, address.replica_id)
        finally:
            await gateway.close()
