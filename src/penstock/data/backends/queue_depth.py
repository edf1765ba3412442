"""How much more an engine wants, told from its load alone. What backends share; it knows none of them.

An engine takes what waits at the start of each step, as far as its batch and its KV cache allow. So there
must always be something waiting, but no more than it takes soon: what is not sent yet can go elsewhere.
"""

from __future__ import annotations

from penstock.engine import Load

_LEAST, _MOST = 16, 1024
_SHARE, _FIRST_SHARE = 4, 2
"""One in so many of what runs waits, to be taken within a few steps; more while all is taken at once."""


class QueueDepth:
    """The one of an engine. Told of each answer, for what ends within a step is never seen running."""

    def __init__(self) -> None:
        self._margin = _LEAST
        self._widest = _LEAST

    def available_slots(self, load: Load, in_flight: int) -> int:
        """How many more requests to send now, of which `in_flight` are unanswered."""
        running = load.running - load.unseen
        margin = max(self._margin, running // (_SHARE if load.waiting else _FIRST_SHARE))
        if load.waiting > margin:
            return 0
        return max(0, margin - (in_flight - running))

    def on_response(self, load: Load) -> None:
        """Wants more ahead when it has come to the end of what waited, less when much is left.

        Not more than all that ever ran at once, which is all that can be taken in a step, unless it ran dry.
        """
        running = load.running - load.unseen
        self._widest = max(self._widest, running)
        if not load.waiting + load.unseen:
            most = self._widest if running else _MOST
            self._margin = max(self._margin, min(most, self._margin + 1))
        elif load.waiting > self._margin // 2:
            self._margin = max(_LEAST, self._margin - 1)
