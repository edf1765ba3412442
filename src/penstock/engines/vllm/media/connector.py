"""Loads a request's images, videos and audio: from data URLs, files, and the network (`fetch`).

vLLM reads them through a `MediaConnector`, looked up by the name in `VLLM_MEDIA_CONNECTOR`. This one is
vLLM's with our http(s) client, a limit on the pixels of all pictures of a request, and one sentence to the
client about what could not be read.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from io import BytesIO
from typing import Any

import aiohttp
from vllm import envs
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import (
    MEDIA_CONNECTOR_REGISTRY,
    ImageMediaIO,
    MediaConnector,
    MediaIO,
    VideoMediaIO,
)

from penstock.engines.vllm.arguments.environment import MEDIA_CONNECTOR
from penstock.engines.vllm.media.fetch import CheckedConnection, Refused
from penstock.request_context import Pixels, pixels

PICTURES = 4
"""Pictures of the largest size that one request may have; or more of smaller ones."""

_SHOWN = 100
_WRAPPED = str.maketrans("-_", "+/", "\n\r\t ")
"""What encoders of base64 write that vLLM's decoder refuses: line breaks, and the letters for URLs."""
_connection = functools.cache(CheckedConnection)
"""By hosts; shared by all requests, so that connections are reused."""
_ADDRESS_IN_MEMORY = re.compile(r" <[^>]* at 0x[0-9a-f]+>")
_SENTENCES: tuple[tuple[type[Exception], str], ...] = (
    (
        Refused,
        "{} leads to an address that is not public, or to a host that is not allowed; "
        "`allowed_media_domains` in engine_kwargs names the hosts that are.",
    ),
    (TimeoutError, "{} was not there in time."),
    (aiohttp.ClientResponseError, "{} cannot be fetched: its server failed."),
    (aiohttp.ClientError, "{} cannot be fetched: its server is not reached."),
    (FileNotFoundError, "{} does not exist on the server."),
)


@MEDIA_CONNECTOR_REGISTRY.register(MEDIA_CONNECTOR)
class Media(MediaConnector):
    """Created for each request that has a URL."""

    def __init__(
        self,
        media_io_kwargs: dict[str, dict[str, Any]] | None = None,
        *,
        allowed_local_media_path: str = "",
        allowed_media_domains: list[str] | None = None,
        **budgets: Any,
    ) -> None:
        """budgets: vLLM's limits on one request's media, from 0.33 on."""
        super().__init__(
            media_io_kwargs,
            _connection(frozenset(allowed_media_domains or ())),
            allowed_local_media_path=allowed_local_media_path,
            allowed_media_domains=allowed_media_domains,
            **budgets,
        )

    async def load_from_url_async(
        self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None
    ) -> Any:
        url, media_io = _plain(url), _counted(media_io, pixels.get() or Pixels())
        try:
            return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)
        except Exception as error:  # each decoder raises its own errors
            raise _refused(url, error) from error

    def load_from_url(self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None) -> Any:
        url, media_io = _plain(url), _counted(media_io, pixels.get() or Pixels())
        try:
            return super().load_from_url(url, media_io, fetch_timeout=fetch_timeout)
        except Exception as error:
            raise _refused(url, error) from error


def _plain(url: str) -> str:
    """A data URL whose base64 is in one line and in the usual alphabet; others as they are."""
    if url[:5].lower() != "data:":
        return url
    head, comma, data = url.partition(",")
    return head + comma + data.translate(_WRAPPED) if any(chr(c) in data for c in _WRAPPED) else url


def _counted(media_io: Any, read: Pixels) -> Any:
    """Loads pictures, and a video's frames that are pictures, if `read` has room for them."""
    counted = copy.copy(media_io)
    if isinstance(media_io, ImageMediaIO):
        counted.load_bytes = functools.partial(_load, media_io.load_bytes, read)
    elif isinstance(media_io, VideoMediaIO):
        counted.image_io = _counted(media_io.image_io, read)
    return counted


def _load(load: Callable[[bytes], Any], read: Pixels, data: bytes) -> Any:
    """Looks at the picture's head before it is decoded: a small file may be a huge picture."""
    try:
        width, height = open_image(BytesIO(data)).size
    except Exception:  # whatever the format's reader raises: `load` says it
        return load(data)
    most = PICTURES * envs.VLLM_MAX_IMAGE_PIXELS
    if read.add(width * height) > most > 0:
        raise VLLMValidationError(
            f"The pictures of the request have more than {most:,} pixels together; send fewer."
        )
    return load(data)


def _refused(url: str, error: Exception) -> Exception:
    """The message for the client: whatever fails here is due to the client's URL, or its content."""
    if isinstance(error, VLLMClientError):
        return error
    shown = _shown(url)
    for kind, sentence in _SENTENCES:
        if isinstance(error, kind):
            return VLLMValidationError(sentence.format(shown))
    return VLLMValidationError(f"{shown} cannot be read: {_ADDRESS_IN_MEMORY.sub('', str(error))}")


def _shown(url: str) -> str:
    if url[:5].lower() == "data:":
        return "The data URL"
    return f"'{url}'" if len(url) <= _SHOWN else f"'{url[:_SHOWN]}...'"
