"""How a row ended. Made by the window, kept by the journal, written by sinks; it knows neither."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["ok", "failed", "skipped"]
Stage = Literal["read", "preprocess", "engine", "postprocess"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a row failed: the one type of every error column.

    code: as in docs/errors.md, or the engine's own. status: of HTTP, where there was an answer.
    """

    code: str
    message: str
    stage: Stage
    attempts: int = 1
    status: int | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The one end of a row: `ok` with a body, `failed` with a failure, or `skipped`.

    body: the engine's JSON answer, untouched.
    deaths: of engines, while this row was in them.
    Units: waited_s from the first try to the last one's start, took_s from there to the answer.
    """

    state: State
    attempts: int = 1
    deaths: int = 0
    body: msgspec.Raw | None = None
    failure: Failure | None = None
    waited_s: float = 0.0
    took_s: float = 0.0


SKIPPED = Outcome(state="skipped", attempts=0)
"""The end of a row that asks nothing."""
