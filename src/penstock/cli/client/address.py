"""The address of a service, as `--url` gives it."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from penstock.errors import ConfigError


def parsed(url: str) -> SplitResult:
    """With or without its scheme, and without the `/v1` at its end.

    Raises: ConfigError.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        plain = url.isprintable() and " " not in url
        if plain and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts._replace(path=parts.path.rstrip("/").removesuffix("/v1"))
    except ValueError:  # a port that is not a number, half an IPv6 address
        pass
    raise ConfigError(f"{url!r} is not the address of a service; write one like http://host:8000.")
