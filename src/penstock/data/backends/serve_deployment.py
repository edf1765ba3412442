"""Any deployment of Ray Serve, for rows of two kinds: requests to a Penstock model, and calls of a method.

A Penstock model's methods that are endpoints of its replicas' listeners are called there, too.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.data.backends.protocol import Response
from penstock.data.backends.replica_set import ReplicaSet
from penstock.data.backends.serve_handle import as_columns, as_response, build_argument, call_by_handle
from penstock.data.backends.serve_lookup import FoundDeployment, find_deployment
from penstock.data.rows.coerce import to_json
from penstock.data.rows.request import RowRequest
from penstock.engine import Progress, no_progress
from penstock.errors import BadRequest, ConfigError, DeadlineExceeded, EngineDead, Error, Unavailable
from penstock.openai.errors import envelope
from penstock.openai.paths import METHODS


class ServeDeployment:
    """Reached at its replicas' listeners where it serves a Penstock model, else by handle.

    dtypes: classes by the names that rows give. max_concurrency: calls by handle at a time. timeout_s: for
    one try of a row.
    """

    def __init__(
        self,
        app_name: str,
        deployment_name: str | None = None,
        *,
        dtypes: Mapping[str, Any] | None = None,
        max_concurrency: int = 256,
        timeout_s: float | None = None,
    ) -> None:
        self._names = app_name, deployment_name
        self._dtypes = dtypes or {}
        self._max_concurrency, self._timeout_s = max_concurrency, timeout_s
        self._replicas: ReplicaSet | None = ReplicaSet(app_name, deployment_name)
        self._deployment: FoundDeployment | None = None
        self._streams: set[str] = set()

    async def start(self, progress: Progress = no_progress) -> None:
        """Raises: Unavailable; ConfigError for unknown names; EngineStartFailed."""
        if self._deployment is None:
            self._deployment = await asyncio.to_thread(find_deployment, *self._names)
        await self._deployment.check()
        if self._replicas is not None:
            try:
                await self._replicas.start(progress)
            except ConfigError:  # not a Penstock model
                await self._replicas.stop()
                self._replicas = None

    async def stop(self) -> None:
        if self._replicas is not None:
            await self._replicas.stop()

    async def send(self, request: RowRequest) -> Response:
        """request: of a model's endpoint, or from `method_call`; then the body is the result as JSON."""
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await self._send(request)
        except TimeoutError:
            if not limit.expired():
                raise
            late = DeadlineExceeded(f"No answer within request_timeout_s, {self._timeout_s:g} s.")
            return Response(late.status, envelope(late))
        except (EngineDead, Unavailable):
            raise
        except Error as error:
            return Response(error.status, envelope(error))

    async def _send(self, request: RowRequest) -> Response:
        is_call = not request.path.startswith("/")
        if self._replicas is not None and not is_call:
            return await self._replicas.send(request)
        if self._replicas is not None and request.path in METHODS:
            return await self._replicas.send(self._as_request(request))
        if not is_call:
            raise BadRequest(
                "The deployment is not a Penstock model: each row must name a `method`, with "
                "`request_kwargs`."
            )
        dtype, kwargs = pickle.loads(request.prompt or b"")
        return as_response(await self.call(request.path, kwargs, dtype))

    async def call(self, method: str, kwargs: Mapping[str, Any], dtype: str | None = None) -> dict[str, Any]:
        """The result as columns, with native types; an engine's error unchanged: `{"error": {...}}`.

        Raises: BadRequest; EngineDead when the replica died during the call; Unavailable; Overloaded;
        OwnCodeFailed with what the method raised.
        """
        if self._deployment is None:
            raise Unavailable(f"Call `start` before calling application '{self._names[0]}'.")
        given = build_argument(dtype, kwargs, self._dtypes)
        return as_columns(await call_by_handle(self._deployment, method, given, self._streams))

    def available_slots(self, in_flight: int) -> int:
        if self._replicas is not None:
            return self._replicas.available_slots(in_flight)
        return max(0, self._max_concurrency - in_flight)

    def _as_request(self, call: RowRequest) -> RowRequest:
        """Raises: BadRequest."""
        dtype, kwargs = pickle.loads(call.prompt or b"")
        if dtype is not None:
            build_argument(dtype, kwargs, self._dtypes)
        body = to_json(kwargs, "request_kwargs")
        model = body.pop("model", None)
        if body.pop("stream", None):
            raise BadRequest("Rows do not stream; leave `stream` out.", param="stream")
        body = msgspec.json.encode(body)
        return RowRequest(path=METHODS[call.path], body=body, model=model, made=call.made)
