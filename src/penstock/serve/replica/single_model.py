"""HTTP to a model that is deployed without a router: a gateway in the replica's process.

It answers exactly as behind an `LLMRouter`: the same errors, ids and limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.responses import Response

from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.config import GatewayConfig, LLMConfig
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.http.serve_proxy import behind_serve
from penstock.transport.address import Address


async def open_gateway(
    config: LLMConfig, gateway_config: GatewayConfig, address: Address, paths: Sequence[str]
) -> tuple[Gateway, ASGIApp]:
    """A gateway to the one replica at `address`, and the app that Serve's HTTP calls. paths: its custom
    endpoints.
    """
    table = Table(address.node_id)
    # One replica leaves no choice.
    card = replace(ServedModel.of(config, paths=paths), routing_policy="power_of_two", policy_options={})
    gateway = Gateway(gateway_config, [card], table)
    await gateway.start()
    table.set_members(config.model_id, {address.replica_id: address})
    return gateway, behind_serve(gateway)


class ASGIResponse(Response):
    """Passes Serve's ASGI call on to `app`: Serve calls a `Response` as an ASGI app."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
