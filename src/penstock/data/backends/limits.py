"""How many requests to send: to an engine, judged by its load alone; to a service, per second and at a time.

An engine takes waiting requests at the start of each step, as far as its batch and KV cache allow. So some
must always wait, but no more than it takes soon: requests not sent yet can go to another engine.
"""

from __future__ import annotations

import asyncio
import time

from penstock.engine import Load

_AHEAD_S = 0.1  # requests are accepted so long before they may go
_MAX_PAUSE_S = 60.0
_MIN, _MAX = 16, 1024
_SHARE, _SHARE_UNTIL_FULL = 4, 2
"""One request waits for so many that run; more while the engine takes all that wait at once."""


class QueueDepth:
    """Adaptive queue depth of one engine; `on_response` is called for each response, as a load report never
    shows requests that end within a step.
    """

    def __init__(self) -> None:
        self._depth = _MIN
        self._max_running = _MIN

    def available_slots(self, load: Load, in_flight: int) -> int:
        """How many more requests to send now, of which `in_flight` are unanswered."""
        running = load.running - load.unseen
        depth = max(self._depth, running // (_SHARE if load.waiting else _SHARE_UNTIL_FULL))
        if load.waiting > depth:
            return 0
        return max(0, depth - (in_flight - running))

    def on_response(self, load: Load) -> None:
        """Increases the depth by 1 when no request waited, decreases it by 1 when more than half of it did.

        The limit is the most that ever ran at once, as a step cannot take more, unless nothing runs.
        """
        running = load.running - load.unseen
        self._max_running = max(self._max_running, running)
        if not load.waiting + load.unseen:
            most = self._max_running if running else _MAX
            self._depth = max(self._depth, min(most, self._depth + 1))
        elif load.waiting > self._depth // 2:
            self._depth = max(_MIN, self._depth - 1)


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
