"""What became of one request: the record that workers hand in and figures are made of."""

from __future__ import annotations

from array import array
from itertools import pairwise

import msgspec

UNFINISHED = "unfinished"
"""The run was stopped before the answer was complete: neither good nor failed."""


class RequestOutcome(msgspec.Struct, array_like=True):
    """One request. Times are seconds of the machine's monotonic clock, the same in all its processes.

    due:    when it was to be sent; waiting in the client counts as the user's waiting.
    events: 8-byte floats, when each event that carried text came.
    counted: it lies in the measured time.
    error:  kind of failure; empty when the answer is complete.
    """

    due: float
    sent: float
    ended: float
    events: bytes
    asked_tokens: int
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    turn: int = 0
    counted: bool = True
    error: str = ""
    detail: str = ""

    @property
    def good(self) -> bool:
        return not self.error

    def times(self) -> array[float]:
        """When each event with text came."""
        times = array("d")
        times.frombytes(self.events)
        return times

    def event_count(self) -> int:
        return len(self.events) // 8

    def tokens(self) -> int:
        """Made tokens by the service's own count; without one, events."""
        return self.event_count() if self.completion_tokens is None else self.completion_tokens


class RequestTiming(msgspec.Struct, frozen=True):
    """The latencies of one good request, in seconds. Gaps are between events, `tpot` is per token."""

    ttft: float
    e2e: float
    gaps: list[float]
    tpot: float | None

    @classmethod
    def of(cls, outcome: RequestOutcome) -> RequestTiming:
        """Of an outcome with at least one event."""
        times = outcome.times()
        tokens = outcome.tokens()
        spread = times[-1] - times[0]
        return cls(
            ttft=times[0] - outcome.due,
            e2e=outcome.ended - outcome.due,
            gaps=[later - earlier for earlier, later in pairwise(times)],
            tpot=spread / (tokens - 1) if tokens > 1 else None,
        )


pack = msgspec.msgpack.Encoder().encode
"""Bytes of a list of outcomes, for `unpack`."""

unpack = msgspec.msgpack.Decoder(list[RequestOutcome]).decode
