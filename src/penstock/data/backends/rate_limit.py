"""Limits on requests to a service: per second, and at a time."""

from __future__ import annotations

import asyncio
import time

_AHEAD_S = 0.1  # requests are accepted so long before they may go
_MAX_PAUSE_S = 60.0


class RateLimiter:
    """Requests at even intervals. qps: per second; None for no limit."""

    def __init__(self, qps: float | None) -> None:
        self._interval_s = 1 / qps if qps else 0.0
        self._next = 0.0

    async def acquire(self) -> None:
        """Returns when the next request may go."""
        if not self._interval_s:
            return
        now = time.monotonic()
        at = max(now, self._next)
        self._next = at + self._interval_s
        await asyncio.sleep(at - now)

    def available(self) -> int | None:
        """How many requests may go soon; None for any number."""
        if not self._interval_s:
            return None
        ahead_s = time.monotonic() + _AHEAD_S - self._next
        return int(min(ahead_s, _AHEAD_S) / self._interval_s) + 1 if ahead_s > 0 else 0


class AdaptiveConcurrency:
    """Requests at a time: halved when the service answers that there are too many, then increased slowly."""

    def __init__(self, max_limit: int) -> None:
        self._max = max_limit
        self._limit = float(max_limit)
        self._halved_at = 0.0
        self._paused_until = 0.0

    @property
    def limit(self) -> int:
        """0 while the service has asked for a pause."""
        return 0 if time.monotonic() < self._paused_until else int(self._limit)

    def on_success(self) -> None:
        """A request was answered."""
        self._limit = min(self._max, self._limit + 1 / self._limit)

    def on_throttled(self, sent_at: float, pause_s: float | None) -> None:
        """A request was refused as one too many.

        sent_at: requests sent before the last halving say nothing new. pause_s: what the service asked for.
        """
        now = time.monotonic()
        if sent_at >= self._halved_at:
            self._limit, self._halved_at = max(1.0, self._limit / 2), now
        if pause_s is not None:
            self._paused_until = max(self._paused_until, now + min(pause_s, _MAX_PAUSE_S))
