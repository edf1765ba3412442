"""The Backend protocol: what a window may ask of whatever answers the requests of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.data.rows.request import RowRequest
from penstock.engine import Progress, no_progress


@dataclass(frozen=True, slots=True)
class Response:
    """body: JSON. retry_after_s: how long the service asked to wait."""

    status: int
    body: bytes
    retry_after_s: float | None = None


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
