"""The content of a file as an HTTP response, whole or one range of it (RFC 9110, 14)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import closing

from starlette.responses import Response, StreamingResponse

from penstock.data.storage.paths import StoragePath

_PIECE_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=([0-9]{0,15})-([0-9]{0,15})")


def content(at: StoragePath, size: int, wanted: str | None, *, head: bool = False) -> Response:
    """size: of the file, in bytes. wanted: the Range header.

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
    with closing(await asyncio.to_thread(at.open)) as file:
        await asyncio.to_thread(file.seek, span.start)
        left = len(span)
        while left:
            piece = await asyncio.to_thread(file.read, min(_PIECE_BYTES, left))
            if not piece:
                raise EOFError(f"'{at.url}' has become shorter.")
            left -= len(piece)
            yield piece
