"""The simulator's HTTP: a plain ASGI app over the engine's own `generate`.

It routes each request to its function in `endpoints`, turns errors into envelopes, and ends a request when
its client disconnects.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from penstock import asgi
from penstock.asgi import Receive, Scope, Send
from penstock.engines.sim.endpoints import Call, Endpoint, Endpoints, Simulated
from penstock.errors import Error, MethodNotAllowed, NotFound
from penstock.openai.asgi_response import send_error

log = logging.getLogger(__name__)


class App:
    """ASGI over one simulated engine."""

    def __init__(self, engine: Simulated) -> None:
        self._routes = Endpoints(engine).routes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await asgi.lifespan(receive, send)
        if scope["type"] != "http":
            return None
        with suppress(asgi.ClientGone):
            body = await asgi.read_body(receive)
            await asgi.while_connected(receive, self._answer(scope, body, send))
        return None

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        call = Call(body, dict(scope["headers"]), send)
        try:
            await self._endpoint(scope["method"], scope["path"])(call)
        except Error as error:
            await send_error(send, error, scope["path"])
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await send_error(send, Error(), scope["path"])

    def _endpoint(self, method: str, path: str) -> Endpoint:
        if endpoint := self._routes.get((method, path)):
            return endpoint
        methods = [known for known, known_path in self._routes if known_path == path]
        if methods:
            raise MethodNotAllowed(f"{path} takes {' and '.join(methods)}, not {method}.")
        raise NotFound(f"{path} is no endpoint of this engine.")
