"""The Files and Batches APIs as an ASGI app. The gateway in front of it has authenticated the client.

Source: OpenAI's API reference, /files and /batches.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from penstock.asgi import ASGIApp
from penstock.data.storage.paths import StoragePath
from penstock.errors import Error, TooLarge
from penstock.jobs.owner import owner_of
from penstock.jobs.service import JobService
from penstock.on_thread import completed, opened
from penstock.openai import errors as openai_errors

log = logging.getLogger(__name__)

_BODY_BYTES = 64 * 1024
"""Of a batch to create: a few names, and metadata of at most 16 times 576 characters."""

_PIECE_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")


def make_app(service: JobService) -> ASGIApp:
    """The app over a service, which may still be waiting for its storage."""
    endpoints = _Endpoints(service)
    routes = [
        ("/v1/files", "POST", endpoints.create_file),
        ("/v1/files", "GET", endpoints.files),
        ("/v1/files/{id}", "GET", endpoints.file),
        ("/v1/files/{id}", "DELETE", endpoints.delete_file),
        ("/v1/files/{id}/content", "GET", endpoints.content),
        ("/v1/batches", "POST", endpoints.create_batch),
        ("/v1/batches", "GET", endpoints.batches),
        ("/v1/batches/{id}", "GET", endpoints.batch),
        ("/v1/batches/{id}/cancel", "POST", endpoints.cancel_batch),
    ]
    return Starlette(routes=[Route(path, _guarded(call), methods=[method]) for path, method, call in routes])


_Endpoint = Callable[[Request], Awaitable[Response]]


def _guarded(call: _Endpoint) -> _Endpoint:
    """Errors in OpenAI's form; what is not ours goes to the log."""

    async def guarded(request: Request) -> Response:
        try:
            return await call(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as cause:
            error = cause if isinstance(cause, Error) else Error()
            if error is not cause:
                log.error("%s %s failed.", request.method, request.url.path, exc_info=cause)
            body = openai_errors.envelope(error)
            fields = {name.decode(): value.decode() for name, value in openai_errors.headers(error, body)}
            return Response(body, status_code=error.status, headers=fields)

    return guarded


class _Endpoints:
    def __init__(self, service: JobService) -> None:
        self._service = service

    async def create_file(self, request: Request) -> Response:
        files = self._service.ready().files
        kind = request.headers.get("content-type", "")
        record = await files.create(kind, request.stream(), owner_of(request))
        return _json(record.public())

    async def files(self, request: Request) -> Response:
        return _json(self._service.ready().files.listed(dict(request.query_params), owner_of(request)))

    async def file(self, request: Request) -> Response:
        files = self._service.ready().files
        return _json(files.get(request.path_params["id"], owner_of(request)).public())

    async def delete_file(self, request: Request) -> Response:
        files = self._service.ready().files
        return _json(await files.delete(request.path_params["id"], owner_of(request)))

    async def content(self, request: Request) -> Response:
        files = self._service.ready().files
        at, size = await files.content(request.path_params["id"], owner_of(request))
        return _content(at, size, request.headers.get("range"), head=request.method == "HEAD")

    async def create_batch(self, request: Request) -> Response:
        service = self._service.ready()
        record = await service.create_batch(await _body(request), owner_of(request))
        return _json(await service.batches.shown(record))

    async def batches(self, request: Request) -> Response:
        batches = self._service.ready().batches
        return _json(await batches.listed(dict(request.query_params), owner_of(request)))

    async def batch(self, request: Request) -> Response:
        batches = self._service.ready().batches
        return _json(await batches.shown(batches.get(request.path_params["id"], owner_of(request))))

    async def cancel_batch(self, request: Request) -> Response:
        service = self._service.ready()
        record = await service.cancel_batch(request.path_params["id"], owner_of(request))
        return _json(await service.batches.shown(record))


async def _body(request: Request) -> bytes:
    """Raises: TooLarge."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > _BODY_BYTES:
            raise TooLarge(f"The request has more than {_BODY_BYTES:,} bytes.")
    return bytes(content)


def _json(found: object) -> Response:
    return Response(msgspec.json.encode(found), media_type="application/json")


def _content(at: StoragePath, size: int, wanted: str | None, *, head: bool = False) -> Response:
    """A file, whole or one range of it (RFC 9110, 14). size: in bytes. wanted: the Range header.

    A range that cannot be read, and several of them, give the whole file.
    """
    headers = {"accept-ranges": "bytes", "content-type": "application/octet-stream"}
    match = _RANGE.fullmatch(wanted.strip()) if wanted is not None else None
    if match is None or match[1] == match[2] == "":
        span, status = range(size), 200
    else:
        span, status = _span(match[1], match[2], size), 206
        if not span:
            return Response(status_code=416, headers={**headers, "content-range": f"bytes */{size}"})
        headers["content-range"] = f"bytes {span.start}-{span.stop - 1}/{size}"
    headers["content-length"] = str(len(span))
    if head:
        return Response(status_code=status, headers=headers)
    return StreamingResponse(_pieces(at, span), status_code=status, headers=headers)


def _span(first: str, last: str, size: int) -> range:
    if not first:  # the last bytes
        return range(max(0, size - int(last)), size)
    return range(int(first), min(int(last) + 1, size) if last else size)


async def _pieces(at: StoragePath, span: range) -> AsyncIterator[bytes]:
    """Raises: Unavailable, SourceNotFound, OSError."""
    async with opened(at.open, lambda file: file.close()) as file:
        await completed(asyncio.to_thread(file.seek, span.start))
        left = len(span)
        while left:
            piece = await completed(asyncio.to_thread(file.read, min(_PIECE_BYTES, left)))
            if not piece:
                raise EOFError(f"'{at.url}' has become shorter.")
            left -= len(piece)
            yield piece
