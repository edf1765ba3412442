"""Which addresses of pictures, videos and audio a request may have the child fetch.

A request comes from outside and the child is inside: an address could lead it to what only it can reach. So
the hosts that the config names are allowed, and without them data URLs alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from penstock.errors import BadRequest

ANY = "*"

_MEDIA = frozenset(
    {f"{kind}{end}" for kind in ("image", "video", "audio") for end in ("", "s", "_url", "_urls", "_data")}
    | {"input_audio", "file", "file_url", "source"}
)
"""Fields below which media are named."""
_NOT_MEDIA = frozenset({"tools", "metadata", "arguments", "input", "response_format", "text"})
"""Fields that hold a client's own values, and below messages and items `input`."""
_ADDRESS = re.compile(r"\s*(?!data:)[a-z][a-z0-9+.-]*:|\S+\.\w{2,5}\s*\Z", re.IGNORECASE)
_SHOWN = 100


def check(request: Mapping[str, Any], allowed: Collection[str]) -> None:
    """allowed: names of hosts, or `ANY`. Raises: BadRequest for an address that is not below them."""
    if ANY in allowed:
        return
    named = {"items" if name == "input" else name: value for name, value in request.items()}
    for value in _media(named, within=False):
        if _ADDRESS.match(value) and _host(value) not in allowed:
            raise BadRequest(
                f"'{value[:_SHOWN]}' is not fetched for requests. Send it as a data URL; "
                "`allowed_media_domains` in engine_kwargs names the hosts that are allowed."
            )


def _host(url: str) -> str | None:
    """Of an http(s) URL."""
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        return None
    return parts.hostname if parts.scheme in ("http", "https") else None


def _media(value: Any, *, within: bool) -> Iterator[str]:
    """The texts in fields for media. within: whether `value` is in one."""
    if isinstance(value, str):
        if within:
            yield value
    elif isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from _media(one, within=within)
    elif isinstance(value, dict):
        for name, one in cast("dict[str, Any]", value).items():
            if within or name not in _NOT_MEDIA:
                yield from _media(one, within=within or name in _MEDIA)
