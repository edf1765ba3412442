"""SGLang's timings of one request, from its events."""

from __future__ import annotations

import time

from penstock.engines.sglang.deltas import GenerateEvent
from penstock.request_context import EngineTimings


class Times:
    """Of one request. Units: seconds."""

    def __init__(self) -> None:
        self._queue_s: float | None = None
        self._prefill_s: float | None = None
        self._first: float | None = None
        self._last = 0.0

    def tell(self, event: GenerateEvent) -> None:
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last
            self._queue_s, self._prefill_s = event.meta_info.queue_time, event.prefill_s

    def spent(self) -> EngineTimings:
        decode_s = None if self._first is None else self._last - self._first
        return EngineTimings(self._queue_s, self._prefill_s, decode_s)
