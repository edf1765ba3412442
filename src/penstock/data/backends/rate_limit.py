"""How fast another's service may be asked: so many a second, and so many at a time as it bears."""

from __future__ import annotations

import asyncio
import time

_AHEAD_S = 0.1  # turns given out before their time
_LONGEST_REST_S = 60.0


class RateLimiter:
    """Turns at even distances. qps: how many a second; None for no limit."""

    def __init__(self, qps: float | None) -> None:
        self._gap_s = 1 / qps if qps else 0.0
        self._next = 0.0

    async def acquire(self) -> None:
        """Returns when the next request may go."""
        if not self._gap_s:
            return
        now = time.monotonic()
        at = max(now, self._next)
        self._next = at + self._gap_s
        await asyncio.sleep(at - now)

    def available(self) -> int | None:
        """How many turns come soon; None for any number."""
        if not self._gap_s:
            return None
        ahead_s = time.monotonic() + _AHEAD_S - self._next
        return max(0, min(int(ahead_s / self._gap_s), int(_AHEAD_S / self._gap_s)) + 1 if ahead_s > 0 else 0)


class AdaptiveConcurrency:
    """How many requests at a time: halved when the service says that they are too many, then slowly more."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._now = float(most)
        self._narrowed_at = 0.0
        self._rests_until = 0.0

    @property
    def limit(self) -> int:
        """0 while the service wants to be left alone."""
        return 0 if time.monotonic() < self._rests_until else int(self._now)

    def on_success(self) -> None:
        """One was answered."""
        self._now = min(self._most, self._now + 1 / self._now)

    def on_throttled(self, sent_at: float, rest_s: float | None) -> None:
        """One was too many. sent_at: those sent before the last such answer say nothing new."""
        now = time.monotonic()
        if sent_at >= self._narrowed_at:
            self._now, self._narrowed_at = max(1.0, self._now / 2), now
        if rest_s is not None:
            self._rests_until = max(self._rests_until, now + min(rest_s, _LONGEST_REST_S))
