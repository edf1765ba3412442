"""What an answer means for its row: it is done, it is to be asked again, or it has failed for good.

Read by the window. It knows the error envelopes of OpenAI, Anthropic and FastAPI, and no engine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.data.backends.protocol import Answer
from penstock.data.results.outcome import Failure, Outcome
from penstock.errors import Error, OwnCodeFailed

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be others next time."""

BUSY = frozenset({429, 503})
"""Those of them that say nothing about the request, and only ask to come later."""

_OWN_FAULT = OwnCodeFailed.code.encode()
_SHOWN_CHARS = 2_000
_NO_JSON = (ValueError, RecursionError)
"""msgspec's errors, one about UTF-8 and one about depth."""


def may_pass(answer: Answer) -> bool:
    """Whether another try may end otherwise. The user's own code fails again on the same row."""
    if answer.status not in PASSING:
        return False
    return _OWN_FAULT not in answer.body or _envelope(answer.body).get("code") != OwnCodeFailed.code


def outcome_of(answer: Answer, attempts: int) -> Outcome:
    """`ok` with the body, or `failed` with what the body says."""
    if answer.status == 200:
        try:
            answer.body.decode()
            body = msgspec.json.decode(answer.body, type=msgspec.Raw)
            return Outcome(state="ok", attempts=attempts, body=body.copy())
        except _NO_JSON:
            message = f"The engine's answer is no JSON: {_shown(answer.body)}"
            return failed(Failure(code="bad_answer", message=message, stage="engine", attempts=attempts))
    return failed(_refusal(answer, attempts))


def raised(error: Error, attempts: int) -> Outcome:
    """`failed`, by an error of ours."""
    message, status = str(error), error.status
    return failed(Failure(code=error.code, message=message, stage="engine", attempts=attempts, status=status))


def failed(failure: Failure) -> Outcome:
    return Outcome(state="failed", attempts=failure.attempts, failure=failure)


def _refusal(answer: Answer, attempts: int) -> Failure:
    said = _envelope(answer.body)
    code = said.get("code") or said.get("type")
    if not isinstance(code, str):  # some servers put the status there
        code = str(said.get("type") or f"http_{answer.status}")
    message = said.get("message") or said.get("detail") or _shown(answer.body) or f"Status {answer.status}."
    return Failure(code=code, message=str(message), stage="engine", attempts=attempts, status=answer.status)


def _envelope(body: bytes) -> dict[str, Any]:
    try:
        whole = msgspec.json.decode(body, type=dict[str, Any])
    except _NO_JSON:
        return {}
    inner = whole.get("error", whole)
    return inner if isinstance(inner, dict) else {"message": inner}


def _shown(body: bytes) -> str:
    return body[:_SHOWN_CHARS].decode(errors="replace")
