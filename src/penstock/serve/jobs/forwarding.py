"""Requests for files and batches, passed on by the gateway to the process that answers them.

Bodies stream both ways: of an upload or a download only what the sockets hold is in memory. It knows no Ray.
"""

from __future__ import annotations

import asyncio

from penstock.asgi import ClientGone
from penstock.errors import Unavailable
from penstock.jobs.owner import Owner
from penstock.serve.gateway.request import ClientRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.http.private_listener import ListenerClient
from penstock.transport import headers
from penstock.transport.connection import ReplicaConnection

_START_S = 30.0
"""For the process to start: it ends when it has nothing to do."""

_PAUSE_S = 0.5
_GATEWAY = "gateway"


class JobsForwarder:
    """client: of the process's listener; to ask for its address starts the process if need be."""

    def __init__(self, client: ListenerClient) -> None:
        self._client = client
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the process without a request."""
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        while True:
            try:
                await self._client.find()
                return
            except Unavailable:
                await asyncio.sleep(_PAUSE_S)

    def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()

    async def __call__(self, request: ClientRequest, reply: ClientResponse) -> None:
        """Relays one exchange.

        Raises: ClientGone; Unavailable when the process cannot be reached, or ends before it has answered.
        """
        try:
            address, connection = await self._client.connect(_START_S)
        except TimeoutError as error:
            raise Unavailable(
                "Files and batches do not answer now; try again in a moment.", retry_after_s=5
            ) from error
        try:
            length = request.content_length
            chunked = length is None and b"transfer-encoding" in request.fields
            own = headers.own(address.secret, _GATEWAY, request.id)
            if (grant := request.grant) is not None:
                models = None if grant.models is None else sorted(grant.models)
                own.append(Owner(grant.tenant, grant.name, models, sorted(grant.scopes)).header())
            size = None if chunked else length or 0
            connection.request(headers.to_replica(request.method, request.target, request.headers, own, size))
            await _send_body(connection, request, chunked=chunked)
            await request.while_connected(_relay(connection, request, reply))
            if (await connection.head()).status >= 400:  # it may be another process's
                self._client.forget()
        except ConnectionError as error:
            self._client.forget()
            raise Unavailable(
                "The connection to the Files and Batches service was lost. Retry the request.",
                retry_after_s=1,
            ) from error
        finally:
            connection.abort()


async def _send_body(connection: ReplicaConnection, request: ClientRequest, *, chunked: bool) -> None:
    """Until its end, or until the answer begins, which then is a refusal. Raises: ClientGone."""
    more = True
    while more and not connection.heard:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece, more = message.get("body", b""), message.get("more_body", False)
        if piece:
            connection.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await connection.drain()
    if chunked and not connection.heard:
        connection.write(b"0\r\n\r\n")


async def _relay(connection: ReplicaConnection, request: ClientRequest, reply: ClientResponse) -> None:
    head = await connection.head()
    await reply.start(head.status, headers.to_client(head.headers))
    while request.method != "HEAD" and (piece := await connection.read()):
        await reply.piece(piece)
    await reply.piece(b"", more=False)
