"""Loads a request's images, videos and audio: from data URLs, files, and the network (`fetch`).

vLLM reads them through a `MediaConnector`, looked up by the name in `VLLM_MEDIA_CONNECTOR`. This one is
vLLM's with our http(s) client, and one sentence to the client about what could not be read.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import aiohttp
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, MediaIO

from penstock.engines.vllm.arguments.environment import MEDIA_CONNECTOR
from penstock.engines.vllm.media.fetch import CheckedConnection, Refused

_SHOWN = 100
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
        try:
            return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)
        except Exception as error:  # each decoder raises its own errors
            raise _refused(url, error) from error

    def load_from_url(self, url: str, media_io: MediaIO[Any], *, fetch_timeout: int | None = None) -> Any:
        try:
            return super().load_from_url(url, media_io, fetch_timeout=fetch_timeout)
        except Exception as error:
            raise _refused(url, error) from error


@functools.cache
def _connection(hosts: frozenset[str]) -> CheckedConnection:
    """Shared by all requests, so that connections are reused."""
    return CheckedConnection(hosts)


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
