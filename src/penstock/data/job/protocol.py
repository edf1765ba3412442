"""What goes to a worker and comes back: rows to run, and how they ended. Values that cross processes."""

from __future__ import annotations

import msgspec

from penstock.data.results.outcome import State
from penstock.data.rows.request import Request


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A row for one worker to run. deaths: of engines that it was in. key: see `journal.Entry`."""

    row: int
    request: Request
    deaths: int = 0
    key: str | None = None


class Done(msgspec.Struct, frozen=True, array_like=True):
    """A row that has ended and is in the journal. Units: tokens, as the engine counted them; seconds."""

    row: int
    state: State
    code: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 1
    deaths: int = 0
    message: str = ""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A worker's news. room: how many more rows it wants now. running: how many it has."""

    done: list[Done]
    room: int
    running: int = 0
    engine_deaths: int = 0
