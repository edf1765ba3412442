"""Ask an ASGI app without a socket: what handle methods and HTTP clients reach is the same app.

Used by `serve.replica` and `data`. It knows ASGI only: no engine, no OpenAI types beyond the end of an SSE
event.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Self

from penstock.asgi import TRUSTED, ASGIApp, Message, Receive, Scope, replay, split_events, stay

_JSON = "application/json"
_QUEUED_MESSAGES = 64  # back-pressure: the app waits when the reader is this far behind


class AppResponse:
    """A response as the app makes it: iterating gives the bytes of its body. Closing it, read or not, ends
    the app.

    status, headers: set once they have arrived.
    """

    status: int
    headers: Mapping[str, str]

    def __init__(self, app: ASGIApp, scope: Scope, request: bytes) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(_QUEUED_MESSAGES)
        self._gone = asyncio.Event()
        self._task = asyncio.create_task(self._run(app, scope, replay(request, self._disconnected)))

    async def _run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        try:
            await app(scope, receive, self._messages.put)
        finally:
            if not self._gone.is_set():  # a full queue that is not read would block this task forever
                await self._messages.put(None)

    async def _disconnected(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def message(self) -> Message | None:
        """What the app sent next; None at its end. Raises: what the app raised."""
        message = await self._messages.get()
        if message is None:
            await self._task
        return message

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while (message := await self.message()) is not None:
            if message.get("body"):
                return message["body"]
        raise StopAsyncIteration

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self])

    async def aclose(self) -> None:
        """Tells the app that the client is gone, and ends it."""
        self._gone.set()
        self._task.cancel()


async def call(
    app: ASGIApp,
    path: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    content_type: str = _JSON,
) -> AppResponse:
    """POSTs `body` to `path` of `app`. Returns with the response's status; the caller closes it.

    Raises: what the app raises before its first byte.
    """
    reply = AppResponse(app, post_scope(path, len(body), headers or {}, content_type), body)
    try:
        start = await reply.message()
    except BaseException:
        await reply.aclose()
        raise
    if start is None:
        raise RuntimeError(f"{path} ended without an answer.")
    reply.status, reply.headers = start["status"], _decoded(start)
    return reply


class WholeResponse:
    """A response, kept by its `send` as the app makes it."""

    def __init__(self) -> None:
        self._start: Message = {"status": 0, "headers": []}
        self._pieces: list[bytes] = []
        self.begun = self.ended = False

    async def send(self, message: Message) -> None:
        """For the app."""
        if message["type"] == "http.response.start":
            self._start, self.begun = message, True
        else:
            self._pieces.append(message.get("body", b""))
            self.ended = not message.get("more_body", False)

    @property
    def status(self) -> int:
        return self._start["status"]

    @property
    def headers(self) -> dict[str, str]:
        """Names are in lower case."""
        return _decoded(self._start)

    @property
    def body(self) -> bytes:
        return b"".join(self._pieces)


async def ask(
    app: ASGIApp, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> WholeResponse:
    """POSTs `body` to `path` of `app`, which runs in the caller's task and context.

    Raises: what the app raises.
    """
    response = WholeResponse()
    await app(post_scope(path, len(body), headers or {}), replay(body, stay), response.send)
    if not response.begun:
        raise RuntimeError(f"{path} ended without an answer.")
    return response


def _decoded(start: Message) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}


def post_scope(
    path: str, length: int, headers: Mapping[str, str], content_type: str = _JSON, query: bytes = b""
) -> Scope:
    """A scope of Penstock's own request. length: of its body, in bytes."""
    fixed = {"content-type": content_type, "content-length": str(length), "host": "replica"}
    merged = {name.lower(): value for name, value in headers.items()} | fixed
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in merged.items()],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "extensions": {TRUSTED: {}},
    }


async def events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[list[str], None]:
    """Whole SSE events (`data: {...}\\n\\n`), as many at a time as one piece completed."""
    rest = b""
    async for piece in pieces:
        whole, rest = split_events(rest + piece)
        if whole:
            yield [event.decode() + "\n\n" for event in whole]
    if rest:
        yield [rest.decode()]


async def batched(
    stream: AsyncGenerator[list[str], None], interval_ms: float
) -> AsyncGenerator[list[str], None]:
    """What `stream` gives within `interval_ms`, joined; the first item is never held back."""
    held: list[str] = []
    loop = asyncio.get_running_loop()
    due = loop.time()
    following = asyncio.ensure_future(anext(stream))
    try:
        while True:
            await asyncio.wait([following], timeout=max(0.0, due - loop.time()) if held else None)
            if following.done():
                try:
                    held += following.result()
                except StopAsyncIteration:
                    break
                following = asyncio.ensure_future(anext(stream))
            if held and loop.time() >= due:
                yield held
                held, due = [], loop.time() + interval_ms / 1000
        if held:
            yield held
    finally:
        following.cancel()
        await asyncio.wait([following])
        await stream.aclose()
