"""Methods of any deployment of Ray Serve, called by handle: one call per row, native types in and out.

Between the window and a handle. Penstock models are reached faster through `replica_set`, without a handle.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from pydantic import BaseModel
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from penstock.data.backends import serve_lookup
from penstock.data.backends.protocol import Response
from penstock.data.results.outcome import BY_CODE
from penstock.data.rows.request import RowRequest
from penstock.engine import Progress, no_progress
from penstock.errors import BadRequest, EngineDead, Error, Overloaded, OwnCodeFailed, Unavailable
from penstock.openai.errors import envelope

_SHOWN_CHARS = 500
_IS_STREAM = "returned a generator"


class ServeHandle:
    """The methods of one deployment. The result of a stream is its only item, or all of them (`results`).

    dtypes: classes by the names that rows give. max_concurrency: calls at a time.
    """

    def __init__(
        self,
        app_name: str,
        deployment_name: str | None = None,
        *,
        dtypes: Mapping[str, Any] | None = None,
        max_concurrency: int = 256,
    ) -> None:
        self._app_name = app_name
        self._deployment_name = deployment_name
        self._dtypes = dtypes or {}
        self._max_concurrency = max_concurrency
        self._deployment: serve_lookup.FoundDeployment | None = None
        self._streams: set[str] = set()

    async def start(self, progress: Progress = no_progress) -> None:
        """Raises: Unavailable; ConfigError for unknown names; EngineStartFailed."""
        if self._deployment is None:
            self._deployment = await asyncio.to_thread(
                serve_lookup.find_deployment, self._app_name, self._deployment_name
            )
        await self._deployment.check()

    async def stop(self) -> None:
        """Holds nothing."""

    async def send(self, request: RowRequest) -> Response:
        """request: from `method_call`. The response's body is the result as JSON."""
        dtype, kwargs = pickle.loads(request.prompt or b"")
        try:
            found = await self.call(request.path, kwargs, dtype)
            return _answer(found)
        except (EngineDead, Unavailable):
            raise
        except Error as error:
            return Response(error.status, envelope(error))

    async def call(self, method: str, kwargs: Mapping[str, Any], dtype: str | None = None) -> dict[str, Any]:
        """The result as columns, with native types; an engine's error unchanged: `{"error": {...}}`.

        Raises: BadRequest; EngineDead when the replica died during the call; Unavailable; Overloaded;
        OwnCodeFailed with what the method raised.
        """
        if self._deployment is None:
            raise Unavailable(f"Call `start` before calling application '{self._app_name}'.")
        given = build_argument(dtype, kwargs, self._dtypes)
        try:
            return as_columns(await self._items(self._deployment, method, given))
        except (RayError, *_SERVE_ERRORS) as error:
            raise _translated(error, method, self._deployment) from error

    def available_slots(self, in_flight: int) -> int:
        return max(0, self._max_concurrency - in_flight)

    async def _items(
        self, deployment: serve_lookup.FoundDeployment, method: str, given: Any
    ) -> Sequence[Any]:
        """Serve must know whether a method streams; a wrong guess fails before the method runs."""
        if method not in self._streams:
            try:
                return await _called(deployment, method, given, stream=False)
            except RayTaskError as error:
                if not (isinstance(error.cause, TypeError) and _IS_STREAM in str(error.cause)):
                    raise
                self._streams.add(method)
        return await _called(deployment, method, given, stream=True)


def method_call(method: str, kwargs: Mapping[str, Any], dtype: str | None = None) -> RowRequest:
    """A row's call as a request, for `ServeHandle.send`."""
    return RowRequest(path=method, body=b"{}", prompt=pickle.dumps((dtype, dict(kwargs))))


async def _called(
    deployment: serve_lookup.FoundDeployment, method: str, given: Any, stream: bool
) -> Sequence[Any]:
    response = deployment.handle.options(method_name=method, stream=stream).remote(given)
    try:
        if stream:
            return [item async for item in response]  # pyright: ignore[reportGeneralTypeIssues]
        return [await response]
    except asyncio.CancelledError:
        response.cancel()
        raise


