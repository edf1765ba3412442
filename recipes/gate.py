"""When a model has learned: all that its gate asks is right by a clear lead, also once it is saved.

A lead says by how much what is right is ahead of the best of what is wrong; below 0 the answer is wrong.
Other processors add in another order, and engines compute in bfloat16: a clear lead survives both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from recipes import NotLearned


class Gate:
    """Ends a training when every lead is clear; passes no saved model where one is less than half of that."""

    def __init__(self, clear: float, every: int, last: int, first: int = 0) -> None:
        """clear: in the unit of leads. every: steps between two looks. first, last: fewest and most steps."""
        self.clear, self._every, self._last, self._first = clear, every, last, first
        self._step, self._found = 0, "nothing is known"

    def steps(self) -> Iterator[int]:
        """The steps to take, from 1. Raises: NotLearned after the last one."""
        while self._step < self._last:
            self._step += 1
            yield self._step
        raise NotLearned(f"After {self._last} steps {self._found}.")

    def due(self, step: int) -> bool:
        """Whether to look at leads after this step."""
        return step >= self._first and step % self._every == 0

    def holds(self, leads: Sequence[float]) -> bool:
        """Whether the training may end here; prints how far it is."""
        self._found = _weak(leads, self.clear)
        print(f"step {self._step}: {self._found or 'learned'}, {time.process_time():.0f} s", flush=True)
        return not self._found

    def examine(self, leads: Sequence[float]) -> str:
        """What to report of the saved model. Raises: NotLearned."""
        if found := _weak(leads, self.clear / 2):
            raise NotLearned(f"Once saved, {found}.")
        return f"{len(leads)} answers are right, by {min(leads):.2f} at least"


def _weak(leads: Sequence[float], clear: float) -> str:
    """How many are not clear, and the least; nothing where all are. A lead that is no number is not clear."""
    count = sum(not lead >= clear for lead in leads)
    return (
        f"{count} of {len(leads)} leads are under {clear:g}, the least is {min(leads):.2f}" if count else ""
    )
