"""A deployment of Ray Serve for rows of two kinds: requests to a model of ours, and calls of any method.

Of a model of ours the methods, too, go through its replicas' own listeners, where the same endpoints are.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.data.backends.protocol import Response
from penstock.data.backends.replica_set import ReplicaSet
from penstock.data.backends.serve_handle import ServeHandle, build_argument
from penstock.data.rows.coerce import to_json
from penstock.data.rows.request import Request
from penstock.engine import Load, Progress, no_progress
from penstock.errors import BadRequest, ConfigError
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
    """Asked at its listeners where it serves a model of Penstock's, else by handle.

    dtypes: classes by the names that rows give. max_concurrency: calls by handle at a time.
    """

    def __init__(
        self,
        app_name: str,
        deployment_name: str | None = None,
        *,
        dtypes: Mapping[str, Any],
        max_concurrency: int = 256,
    ) -> None:
        self._dtypes = dtypes
        self._fleet: ReplicaSet | None = ReplicaSet(app_name, deployment_name)
        self._method = ServeHandle(app_name, deployment_name, dtypes=dtypes, max_concurrency=max_concurrency)

    async def start(self, progress: Progress = no_progress) -> None:
        await self._method.start(progress)
        if self._fleet is not None:
            try:
                await self._fleet.start(progress)
            except ConfigError:  # it has no listeners of ours
                self._fleet = None

    async def stop(self) -> None:
        await self._method.stop()
        if self._fleet is not None:
            await self._fleet.stop()

    async def send(self, request: Request) -> Response:
        is_call = not request.path.startswith("/")
        if self._fleet is None:
            return await self._method.send(request) if is_call else _refused(_NO_MODEL)
        if not is_call:
            return await self._fleet.send(request)
        if request.path not in _PATHS:
            return await self._method.send(request)
        try:
            return await self._fleet.send(self._as_request(request))
        except BadRequest as error:
            return _refused(error)

    def load(self) -> Load:
        return self._method.load() if self._fleet is None else self._fleet.load()

    def available_slots(self, in_flight: int) -> int:
        return (
            self._method.available_slots(in_flight)
            if self._fleet is None
            else self._fleet.available_slots(in_flight)
        )

    def _as_request(self, call: Request) -> Request:
        """Raises: BadRequest."""
        dtype, kwargs = pickle.loads(call.prompt or b"")
        if dtype is not None:
            build_argument(dtype, kwargs, self._dtypes)
        body = to_json(kwargs, "request_kwargs")
        model = body.pop("model", None)
        if body.pop("stream", None):
            raise BadRequest("A row gets its answer whole; leave `stream` out.", param="stream")
        return Request(path=_PATHS[call.path], body=msgspec.json.encode(body), model=model)


_NO_MODEL = BadRequest(
    "The deployment is no model of Penstock's: a row must name its `method`, with `request_kwargs`."
)


def _refused(error: BadRequest) -> Response:
    return Response(error.status, envelope(error))
