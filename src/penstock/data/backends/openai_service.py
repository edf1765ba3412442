"""Any OpenAI-compatible service by its URL, or any URL that takes JSON.

Between the window and the network. An answer of any status is a response; a service that cannot be reached is
Unavailable.
"""

from __future__ import annotations

import asyncio
import pickle
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

import msgspec

from penstock import tiers
from penstock.config.messages.problems import unknown
from penstock.data.backends.http_client import Body, ConnectFailed, ConnectionLost, HttpClient
from penstock.data.backends.limits import AdaptiveConcurrency, RateLimiter
from penstock.data.backends.protocol import Response
from penstock.data.rows.form import form_data
from penstock.data.rows.request import RowRequest, with_fields
from penstock.engine import Progress, no_progress
from penstock.errors import BadRequest, ConfigError, DeadlineExceeded, EngineDead, Error, Unavailable
from penstock.openai.errors import SHOULD_RETRY, envelope, parsed
from penstock.sources.protocol import shown

_THROTTLED = (429, 503)
_REFUSED = (400, 404, 422)
_MODELS = "/v1/models"
_VERSION = re.compile(r"/v\d\w*(/|$)")

PAYLOAD = ""
"""Path of a request whose body is posted unchanged to exactly the service's URL; where it has a `prompt`, the
pickled fields of a form in its place."""


