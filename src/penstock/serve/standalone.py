"""HTTP to a model that is deployed without a router: a gateway in the replica, before its own listener.

So it answers exactly as behind an `LLMRouter`: the same errors, ids and limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.responses import Response

from penstock.config import GatewayConfig, LLMConfig
from penstock.door.address import Address
from penstock.engine import Receive, Scope, Send
from penstock.serve.cards import ModelCard
from penstock.serve.coalesce import Coalesced
from penstock.serve.gateway import Gateway
from penstock.serve.proxied import Proxied
from penstock.serve.table import Table


async def alone(config: LLMConfig, address: Address, paths: Sequence[str]) -> Gateway:
    """A gateway for the one replica at `address`. paths: the server's own."""
    table = Table(address.node_id)
    # Among one there is no choice.
    card = replace(ModelCard.of(config, paths=paths), routing_policy="power_of_two")
    gateway = Gateway(GatewayConfig(), [card], table)
    await gateway.start()
    table.set_members(config.model_id, {address.replica_id: address})
    return gateway


class Through(Response):
    """Hands Serve's ASGI conversation to the gateway: Serve lets a `Response` answer for itself."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway = Coalesced(Proxied(gateway))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._gateway(scope, receive, send)
