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
from penstock.data.backends.serve_handle import ServeHandle, build_argument
from penstock.data.rows.coerce import to_json
from penstock.data.rows.request import RowRequest
from penstock.engine import Progress, no_progress
from penstock.errors import BadRequest, ConfigError, DeadlineExceeded, Error
from penstock.openai.errors import envelope

_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "score": "/score",
    "rerank": "/rerank",
    "classify": "/classify",
    "pooling": "/pooling",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
"""Methods of `LLMServer` that are endpoints of its listener, too."""


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
        dtypes: Mapping[str, Any],
        max_concurrency: int = 256,
        timeout_s: float | None = None,
    ) -> None:
        self._dtypes = dtypes
        self._timeout_s = timeout_s
        self._replicas: ReplicaSet | None = ReplicaSet(app_name, deployment_name)
        self._handle = ServeHandle(app_name, deployment_name, dtypes=dtypes, max_concurrency=max_concurrency)

    async def start(self, progress: Progress = no_progress) -> None:
        await self._handle.start(progress)
        if self._replicas is not None:
            try:
                await self._replicas.start(progress)
            except ConfigError:  # not a Penstock model
                self._replicas = None

    async def stop(self) -> None:
        await self._handle.stop()
        if self._replicas is not None:
            await self._replicas.stop()

    async def send(self, request: RowRequest) -> Response:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await self._send(request)
        except TimeoutError:
            if not limit.expired():
                raise
            return _refused(DeadlineExceeded(f"No answer within request_timeout_s, {self._timeout_s:g} s."))

    async def _send(self, request: RowRequest) -> Response:
        is_call = not request.path.startswith("/")
        if self._replicas is None:
            return await self._handle.send(request) if is_call else _refused(_NOT_A_MODEL)
        if not is_call:
            return await self._replicas.send(request)
        if request.path not in _PATHS:
            return await self._handle.send(request)
        try:
            return await self._replicas.send(self._as_request(request))
        except BadRequest as error:
            return _refused(error)

    def available_slots(self, in_flight: int) -> int:
        return (
            self._handle.available_slots(in_flight)
            if self._replicas is None
            else self._replicas.available_slots(in_flight)
        )

    def _as_request(self, call: RowRequest) -> RowRequest:
        """Raises: BadRequest."""
        dtype, kwargs = pickle.loads(call.prompt or b"")
        if dtype is not None:
            build_argument(dtype, kwargs, self._dtypes)
        body = to_json(kwargs, "request_kwargs")
        model = body.pop("model", None)
        if body.pop("stream", None):
            raise BadRequest("Rows do not stream; leave `stream` out.", param="stream")
        return RowRequest(path=_PATHS[call.path], body=msgspec.json.encode(body), model=model)


_NOT_A_MODEL = BadRequest(
    "The deployment is not a Penstock model: each row must name a `method`, with `request_kwargs`."
)


def _refused(error: Error) -> Response:
    return Response(error.status, envelope(error))
