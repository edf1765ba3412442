"""How many requests to keep waiting in an engine, judged by its load alone.

An engine takes waiting requests at the start of each step, as far as its batch and KV cache allow. So some
must always wait, but no more than it takes soon: requests not sent yet can go to another engine.
"""

from __future__ import annotations

from penstock.engine import Load

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
