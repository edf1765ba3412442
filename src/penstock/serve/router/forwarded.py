"""A response that the gateway makes: what a method of an ingress returns for a request that it passes on."""

from __future__ import annotations

from starlette.responses import Response

from penstock.asgi import ASGIApp, Message, Receive, Scope, Send

_OF_THE_BODY = (b"content-length", b"content-type", b"transfer-encoding")


class Forwarded(Response):
    """The request as it came, at `path`; with `content`, that in place of its body."""

    def __init__(
        self, app: ASGIApp, path: str, content_type: str | None = None, content: bytes | None = None
    ) -> None:
        super().__init__()
        self._app = app
        self._path = path
        self._content = content
        self._content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "path": scope.get("root_path", "") + self._path}
        scope.pop("raw_path", None)
        if self._content is None:
            return await self._app(scope, receive, send)
        fields = [field for field in scope["headers"] if field[0] not in _OF_THE_BODY]
        size = str(len(self._content)).encode()
        own = [(b"content-type", (self._content_type or "").encode()), (b"content-length", size)]
        return await self._app({**scope, "headers": [*fields, *own]}, _first(self._content, receive), send)


def _first(content: bytes, receive: Receive) -> Receive:
    """`content`, then what the client does: it hangs up."""
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def received() -> Message:
        return messages.pop() if messages else await receive()

    return received
