"""Methods of any deployment of Ray Serve, called by handle: one call for each row, native types in and out.

It stands between the window and a handle. For models of ours `fleet` is the faster way, which asks no handle.
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
from penstock.data.rows.request import Request
from penstock.engine import Load, Progress, no_progress
from penstock.errors import BadRequest, EngineDead, Error, Overloaded, OwnCodeFailed, Unavailable
from penstock.openai.errors import envelope

_SHOWN_CHARS = 500
_A_STREAM = "returned a generator"


class ServeHandle:
    """The methods of one deployment. A stream of one item is that item, of several all of them (`results`).

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
        self._in_flight = 0
        self._streams: set[str] = set()

    async def start(self, progress: Progress = no_progress) -> None:
        """Raises: Unavailable, ConfigError for names that are not there, EngineStartFailed."""
        if self._deployment is None:
            self._deployment = await serve_lookup.find(self._app_name, self._deployment_name)
        await self._deployment.check()

    async def stop(self) -> None:
        """Nothing here is held."""

    async def send(self, request: Request) -> Response:
        """request: one of `method_call`. The answer's body is the plain result as JSON."""
        dtype, kwargs = pickle.loads(request.prompt or b"")
        try:
            found = await self.call(request.path, kwargs, dtype)
            return _answer(found)
        except (EngineDead, Unavailable):
            raise
        except Error as error:
            return Response(error.status, envelope(error))

    async def call(self, method: str, kwargs: Mapping[str, Any], dtype: str | None = None) -> dict[str, Any]:
        """The plain result, native types inside; an engine's error as it gave it: `{"error": {...}}`.

        Raises: BadRequest; EngineDead when the replica died with the call in it; Unavailable; Overloaded;
        OwnCodeFailed with what the method raised.
        """
        if self._deployment is None:
            raise Unavailable(f"Nothing is asked of application '{self._app_name}' before `start`.")
        given = build_argument(dtype, kwargs, self._dtypes)
        self._in_flight += 1
        try:
            return as_columns(await self._items(self._deployment, method, given))
        except (RayError, *_SERVES) as error:
            raise _translated(error, method, self._deployment) from error
        finally:
            self._in_flight -= 1

    def load(self) -> Load:
        """What is known here: how many calls are open."""
        return Load(running=self._in_flight)

    def available_slots(self, in_flight: int) -> int:
        return max(0, self._max_concurrency - in_flight)

    async def _items(
        self, deployment: serve_lookup.FoundDeployment, method: str, given: Any
    ) -> Sequence[Any]:
        """Serve must be told whether a call gives a stream, and complains before anything of it is made."""
        if method not in self._streams:
            try:
                return await _called(deployment, method, given, stream=False)
            except RayTaskError as error:
                if not (isinstance(error.cause, TypeError) and _A_STREAM in str(error.cause)):
                    raise
                self._streams.add(method)
        return await _called(deployment, method, given, stream=True)


def method_call(method: str, kwargs: Mapping[str, Any], dtype: str | None = None) -> Request:
    """A row's call as a request, for `ServeHandle.ask`."""
    return Request(path=method, body=b"{}", prompt=pickle.dumps((dtype, dict(kwargs))))


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
        raise BadRequest(f"The result cannot be kept in a column: {str(error)[:_SHOWN_CHARS]}") from error


def _as_json(value: Any) -> Any:
    """Arrays and their scalars as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"it holds a {type(value).__name__}")


_SERVES = (BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError, RequestCancelledError)


def _translated(error: Exception, method: str, deployment: serve_lookup.FoundDeployment) -> Error:
    """In our words."""
    if isinstance(error, RayTaskError):
        return _raised(error.cause, method, deployment)
    if isinstance(error, (RayActorError, ReplicaUnavailableError, RequestCancelledError)):
        return EngineDead(f"A replica of {deployment} died with this call in it.")
    if isinstance(error, BackPressureError):
        return Overloaded(f"{deployment} has more calls waiting than its max_queued_requests.")
    return Unavailable(f"{deployment} cannot be called: {str(error)[:_SHOWN_CHARS]}")


def _raised(cause: BaseException, method: str, deployment: serve_lookup.FoundDeployment) -> Error:
    """What the method raised; a ValueError or a TypeError comes from what it was called with."""
    if isinstance(cause, Error):
        return cause
    why = f"{method} of {deployment} failed with {type(cause).__name__}: {str(cause)[:_SHOWN_CHARS]}"
    if isinstance(cause, (ValueError, TypeError)) or serve_lookup.is_no_method(cause):
        return BadRequest(why)
    return OwnCodeFailed(why)


def build_argument(dtype: str | None, kwargs: Mapping[str, Any], dtypes: Mapping[str, Any]) -> Any:
    """What a method is called with: the class that `dtype` names, made of `kwargs`, or these as a dict.

    Raises: BadRequest that names what is wrong.
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
    """The columns of a result: a model's or dataclass's fields, a dict's; `result` holds anything else.

    items: what a method gave. Of a stream of several, `results` holds them all, in their order.
    """
    if len(items) != 1:
        return {"results": [_plain(item) for item in items]}
    found = _plain(items[0])
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {"result": found}


def _plain(item: Any) -> Any:
    if isinstance(item, BaseModel):
        return item.model_dump()
    if isinstance(item, msgspec.Struct):
        return msgspec.structs.asdict(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return dataclasses.asdict(item)
    return dict(cast("Mapping[str, Any]", item)) if isinstance(item, Mapping) else item


def error_in(found: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """Status and envelope of a result that is an error, as engines answer by handle; None when it is none."""
    said = found if found.get("object") == "error" else found.get("error")
    if not isinstance(said, Mapping) or "message" not in said or (said is not found and len(found) > 1):
        return None
    detail = dict(cast("Mapping[str, Any]", said))
    return _status(detail), {"error": detail}


def _status(detail: Mapping[str, Any]) -> int:
    code, kind = detail.get("code"), str(detail.get("type") or "")
    if isinstance(code, int) and 400 <= code < 600:
        return code
    if code in _STATUSES:
        return _STATUSES[code]
    return 400 if "invalid" in kind or "BadRequest" in kind else 500


def _statuses(kind: type[Error]) -> dict[Any, int]:
    found = {kind.code: kind.status}
    for one in kind.__subclasses__():
        found |= _statuses(one)
    return found


_STATUSES = _statuses(Error)
