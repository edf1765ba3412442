"""The service under test: where it is, and the head of a request to it."""

import ssl
from dataclasses import dataclass
from typing import Self
from urllib.parse import SplitResult, urlsplit

from penstock.errors import ConfigError

_ENDINGS = ("/chat/completions", "/completions", "/models", "/v1")


def parsed(url: str) -> SplitResult:
    """The address of a service, given with or without its scheme, and without the `/v1` at its end.

    Raises: ConfigError.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        plain = url.isprintable() and " " not in url and (parts.hostname or "").encode("idna")
        if plain and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts._replace(path=parts.path.rstrip("/").removesuffix("/v1"))
    except ValueError:  # a port that is not a number, half an IPv6 address, a name that no host can have
        pass
    raise ConfigError(f"{url!r} is not the address of a service; write one like http://host:8000.")


def tls_context(*, verify: bool = True) -> ssl.SSLContext:
    """verify: whether the service's certificate is checked."""
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible service. `prefix` is what stands before `/chat/completions`."""

    host: str
    port: int
    tls: bool
    prefix: str
    api_key: str | None = None
    verify: bool = True

    @classmethod
    def parse(cls, url: str, api_key: str | None = None, *, verify: bool = True) -> Self:
        """From a URL with or without scheme, `/v1` and endpoint. Raises: ConfigError."""
        parts = parsed(url)
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("The API key holds characters that no HTTP header may have.")
        path = parts.path
        for ending in _ENDINGS:
            path = path.removesuffix(ending)
        return cls(parts.hostname or "", port, tls, f"{path}/v1", api_key, verify)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    def head(self, method: str, path: str) -> bytes:
        """Everything before the body but the empty line; `path` follows the prefix."""
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"host: {self.authority}",
            "user-agent: penstock-bench",
            "accept: text/event-stream, application/json",
        ]
        if self.api_key:
            lines.append(f"authorization: Bearer {self.api_key}")
        if method == "POST":
            lines.append("content-type: application/json")
        return "\r\n".join(lines).encode() + b"\r\n"
