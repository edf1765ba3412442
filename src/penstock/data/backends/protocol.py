"""The Backend protocol: what a window may ask of whatever answers the requests of rows."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.data.rows.request import RowRequest
from penstock.engine import Progress, no_progress
from penstock.errors import EngineDead
from penstock.transport.continuation import NOTHING_MADE, Made


@dataclass(frozen=True, slots=True)
class Response:
    """body: JSON. headers: names in lower case; those from aiohttp are found in any case."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def retry_after_s(self) -> float | None:
        """How long the service asked to wait: seconds or a date, HTTP's own, or milliseconds, OpenAI's."""
        if (milliseconds := _number(self.headers.get("retry-after-ms"))) is not None:
            return milliseconds / 1e3
        given = self.headers.get("retry-after", "")
        if (seconds := _number(given)) is not None:
            return seconds
        try:
            return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
        except (ValueError, TypeError):  # neither
            return None


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "none")
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


class RowInterrupted(EngineDead):
    """EngineDead, where another engine may go on with the row. made: for its next `RowRequest`."""

    made: Made | None = None

    def keep(self, made: Made, given: Made | None) -> None:
        """given: what the row began with. Where an engine has added nothing, that may be what ends engines,
        and the row begins anew.
        """
        if made not in (NOTHING_MADE, given):
            self.made = made


class Backend(Protocol):
    """Answers requests, many at a time, on one event loop."""

    async def start(self, progress: Progress = no_progress) -> None:
        """Makes it ready; restarts it after EngineDead. Does nothing while it runs.

        Raises: EngineStartFailed, ConfigError, Unavailable.
        """
        ...

    async def stop(self) -> None:
        """Releases everything. May be called twice, or before `start`."""
        ...

    async def send(self, request: RowRequest) -> Response:
        """The response; cancelling the call aborts the request in the engine.

        Raises: EngineDead when the engine died while it ran the request; Unavailable when it was not reached.
        """
        ...

    def available_slots(self, in_flight: int) -> int:
        """How many more requests to send now, so that a few always wait in the engine; 0 when full."""
        ...