class OpenAIService:
    """A service at `url`, with or without its `/v1`.

    model: for rows that name none; without it, the only model that the service lists.
    requests_per_second: None for no limit. max_concurrency: requests at a time; fewer while it answers 429
    or 503. finds_model: whether `start` checks key and model; else the first row that is no payload asks for
    the model, where none is named.
    session_factory: makes the HTTP session; its own timeout counts then.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        api_key: str | None = None,
        model: str | None = None,
        requests_per_second: float | None = None,
        max_concurrency: int = 64,
        timeout_s: float | None = None,
        finds_model: bool = True,
        session_factory: Callable[[], Any] | None = None,
    ) -> None:
        """Raises: ConfigError."""
        self._url = _parsed(url)
        self._shown = shown(url)
        key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = {tiers.HEADER: tiers.FLEX, **key, **(headers or {})}  # other services ignore it
        self._model = model
        self._timeout_s = timeout_s
        self._session_factory = session_factory
        self._finds_model = finds_model
        self._finding_model = asyncio.Lock()
        self._model_found = model is not None and not finds_model
        self._rate = RateLimiter(requests_per_second)
        self._concurrency = AdaptiveConcurrency(max_concurrency)
        self._client: HttpClient | None = None
        self._listed: list[str] = []
        self._accepted = False

    async def start(self, progress: Progress = no_progress) -> None:
        """Raises: Unavailable when it is not reached; ConfigError when it refuses the key or the model."""
        if self._client is not None:
            return
        client = HttpClient(self._headers, self._timeout_s, self._session_factory)
        try:
            if self._finds_model:
                await self._find_model(client)
        except BaseException:
            await client.close()
            raise
        self._client = client

    async def stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def send(self, request: RowRequest) -> Response:
        """Raises: EngineDead where the service says that this row may have ended its engines; Unavailable."""
        if self._client is None:
            raise Unavailable(f"Call `start` before sending requests to {self._shown}.")
        if request.path != PAYLOAD:
            await self._find_model(self._client)
        await self._rate.acquire()
        sent_at = time.monotonic()
        response = await self._post(self._client, request)
        if response.status in _THROTTLED:
            self._concurrency.on_throttled(sent_at, response.retry_after_s)
        else:
            self._concurrency.on_success()
        self._check_model_named(request, response)
        if response.status == 503 and response.headers.get(SHOULD_RETRY.decode()) == "false":
            raise EngineDead(parsed(response.body).args[0])
        return response

    def available_slots(self, in_flight: int) -> int:
        slots, soon = max(0, self._concurrency.limit - in_flight), self._rate.available()
        return slots if soon is None else min(slots, soon)

    def _check_model_named(self, request: RowRequest, response: Response) -> None:
        """Raises: ConfigError where a service of several models has no default: all rows would fail alike."""
        self._accepted |= response.status == 200
        if request.model or request.path == PAYLOAD or self._accepted or not self._listed:
            return
        if response.status not in _REFUSED:
            return
        raise ConfigError(
            f"{self._shown} refuses a row that names no model; it serves "
            f"{', '.join(map(repr, self._listed))}. Choose one for all rows (--model, or model=), or name "
            "one in each row."
        )

    async def _post(self, client: HttpClient, request: RowRequest) -> Response:
        """Raises: Unavailable."""
        if request.prompt is not None and request.path != PAYLOAD:
            return _refused(
                BadRequest(f"{self._shown} does not take an engine prompt; put the input into the body.")
            )
        url, body = self._url_and_body(request)
        try:
            response = await client.send("POST", url, body)
        except ConnectFailed as error:
            raise Unavailable(f"{self._shown} cannot be reached: {error}.") from error
        except ConnectionLost as error:
            return Response(502, envelope(Unavailable(f"{self._shown} broke the connection: {error}.")))
        except TimeoutError:
            own = self._session_factory is not None or self._timeout_s is None
            limit = "the time limit of its session" if own else f"{self._timeout_s:g} s"
            return _refused(DeadlineExceeded(f"{self._shown} did not answer within {limit}."))
        if 300 <= response.status < 400:
            moved = (
                f"{self._shown} answers {response.status}, a redirection; use the URL that it redirects to."
            )
            return Response(response.status, envelope(Unavailable(moved)))
        return response

    def _url_and_body(self, request: RowRequest) -> tuple[str, Body]:
        if request.path == PAYLOAD:
            own = request.body if request.prompt is None else partial(form_data, pickle.loads(request.prompt))
            return urlunsplit(self._url), own
        model = request.model or self._model
        body = with_fields(request.body, {"model": model} if model else {})
        return _endpoint(self._url, request.path), body

    async def _find_model(self, client: HttpClient) -> None:
        """Once. Raises: Unavailable, ConfigError."""
        async with self._finding_model:
            if self._model_found:
                return
            names = await self._list_models(client)
            if self._model is None and len(names) == 1:
                (self._model,) = names
            elif self._model is None:
                self._listed = names
            elif names and self._model not in names:  # lists may be incomplete
                await self._check_model(client, self._model, names)
            self._model_found = True

    async def _list_models(self, client: HttpClient) -> list[str]:
        """Empty where the service has no list."""
        try:
            response = await client.send("GET", _endpoint(self._url, _MODELS))
        except (ConnectFailed, ConnectionLost, TimeoutError) as error:
            if self._model is not None and not isinstance(error, ConnectFailed):
                return []
            why = str(error) or "it does not answer"
            raise Unavailable(
                f"{self._shown} cannot be reached: {why}. Is it running, and is the URL right?"
            ) from error
        if response.status == 401 or (response.status == 403 and self._model is None):
            raise ConfigError(
                f"{self._shown} refuses the API key (status {response.status}); give the right one."
            )
        try:
            listed = msgspec.json.decode(response.body, type=_Models) if response.status == 200 else _Models()
        except ValueError:
            return []
        return [card.id for card in listed.data if card.parent is None or card.id == self._model]

    async def _check_model(self, client: HttpClient, model: str, names: list[str]) -> None:
        """Raises: ConfigError when the service says that it has no such model."""
        try:
            found = await client.send("GET", _endpoint(self._url, f"{_MODELS}/{quote(model)}"))
        except (ConnectFailed, ConnectionLost, TimeoutError):
            return
        if found.status == 404 and b"model" in found.body.lower() and found.body.startswith(b"{"):
            raise ConfigError(f"{self._shown}: {unknown('model', model, names)}")


class _Card(msgspec.Struct):
    """A model as services list it. parent: of an adapter, its base model."""

    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Card] = []


def _refused(error: Error) -> Response:
    return Response(error.status, envelope(error))


def _parsed(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts._replace(fragment="")
    except ValueError:  # a port that is not a number
        pass
    raise ConfigError("The URL of a service must be like http://host:8000/v1 or https://host/v1.")


def _endpoint(base: SplitResult, path: str) -> str:
    """The URL of `path`. base: as OpenAI's clients take it, or without `/v1`, or the endpoint itself."""
    root = base.path.rstrip("/")
    if root.endswith(path):
        path = ""
    elif root.endswith("/v1"):
        root = root.removesuffix("/v1")
    elif _VERSION.search(root):
        path = path.removeprefix("/v1")
    return urlunsplit(base._replace(path=root + path))