def _answer(found: dict[str, Any]) -> Response:
    refused = error_in(found)
    status, value = (200, found) if refused is None else refused
    try:
        return Response(status, msgspec.json.encode(value, enc_hook=_as_json))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"The result does not fit into a column: {str(error)[:_SHOWN_CHARS]}") from error


def _as_json(value: Any) -> Any:
    """Arrays and their scalars become lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"it holds a {type(value).__name__}")


_SERVE_ERRORS = (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)


def _translated(error: Exception, method: str, deployment: serve_lookup.FoundDeployment) -> Error:
    """As an error of Penstock's."""
    if isinstance(error, RayTaskError):
        return _raised(error.cause, method, deployment)
    if isinstance(error, (RayActorError, ReplicaUnavailableError, RequestCancelledError)):
        return EngineDead(f"A replica of {deployment} died during this call.")
    if isinstance(error, BackPressureError):
        return Overloaded(f"{deployment} has more calls waiting than max_queued_requests allows.")
    return Unavailable(f"{deployment} cannot be called: {str(error)[:_SHOWN_CHARS]}")


def _raised(cause: BaseException, method: str, deployment: serve_lookup.FoundDeployment) -> Error:
    """What the method raised. A ValueError or a TypeError is blamed on its arguments."""
    if isinstance(cause, Error):
        return cause
    why = f"{method} of {deployment} failed with {type(cause).__name__}: {str(cause)[:_SHOWN_CHARS]}"
    if isinstance(cause, (ValueError, TypeError)) or serve_lookup.is_no_method(cause):
        return BadRequest(why)
    return OwnCodeFailed(why)


def build_argument(dtype: str | None, kwargs: Mapping[str, Any], dtypes: Mapping[str, Any]) -> Any:
    """A method's argument: an instance of the class that `dtype` names, or without one the dict `kwargs`.

    Raises: BadRequest naming what is wrong.
    """
    if dtype is None:
        return dict(kwargs)
    if dtype not in dtypes:
        known = ", ".join(map(repr, sorted(dtypes))) or "none"
        raise BadRequest(f"dtype_mapping has no {dtype!r}; it has {known}.", param="dtype")
    try:
        return dtypes[dtype](**kwargs)
    except Exception as error:  # the class is the user's own
        why = f"{type(error).__name__}: {str(error)[:_SHOWN_CHARS]}"
        raise BadRequest(
            f"{dtype} cannot be made of request_kwargs: {why}", param="request_kwargs"
        ) from error


def as_columns(items: Sequence[Any]) -> dict[str, Any]:
    """A result as columns: the fields of a model, dataclass or dict; anything else is in `result`.

    items: what a method returned or streamed. Several items are in `results`, in order.
    """
    if len(items) != 1:
        return {"results": [_as_builtin(item) for item in items]}
    found = _as_builtin(items[0])
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {"result": found}


def _as_builtin(item: Any) -> Any:
    if isinstance(item, BaseModel):
        return item.model_dump()
    if isinstance(item, msgspec.Struct):
        return msgspec.structs.asdict(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return dataclasses.asdict(item)
    return dict(cast("Mapping[str, Any]", item)) if isinstance(item, Mapping) else item


def error_in(found: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Status and body of a result that is an engine's error; None for other results."""
    error = found if found.get("object") == "error" else found.get("error")
    if not isinstance(error, Mapping) or "message" not in error or (error is not found and len(found) > 1):
        return None
    detail = dict(cast("Mapping[str, Any]", error))
    return _status(detail), {"error": detail}


def _status(detail: Mapping[str, Any]) -> int:
    code, kind = detail.get("code"), str(detail.get("type") or "")
    if isinstance(code, int) and 400 <= code < 600:
        return code
    if code in BY_CODE:
        return BY_CODE[code].status
    return 400 if "invalid" in kind or "BadRequest" in kind else 500
