"""When a row is tried again, how often and how long; and what a response means for its row.

Read by the window. It knows the error bodies of OpenAI, Anthropic and FastAPI, and no engine.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.data.backends.protocol import Response
from penstock.data.results.outcome import NO_BODY, Failure, Outcome, bad_answer, failed
from penstock.data.rows.request import CHAT, RowRequest
from penstock.errors import ModelNotFound, OwnCodeFailed

RETRYABLE_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})

BUSY_STATUSES = frozenset({429, 503})
"""Of these, the ones that say nothing about the request, only to come back later."""

REFUSED_STATUSES = frozenset({401, 402, 403})
"""About the client's key, its account and its rights; perhaps about a model that the row names itself."""

_MISSING_TEMPLATE = b"must provide a chat template"
"""vLLM's words about a model that can only complete prompts."""

_MAX_BACKOFF_S, _MAX_DOUBLINGS = 30.0, 20
_SHOWN_CHARS = 2_000
_MOST_ERROR = 1 << 16  # bytes of a body that is kept
_USER_CODE_FAILED = OwnCodeFailed.code.encode()
_NOT_JSON = (ValueError, RecursionError)
"""msgspec's errors, with those about UTF-8 and about depth."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of one row, and of the job while nothing answers.

    max_attempts: responses with a retryable status other than 429 and 503; the last one fails the row.
    max_deaths: of engines while they ran this row; then it fails as poison. At least 2.
    deadline_s: from the row's first try, over all its tries; None for no limit.
    outage_s: with no engine reached, or every request answered 429 or 503, until the job stops with its rows
    unfinished. A row that alone is answered so for this long fails.
    """

    max_attempts: int = 3
    max_deaths: int = 3
    deadline_s: float | None = None
    outage_s: float = 300.0
    initial_backoff_s: float = 0.5

    def backoff_s(self, tries: int, requested_s: float | None = None) -> float:
        """Before the next try, after `tries` of them. requested_s: what the service asked for; it wins."""
        if requested_s is not None:
            return min(requested_s, 10 * _MAX_BACKOFF_S)
        doubled = self.initial_backoff_s * 2 ** min(tries - 1, _MAX_DOUBLINGS)
        return min(_MAX_BACKOFF_S, doubled) * random.uniform(0.5, 1.0)

    def quarantine_concurrency(self, suspects: int, deaths: int) -> int:
        """How many rows that `deaths` engine deaths have hit may run together.

        Shrinks geometrically from `suspects` (in flight at the last death) to 1, so that only a row that
        killed an engine while it ran alone is poison.
        """
        steps = self.max_deaths - 1
        left = max(0, steps - deaths)
        return max(1, math.ceil(suspects ** (left / steps))) if left else 1


def is_retryable(response: Response) -> bool:
    """Whether another try may end otherwise. The user's own code fails again on the same row."""
    if response.status not in RETRYABLE_STATUSES:
        return False
    return _USER_CODE_FAILED not in response.body or _error(response.body).get("code") != OwnCodeFailed.code


def refuses_all(request: RowRequest, response: Response) -> bool | None:
    """Whether every row of the job would be refused like this one; None: if it happens to others, too.

    By its key, or by a model that the row does not name itself.
    """
    own = request.model is not None or not request.path.startswith("/")
    if response.status in REFUSED_STATUSES:
        return None if own or response.status == 403 else True
    if response.status == 404 and not own:
        error = _error(response.body)
        return error.get("code") == ModelNotFound.code or "model" in str(error.get("message", "")).lower()
    return response.status == 400 and request.path == CHAT and _MISSING_TEMPLATE in response.body


def is_lasting(status: int) -> bool:
    """Whether a row that ended with this status would end so again."""
    return status < 500 and status not in RETRYABLE_STATUSES | REFUSED_STATUSES


def classify_response(response: Response, attempts: int) -> Outcome:
    """`ok` with the body, or `failed` with what the body says."""
    if response.status != 200:
        return failed(response_failure(response, attempts), _envelope(response.body))
    try:
        response.body.decode()
        body = msgspec.json.decode(response.body, type=msgspec.Raw)
        return Outcome(state="ok", attempts=attempts, body=body.copy())
    except _NOT_JSON:
        message = f"The response is not valid JSON: {_shown(response.body)}"
        return failed(bad_answer(message, attempts))


def response_failure(response: Response, attempts: int) -> Failure:
    """What a response of another status than 200 says."""
    error, status = _error(response.body), response.status
    code = error.get("code") or error.get("type")
    if not isinstance(code, str):  # some servers put the status there
        code = str(error.get("type") or f"http_{status}")
    message = error.get("message") or error.get("detail") or _shown(response.body) or f"Status {status}."
    return Failure(code=code, message=str(message), stage="engine", attempts=attempts, status=status)


def _envelope(body: bytes) -> msgspec.Raw:
    """The body itself if it is an error in OpenAI's or Anthropic's form, of a usual size."""
    known = len(body) <= _MOST_ERROR and isinstance(_error(body).get("type"), str)
    is_envelope = body.startswith((b'{"error"', b'{"type":"error"'))
    return msgspec.Raw(body) if known and is_envelope else NO_BODY


def _error(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
    except _NOT_JSON:
        return {}
    error = fields.get("error", fields)
    return error if isinstance(error, dict) else {"message": error}


def _shown(body: bytes) -> str:
    return body[:_SHOWN_CHARS].decode(errors="replace")
