"""The Backend protocol: whatever answers the requests of rows.

An engine in this process, a fleet behind Ray Serve, any OpenAI-compatible URL; all in `backends/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.data.rows.request import Request
from penstock.engine import Load, Progress, no_progress


@dataclass(frozen=True, slots=True)
class Response:
    """What came back, whatever its status. body: JSON. retry_after_s: what the other side asked for."""

    status: int
    body: bytes
    retry_after_s: float | None = None


class Backend(Protocol):
    """Answers requests, many at a time, on one event loop."""

    async def start(self, progress: Progress = no_progress) -> None:
        """Makes it ready; after EngineDead, makes a new one. Does nothing when it runs.

        Raises: EngineStartFailed, ConfigError, Unavailable.
        """
        ...

    async def stop(self) -> None:
        """Frees everything. Safe to call twice or before `start`."""
        ...

    async def send(self, request: Request) -> Response:
        """One answer; cancelling it aborts the request in the engine.

        Raises: EngineDead when the engine died with this request in it; Unavailable when it was not reached.
        """
        ...

    def load(self) -> Load:
        """Of the engine or engines behind it, as far as known. Cheap, never raises."""
        ...

    def available_slots(self, in_flight: int) -> int:
        """How many more requests it wants now, to have always work waiting and never much; 0 when full."""
        ...
