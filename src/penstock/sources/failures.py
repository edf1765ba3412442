"""Why a listing or transfer failed, in one sentence, and the retries where one could help.

Every client raises its own errors, some with nothing but a text. Only this file tells them apart.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from penstock.errors import Error

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FailureCause:
    """why: the end of a sentence; retryable: another try may succeed; missing: there is no such thing."""

    why: str
    retryable: bool = False
    missing: bool = False


_DENIED = FailureCause("access is denied: the credentials are missing or wrong, or lack the right to read it")
_NO_BUCKET = FailureCause("there is no such bucket", missing=True)
_NO_FILE = FailureCause("there is no such file or folder", missing=True)
_NO_REPOSITORY = FailureCause(
    "the hub has no such repository, or it is private and HF_TOKEN may not read it", missing=True
)
_GATED = FailureCause("the repository is gated: accept its terms on the hub, and set HF_TOKEN")
_OFFLINE = FailureCause("the hub is switched off (HF_HUB_OFFLINE), and its cache does not have it")
_SLOW_DOWN = FailureCause("the server asks to slow down", retryable=True)
_SERVER_FAILED = FailureCause("the server failed", retryable=True)
_LATE = FailureCause("the server did not answer in time", retryable=True)
_LOST = FailureCause("the connection was lost", retryable=True)
_UNREACHABLE = FailureCause("the server cannot be reached", retryable=True)

_STATUSES = {401: _DENIED, 403: _DENIED, 404: _NO_FILE, 408: _LATE, 410: _NO_FILE, 429: _SLOW_DOWN}

_CLASSES = {
    "GatedRepoError": _GATED,
    "RepositoryNotFoundError": _NO_REPOSITORY,
    "RevisionNotFoundError": FailureCause("the repository has no such revision", missing=True),
    "EntryNotFoundError": _NO_FILE,
    "OfflineModeIsEnabled": _OFFLINE,
    "LocalEntryNotFoundError": _OFFLINE,
    "TimeoutException": _LATE,
    "TimeoutError": _LATE,
    "ConnectError": _UNREACHABLE,
    "ClientConnectorError": _UNREACHABLE,
    "ConnectionRefusedError": _UNREACHABLE,
    "TransportError": _LOST,
    "ClientPayloadError": _LOST,
    "ServerDisconnectedError": _LOST,
    "ConnectionError": _LOST,
    "NoBucket": _NO_BUCKET,
    "FileNotFoundError": _NO_FILE,
}
"""By name, nearest class first: most of these belong to packages that need not be installed."""

_TEXTS = [
    (r"NO_SUCH_BUCKET|[Bb]ucket '.*' not found|bucket does not exist", _NO_BUCKET),
    (r"EXPIRED_TOKEN|ExpiredToken", FailureCause("the credentials have expired")),
    (
        r"ACCESS_DENIED|SIGNATURE_DOES_NOT_MATCH|INVALID_ACCESS_KEY|INVALID_CLIENT_TOKEN|UNRECOGNIZED_CLIENT"
        r"|PERMISSION_DENIED|UNAUTHENTICATED",
        _DENIED,
    ),
    (r"NO_SUCH_KEY|RESOURCE_NOT_FOUND|Path does not exist", _NO_FILE),
    (r"SLOW_DOWN|THROTTLING|RESOURCE_EXHAUSTED", _SLOW_DOWN),
    (r"INTERNAL_FAILURE|SERVICE_UNAVAILABLE", _SERVER_FAILED),
    (r"(curlCode: |CURL error \[)28\b|REQUEST_TIMEOUT|DEADLINE_EXCEEDED", _LATE),
    (r"(curlCode: |CURL error \[)(6|7)\b", _UNREACHABLE),
    (r"curlCode: \d+|CURL error \[\d+|NETWORK_CONNECTION", _LOST),
    (r"Status\((UNAVAILABLE|INTERNAL|UNKNOWN)", _SERVER_FAILED),
]
"""What Arrow's clients say: they raise plain OSErrors."""


def classify(error: BaseException) -> FailureCause:
    """Why `error` was raised."""
    if isinstance(error, ShortFile):
        return FailureCause(str(error), retryable=True)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FailureCause("there is no space left on the disk")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return _NO_FILE  # as of base64 where a path is expected
    if isinstance(error, PermissionError):
        return (
            FailureCause(f"this user has no permission for {error.filename}") if error.filename else _DENIED
        )
    if isinstance(error, ImportError):
        return FailureCause(f"a package for it is not installed ({error})")
    if found := _by_class(error) or _by_status(error) or _by_text(error):
        return found
    if isinstance(error, OSError) and error.errno:
        return FailureCause(os.strerror(error.errno), retryable=True)
    what = f"unexpected {type(error).__name__}, see the log"  # its text may hold anything
    return FailureCause(what, retryable=isinstance(error, OSError))


def pause_s(attempt: int) -> float:
    """Pause in seconds after try number `attempt`; the first is 1."""
    return 0.25 * 2**attempt


def retry(
    call: Callable[[], _T],
    tries: int,
    give_up: Callable[[Exception, FailureCause, int], NoReturn],
    *,
    final: tuple[type[Exception], ...] = (Error,),
    wait: Callable[[float], object] | None = None,
) -> _T:
    """The result of `call`, tried again where that may help. All transfers are retried here.

    give_up: raises, given the last exception, its cause and the number of tries.
    final: exceptions that are never classified or retried. wait: pauses between tries; None for `time.sleep`.
    """
    for attempt in range(1, tries + 1):
        try:
            return call()
        except final:
            raise
        except Exception as error:
            found = classify(error)
            if not found.retryable or attempt == tries:
                give_up(error, found, attempt)
        (wait or time.sleep)(pause_s(attempt))
    raise AssertionError("tries is at least 1")


def after_tries(attempts: int) -> str:
    """For the sentence about a failure: how often it was tried, if more than once."""
    return f" after {attempts} tries" if attempts > 1 else ""


def _by_class(error: BaseException) -> FailureCause | None:
    return next((_CLASSES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _CLASSES), None)


def _by_status(error: BaseException) -> FailureCause | None:
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if not isinstance(status, int):
        said = re.search(r"HTTP status (\d{3})", str(error))
        status = int(said[1]) if said else 0
    return _STATUSES.get(status) or (_SERVER_FAILED if status >= 500 else None)


def _by_text(error: BaseException) -> FailureCause | None:
    return next((found for pattern, found in _TEXTS if re.search(pattern, str(error))), None)


class ShortFile(OSError):
    """Fewer bytes came than the listing had promised, and no error."""
