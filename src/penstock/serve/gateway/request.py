"""One client's request: what it asks for, whether the client is still connected, how it ended.

And the request that a replica gets for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote

from penstock.asgi import Receive, Scope, while_connected
from penstock.errors import BadRequest, Error
from penstock.metrics import RouteMetrics
from penstock.serve.fleet.replica import Replica
from penstock.serve.gateway.body import RequestBody
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.routes import Route, below
from penstock.serve.gateway.telemetry.timing import Timing
from penstock.serve.gateway.tenants.meter import RequestMeter
from penstock.serve.http import direct_writer, limits
from penstock.serve.tenancy.fairness import Charge
from penstock.serve.tenancy.keys import Grant
from penstock.tiers import DEFAULT, Tier
from penstock.transport import headers
from penstock.transport.connection import Headers

if TYPE_CHECKING:  # only loaded when tracing is on
    from penstock.serve.gateway.telemetry.spans import Trace

log = logging.getLogger(__name__)
_LENGTH_DIGITS = 19
_SHOWN = "/:@!$&'()*+,;=~"  # in a path, beside letters and digits

access = logging.getLogger("penstock.access")
"""One line per request: off unless its level is set to INFO."""


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request as the replica sees it. adapter: "" for the base model. keeper: the only replica that can
    answer. tier: its class of work. tenant: its mark, as `response_items` has it, for what is stored.
    charge: what it costs its tenant. is_split: whether any version of its model may answer.
    """

    id: str
    method: str
    target: bytes
    headers: Headers
    body: RequestBody
    adapter: str = ""
    keeper: Replica | None = None
    tier: Tier = DEFAULT
    tenant: str = ""
    charge: Charge | None = None
    is_split: bool = False


class ClientRequest:
    """Made from an ASGI scope."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.receive = receive
        self.writer = direct_writer.of(scope)
        self.method: str = scope["method"]
        self.root: str = scope.get("root_path", "").rstrip("/")
        self.path = below(self.root, scope["path"])
        self.query: bytes = scope.get("query_string", b"")
        self.headers: Headers = list(scope["headers"])
        self.fields = dict(self.headers)
        self.id = headers.request_id(self.fields.get(headers.REQUEST_ID))
        self.timing = Timing()
        self.route: Route  # once it is found
        self.metrics: RouteMetrics | None = None
        self.trace: Trace | None = None
        self.picked = ""  # the version of its model, by weight
        self.gone = False
        self.has_key = True  # the API key, where one is configured
        self.grant: Grant | None = None  # of a tenant's key, or token
        self.refusal: Error | None = None  # of a token
        self.meter: RequestMeter | None = None  # once it was admitted against the limits of that

    @property
    def models(self) -> frozenset[str] | None:
        """Names that its key may use; None for all."""
        return None if self.grant is None else self.grant.models

    @property
    def target(self) -> bytes:
        """Path and query for a replica. The path is a known route and needs no quoting."""
        return self.path.encode() + (b"?" + self.query if self.query else b"")

    @property
    def content_length(self) -> int | None:
        """Raises: BadRequest when it is not a number that a body can have."""
        length = self.fields.get(b"content-length")
        if length is None:
            return None
        if not length.isdigit() or len(length) > _LENGTH_DIGITS:
            raise BadRequest(f"The content-length is not a number of at most {_LENGTH_DIGITS} digits.")
        return int(length)

    def facts(self) -> Mapping[str, str]:
        """What spans say of it, by OpenTelemetry's names."""
        return {
            "http.request.method": self.method,
            "http.route": self.route.path,
            "url.path": self.path,
            "penstock.request.id": self.id,
        }

    def queried(self, name: str) -> str | None:
        """The first value of a query parameter. Raises: as `parameters`."""
        return self.parameters().get(name, [None])[0] if self.query else None

    def parameters(self) -> dict[str, list[str]]:
        """The query. Raises: BadRequest when it has too many parameters."""
        if self.query.count(b"&") >= limits.QUERY_PARAMETERS:
            raise BadRequest(f"The query has more than {limits.QUERY_PARAMETERS} parameters.")
        return parse_qs(self.query.decode("latin-1"))

    async def while_connected(self, work: Awaitable[None]) -> None:
        """Awaits `work`, which ends when the client disconnects. Raises: ClientGone; what `work` raises."""
        writer = self.writer
        await while_connected(self.receive, work, None if writer is None else writer.on_disconnect)

    def account(self, reply: ClientResponse, error: Error | None) -> None:
        """Counts the request, and logs it when it failed."""
        seconds = time.monotonic() - self.timing.started_at
        status = "gone" if self.gone else "cut" if reply.broken else str(reply.status)
        if self.metrics is not None:
            self.metrics.ended(status)
            self.metrics.request.observe(seconds)
            if self.timing.first_byte_s is not None:
                self.metrics.overhead.observe(self.timing.overhead_s)
            if self.trace is not None:
                last = b"".join(reply.last or ())
                self.trace.end(self.metrics.model_id, status, reply.streaming, error, last)
        if error is not None and (reply.broken or error.status >= 500):
            self._log(log, logging.WARNING, status, seconds, error)
        elif access.isEnabledFor(logging.INFO):
            self._log(access, logging.INFO, status, seconds, error)

    def _log(self, to: logging.Logger, level: int, status: str, seconds: float, error: Error | None) -> None:
        """One line. Foreign and secret parts of an error appear only here, in the log."""
        facts = {
            "request_id": self.id,
            "method": self.method,
            "path": self.path,
            "model": self.metrics.model_id if self.metrics else "",
            "status": status,
            "seconds": round(seconds, 3),
        }
        what, cause, trace = "", error.__cause__ if error else None, None
        if error is not None:
            facts |= {"code": error.code, "error": str(error), "cause": repr(cause) if cause else ""}
            what = f": {error}" + (f" ({cause!r})" if cause else "")
            trace = cause if error.code == Error.code else None
        to.log(
            level,
            "%s %s: %s after %.3f s, model %r, request %s%s",
            self.method,
            quote(self.path, safe=_SHOWN),  # decoded, it could end the line and forge the next one
            status,
            seconds,
            facts["model"],
            self.id,
            what,
            exc_info=trace,
            extra={"facts": facts},
        )
