"""The final outcome of a row. Made by the window, stored in the journal, written to outputs."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock import errors
from penstock.errors import Error
from penstock.openai.errors import BY_CODE

State = Literal["ok", "failed", "skipped"]
Stage = Literal["read", "preprocess", "engine", "postprocess"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a row failed: the one type of every error column.

    code: as in docs/reference/errors.md, or the engine's own. status: HTTP's, where there was a response.
    """

    code: str
    message: str
    stage: Stage
    attempts: int = 1
    status: int | None = None

    @classmethod
    def from_error(cls, error: Exception, stage: Stage) -> Failure:
        """The reverse of `to_error`; keeps everything of a failure that became an error.

        An exception that is not Penstock's is a fault of code: Penstock's in the engine's stage, else the
        user's.
        """
        if not isinstance(error, Error):
            code = Error.code if stage == "engine" else errors.OwnCodeFailed.code
            return cls(code=code, message=f"{type(error).__name__}: {error}", stage=stage)
        facts = error.facts
        return cls(
            code=str(facts.get("code", error.code)),
            message=str(error),
            stage=stage,
            attempts=int(facts.get("attempts", 1)),
            status=int(facts.get("status", error.status)),
        )

    def to_error(self) -> Error:
        """Of the class with this code, else of that for this status; the code is one of its facts."""
        kind = BY_CODE.get(self.code) or _BY_STATUS.get(self.status or 500, Error)
        return kind(self.message, code=self.code, attempts=self.attempts, status=self.status or kind.status)


NO_BODY = msgspec.Raw()
"""Left out of JSON as a default, which no other empty one would be."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`ok` with a body, `failed` with a failure, or `skipped`.

    body: the engine's JSON response, untouched; of a failure only where it is an error in OpenAI's form.
    deaths: of engines, while they ran this row.
    Units: waited_s from the first try to the start of the last one, took_s from there to the response.
    """

    state: State
    attempts: int = 1
    deaths: int = 0
    body: msgspec.Raw = NO_BODY
    failure: Failure | None = None
    waited_s: float = 0.0
    took_s: float = 0.0


SKIPPED = Outcome(state="skipped", attempts=0)
"""Of a row that sends no request."""


def bad_answer(message: str, attempts: int) -> Failure:
    """Of a response with status 200 whose body is not what was asked for."""
    return Failure(code="bad_answer", message=message, stage="engine", attempts=attempts)


def failed(failure: Failure, body: msgspec.Raw = NO_BODY) -> Outcome:
    """body: that of the error's response, as lines of OpenAI's error file repeat it."""
    return Outcome(state="failed", attempts=failure.attempts, failure=failure, body=body)


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
