"""Everything that Penstock raises, as one tree. Ground level: imports nothing of ours.

Error
├── BadRequest            400  what the client sent cannot be served
│   ├── PromptTooLong     400
│   ├── AdapterBroken     400  the adapter that the request names cannot be loaded
│   ├── Unauthorized      401
│   └── Forbidden         403  a web page that may not use this server sent it
├── NotFound              404  no such path or adapter
│   ├── ModelNotFound     404  the request names a model that is not served here
│   ├── EndpointNotSupported 404  this model has another task
│   ├── SourceNotFound    404  no files where a model or adapter was said to be
│   └── MethodNotAllowed  405  the path exists, for other methods
├── Conflict              409  not while the engine or the fleet is in this state
├── PreconditionFailed    412  it is another version than the request names
├── TooLarge              413  body over the limit
├── Overloaded            429  the queue is full: try again later
│   ├── RateLimited       429  a key or tenant is at a limit: try again later
│   └── QuotaExhausted    429  a tenant or key has used its tokens of the day or the month
├── Unsupported           501  this engine lacks the operation
├── Unavailable           503  no replica can take the request now
│   ├── EngineDead        503  the engine behind this replica is gone
│   └── DownloadFailed    503  files of a model or adapter could not be fetched
├── DeadlineExceeded      504  the request's own time limit passed
├── StorageFull           507  no room for the file
├── OwnCodeFailed         500  what the operator wrote around a model failed: a hook, an endpoint
├── ConfigError           what a user wrote in a config, every fault of it at once
└── EngineStartFailed     the engine could not start; says the engine's own reason
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*(?P<name>[A-Z]\w*)(?:\(\w+\))?: (?P<message>\S.*)$", re.MULTILINE)
_OURS = re.compile(r"\bpenstock\.errors\.\w+: (?P<message>\S.*)$", re.MULTILINE)
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_REASON_CHARS = 600


class Error(Exception):
    """Base class. `str(error)` is public; put secrets into the `raise ... from` cause.

    A subclass takes from its parent what its own line does not say.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init_subclass__(cls, **own: int | str) -> None:
        for name, value in own.items():
            setattr(cls, name, value)

    def __init__(self, message: str = "Internal error.", **facts: str | float) -> None:
        super().__init__(message)
        self.facts = facts


class BadRequest(Error, status=400, type="invalid_request_error", code="invalid_request"):
    """What the client sent cannot be served; sending it again will not help."""


class PromptTooLong(BadRequest, code="context_length_exceeded"):
    """More prompt tokens than the model's context window."""


class AdapterBroken(BadRequest, code="adapter_broken"):
    """The adapter that the request names is there, but cannot be loaded: the message says why."""


class Unauthorized(BadRequest, status=401, type="authentication_error", code="invalid_api_key"):
    """The API key is missing or wrong."""


class Forbidden(BadRequest, status=403, type="permission_error", code="forbidden"):
    """A web page that may not use this server sent the request."""


class NotFound(Error, status=404, type="invalid_request_error", code="not_found"):
    """No such model, adapter or path."""


class ModelNotFound(NotFound, code="model_not_found"):
    """The request names a model that is not served here."""


class SourceNotFound(NotFound, code="source_not_found"):
    """No files where a model or adapter was said to be: folder, repository, bucket or URL."""


class EndpointNotSupported(NotFound, code="endpoint_not_supported"):
    """The path exists, for models of another task."""


class MethodNotAllowed(NotFound, status=405, code="method_not_allowed"):
    """The path exists, for other methods."""


class Conflict(Error, status=409, type="invalid_request_error", code="conflict"):
    """What was asked for does not fit the state of the engine or the fleet; the message says what would."""


class PreconditionFailed(Error, status=412, type="invalid_request_error", code="precondition_failed"):
    """The request is for another version than there is now."""


class TooLarge(Error, status=413, type="invalid_request_error", code="body_too_large"):
    """The request body, or a file in it, is over a limit of the server."""


class Overloaded(Error, status=429, type="rate_limit_error", code="overloaded"):
    """The queue is full. Fact `retry_after_s` becomes the Retry-After header."""


class RateLimited(Overloaded, code="rate_limit_exceeded"):
    """The key, or its tenant, is at one of its limits. Facts as of `Overloaded`."""


class QuotaExhausted(Overloaded, type="insufficient_quota", code="insufficient_quota"):
    """The key, or its tenant, has used its tokens of the day or of the month. Facts as of `Overloaded`."""


class Unsupported(Error, status=501, type="invalid_request_error", code="unsupported"):
    """This engine lacks the operation."""


class Unavailable(Error, status=503, code="unavailable"):
    """No replica can take the request now. Fact `retry_after_s` becomes the Retry-After header."""


class EngineDead(Unavailable, code="engine_dead"):
    """The engine behind this replica is gone; the replica will be restarted.

    Fact `should_retry`, "false" where the request may be the cause, becomes the X-Should-Retry header.
    """


class DownloadFailed(Unavailable, code="download_failed"):
    """Files of a model or adapter could not be fetched. Fact `retryable`: whether a later try may succeed."""


class DeadlineExceeded(Error, status=504, code="deadline_exceeded"):
    """The request's own time limit passed."""


class StorageFull(Error, status=507, code="storage_full"):
    """Storage has no room for the file; what was accepted before is kept."""


class OwnCodeFailed(Error, code="own_code_failed"):
    """A preprocessor, a postprocessor or an endpoint of the operator's own has failed; the log says why."""


class EngineStartFailed(Error, code="engine_start_failed"):
    """The engine could not start; the message carries the engine's own reason."""


class ConfigError(Error, ValueError, status=400, type="invalid_request_error", code="invalid_config"):
    """Every fault of a config at once: one line each, with its path and what is allowed."""

    def __init__(self, message: str = "Invalid config.", problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


def reason(text: str) -> str:
    """Why, out of what Ray, Serve and an engine wrapped around it.

    The message of the last error of ours in a traceback, else of its last error, else the first line.
    """
    text = _COLOR.sub("", text).strip()
    ours, raised = list(_OURS.finditer(text)), list(_RAISED.finditer(text))
    if ours:
        found = ours[-1]["message"]
    elif raised:
        found = f"{raised[-1]['name']}: {raised[-1]['message']}"
    else:
        found = text.partition("\n")[0] or "No reason was given."
    return found if len(found) <= _REASON_CHARS else f"{found[:_REASON_CHARS]} ..."


def reasons(messages: Iterable[str]) -> str:
    """Each of them once, also when one quotes another; "" for none, and for messages that say nothing."""
    found = {text.rstrip(" ."): text for text in map(reason, filter(None, messages))}
    return " ".join(
        text for bare, text in found.items() if not any(bare in one for one in found.keys() - {bare})
    )


def sentence(text: str) -> str:
    """The text with a full stop at its end."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
