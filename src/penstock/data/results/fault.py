"""A failure as the error that it was: what code around a request raises, whichever process it failed in."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import errors
from penstock.data.results.outcome import Failure, Stage
from penstock.errors import Error


def error_of(failure: Failure) -> Error:
    """Of the class with its code, else of that for its status; the failure's own code is a fact of it."""
    kind = _BY_CODE.get(failure.code) or _BY_STATUS.get(failure.status or 500, Error)
    return kind(
        failure.message, code=failure.code, attempts=failure.attempts, status=failure.status or kind.status
    )


def failure_of(error: Exception, stage: Stage) -> Failure:
    """The other way; nothing is lost of a failure that became an error.

    An error that is none of ours is a fault of code: the user's or ours around a row, ours in the engine's
    stage.
    """
    if not isinstance(error, Error):
        code = Error.code if stage == "engine" else errors.OwnCodeFailed.code
        return Failure(code=code, message=f"{type(error).__name__}: {error}", stage=stage)
    facts = error.facts
    return Failure(
        code=str(facts.get("code", error.code)),
        message=str(error),
        stage=stage,
        attempts=int(facts.get("attempts", 1)),
        status=int(facts.get("status", error.status)),
    )


def _kinds(of: type[Error] = Error) -> Iterator[type[Error]]:
    yield of
    for kind in of.__subclasses__():
        yield from _kinds(kind)


_OURS = [kind for kind in _kinds() if kind.__module__ == errors.__name__]
_BY_CODE = {kind.code: kind for kind in reversed(_OURS)}
_BY_STATUS = {
    400: errors.BadRequest,
    401: errors.Unauthorized,
    403: errors.Unauthorized,
    404: errors.NotFound,
    413: errors.TooLarge,
    422: errors.BadRequest,
    429: errors.Overloaded,
    501: errors.Unsupported,
    503: errors.Unavailable,
    504: errors.DeadlineExceeded,
}
