"""The HTTP client of every command that talks to a running service.

Standard library on purpose: a command sends one request at a time, and must be there at once.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from penstock.bench.load.target import parsed, tls_context
from penstock.cli.models.options import HERE
from penstock.errors import BadRequest, ConfigError, Error, NotFound, Unauthorized, Unavailable
from penstock.options import option

_CONNECT_S = 5.0
_ADMIN_S = 150.0
_HEALTH_S = 5.0
_QUOTED = 200  # characters of a response that is not JSON


class Service:
    """A service at `url`, with or without `/v1` at its end. Each request opens its own connection."""

    def __init__(self, url: str, key: str | None = None, *, key_hint: str = "", own: bool = False) -> None:
        """key_hint: a sentence for users whose key is refused. own: the service is this user's, on this
        machine, so its certificate, which is made out to other names, is not checked.

        Raises: ConfigError when `url` is not the address of a service, or no header can have the key.
        """
        parts = parsed(url)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._connect: Callable[..., HTTPConnection] = HTTPConnection
        if parts.scheme == "https":
            self._connect = partial(HTTPSConnection, context=tls_context(verify=not own))
        self._netloc, self._path = parts.netloc, parts.path
        self._key_hint = key_hint
        self._headers = {"content-type": "application/json"}
        if key := (key or "").strip():  # of a line of a file, which may end as Windows has it
            if not (key.isascii() and key.isprintable()):  # `http.client` would show it in its error
                raise ConfigError("The key has a line break, or another character that no header can have.")
            self._headers["authorization"] = f"Bearer {key}"

    def send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> HTTPResponse:
        """The response, whatever its status. The caller closes it; before its end, that aborts the request.

        timeout_s: longest silence of the service; None waits for ever.
        Raises: Unavailable.
        """
        connection = self._connect(self._netloc, timeout=_CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            data = None if body is None else json.dumps(body)
            connection.request(method, self._path + path, data, {**self._headers, **(headers or {})})
            return connection.getresponse()
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise Unavailable(
                f"The certificate of {self.url} is not accepted: {error.verify_message}. Name the file of "
                "its authority in SSL_CERT_FILE, or the service by a name that the certificate has."
            ) from error
        except (OSError, HTTPException) as error:
            connection.close()
            raise Unavailable(
                f"Nothing answers at {self.url} ({error}). Start a service with `penstock serve`, "
                "or name another with --url."
            ) from error

    def json(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        has: str = "",
    ) -> dict[str, Any]:
        """The JSON object of a response. has: a name in it, whatever its status; other servers' may lack it.

        Raises: Error, also for an object with an `error`.
        """
        with closing(self.send(method, path, body, timeout_s=timeout_s, headers=headers)) as response:
            status, content = response.status, _read(response)
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict) or "error" in found or (has not in found if has else status >= 400):
            error = self._error(status, content)
            if path.startswith("/admin/") and isinstance(error, NotFound) and "no path" in str(error):
                raise NotFound("The service has no admin endpoints: start it with PENSTOCK_ADMIN_KEY set.")
            raise error
        return found

    def error(self, response: HTTPResponse) -> Error:
        """Why the service refused a request."""
        return self._error(response.status, _read(response))

    def is_healthy(self) -> bool:
        """Whether the service says that each of its models has a replica."""
        try:
            with closing(self.send("GET", "/health", timeout_s=_HEALTH_S)) as response:
                return response.status == 200
        except Unavailable:
            return False

    def _error(self, status: int, content: bytes) -> Error:
        code = ""
        try:
            found = json.loads(content)["error"]
            message, code = str(found["message"]), found.get("code")
        except (ValueError, KeyError, TypeError):
            message = (
                f"The service answered with status {status}: {content[:_QUOTED].decode(errors='replace')}"
            )
        if status == Unauthorized.status:
            return Unauthorized(f"{message} {self._key_hint}".rstrip())
        if code in (ConfigError.code, BadRequest.code):  # a mistake in the command, or in its file
            return ConfigError(message)
        kinds = (kind for kind in (NotFound, Unavailable) if kind.status == status)
        return next(kinds, Error)(message)


@dataclass(frozen=True, slots=True)
class AdminTarget:
    """A service, and the key of its admin endpoints."""

    url: str = option("Address of the service.", HERE, rich_help_panel="Service")
    admin_key: str | None = option(
        "Admin key of the service, or a key with the scope `admin`.",
        envvar="PENSTOCK_ADMIN_KEY",
        show_default=False,
        rich_help_panel="Service",
    )

    def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = _ADMIN_S,
        /,
        has: str = "",
        **headers: str,
    ) -> dict[str, Any]:
        """The response of `/admin/PATH`. has: as of `Service.json`. Raises: Error."""
        hint = "The admin key is PENSTOCK_ADMIN_KEY, or --admin-key."
        service = Service(self.url, self.admin_key, key_hint=hint)
        return service.json(method, f"/admin/{path}", body, timeout_s=timeout_s, headers=headers, has=has)


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read()
    except (OSError, HTTPException) as error:
        raise Unavailable(f"The connection broke in the middle of the answer ({error}).") from error
