"""Methods of any deployment of Ray Serve, called by handle: one call per row, native types in and out.

Used by `serve_deployment`. Penstock models are reached faster through `replica_set`, without a handle.
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
from penstock.data.rows.request import RowRequest
from penstock.errors import BadRequest, EngineDead, Error, Overloaded, OwnCodeFailed, Unavailable
from penstock.openai.errors import BY_CODE

_SHOWN_CHARS = 500
_IS_STREAM = "returned a generator"


def method_call(method: str, kwargs: Mapping[str, Any], dtype: str | None = None) -> RowRequest:
    """A row's call as a request, for `ServeDeployment.send`."""
    return RowRequest(path=method, body=b"{}", prompt=pickle.dumps((dtype, dict(kwargs))))


async def call_by_handle(
    deployment: serve_lookup.FoundDeployment, method: str, given: Any, streams: set[str]
) -> Sequence[Any]:
    """What the method returned or streamed. streams: methods that are known to stream; learns others.

    Serve must know whether a method streams; a wrong guess fails before the method runs.
    Raises: as `ServeDeployment.call`.
    """
    try:
        if method not in streams:
            try:
                return await _called(deployment, method, given, stream=False)
            except RayTaskError as error:
                if not (isinstance(error.cause, TypeError) and _IS_STREAM in str(error.cause)):
                    raise
                streams.add(method)
        return await _called(deployment, method, given, stream=True)
    except (RayError, *_SERVE_ERRORS) as error:
        raise _translated(error, method, deployment) from error


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


def as_response(found: dict[str, Any]) -> Response:
    """Of a result as columns, which may be an engine's error. Raises: BadRequest."""
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
    code, kind = detail.get("code"), str(detail.get("type") or "")
    status = 400 if "invalid" in kind or "BadRequest" in kind else 500
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    elif code in BY_CODE:
        status = BY_CODE[code].status
    return status, {"error": detail}
