"""Which batches run, and how those that run share the replicas: earliest deadline among those at risk, else
round robin by tokens.

A batch that has run for a while gives its turn to one that waits and has had less. Above it: the runner, for
turns, and the replicas, for shares. It knows neither storage nor engines.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

SLICE_S = 30.0
"""A turn lasts at least so long while others wait: each one reads the input and the journal again."""

_MARGIN = 2.0
"""A batch is at risk when it would need more than its time divided by this, at its speed so far."""


@dataclass(slots=True)
class Standing:
    """A batch's progress in this process. created_at, expires_at: seconds since 1970. left: requests without
    an outcome. rows, tokens: done, in `ran_s` seconds of turns. start: initial credit: the lowest
    token count of any running batch, so that a new batch gets its fair share at once.
    """

    id: str
    created_at: float
    expires_at: float
    left: int = 0
    rows: int = 0
    tokens: int = 0
    ran_s: float = 0.0
    start: float = 0.0

    @property
    def served(self) -> float:
        """Tokens, for comparing batches."""
        return self.start + self.tokens

    @property
    def row_tokens(self) -> float:
        """Tokens of a request, so far; at least 1."""
        return max(1.0, self.tokens / self.rows) if self.rows else 1.0

    def advance(self, rows: int, tokens: int, left: int) -> None:
        """rows, tokens: done since the last call."""
        self.rows += rows
        self.tokens += tokens
        self.left = left

    def is_at_risk(self, now: float) -> bool:
        """Whether it may miss its deadline; one that has not begun, in the second half of its time."""
        time_left = self.expires_at - now
        if not self.rows:
            return time_left < (self.expires_at - self.created_at) / 2
        return _MARGIN * self.left * self.ran_s / self.rows > time_left

    def order(self, now: float) -> tuple[bool, float, str]:
        """Sorts before the order of those that may wait longer."""
        at_risk = self.is_at_risk(now)
        return not at_risk, self.expires_at if at_risk else self.served, self.id


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch that wants slots of a model. in_flight: requests that it has there."""

    standing: Standing
    in_flight: int


def share(free: int, mine: Claim, others: Sequence[Claim], now: float) -> int:
    """How many of a model's free slots a batch may take while `others` want some, too.

    The batch at risk with the earliest deadline takes all, but for one request of each other. Without one the
    slots are dealt out so that all come to have had equally many tokens, those of running requests included.
    """
    claims = [mine, *others]
    first = min(claims, key=lambda one: one.standing.order(now))
    if first.standing.is_at_risk(now):
        if first is mine:
            return max(0, free - sum(not one.in_flight for one in others))
        return min(free, int(not mine.in_flight))
    known = [one.standing.row_tokens for one in claims if one.standing.rows]
    usual = sum(known) / len(known) if known else 1.0
    sizes = [one.standing.row_tokens if one.standing.rows else usual for one in claims]
    served = [one.standing.served + one.in_flight * size for one, size in zip(claims, sizes, strict=True)]
    level = _level(free, sorted(zip(served, sizes, strict=True)))
    return min(free, max(0, math.ceil((level - served[0]) / sizes[0])))


def _level(free: int, batches: Sequence[tuple[float, float]]) -> float:
    """Tokens that each has had when the slots are dealt out.

    batches: tokens so far, and tokens of one request; sorted.
    """
    slots, weight, level = float(free), 0.0, 0.0
    for number, (served, size) in enumerate(batches, 1):
        slots += served / size
        weight += 1 / size
        level = slots / weight
        if number < len(batches) and level <= batches[number][0]:
            break
    return level


@dataclass(slots=True)
class _Turn:
    """ended: called when another batch is to have it. began: None while it waits."""

    standing: Standing
    ended: Callable[[], None]
    granted: asyncio.Future[None] = field(repr=False)
    began: float | None = None
    counted_to: float = 0.0


class TurnQueue:
    """Lets `most` batches run at a time. Call `look` about once a second."""

    def __init__(
        self, most: int, *, slice_s: float = SLICE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most, self._slice_s, self._clock = most, slice_s, clock
        self._turns: dict[str, _Turn] = {}
        self._known: dict[str, Standing] = {}

    def add(self, standing: Standing) -> None:
        """A batch has come; it starts with as many tokens as the one that has had the fewest."""
        standing.start = min((one.served for one in self._known.values()), default=0.0)
        self._known[standing.id] = standing

    def remove(self, batch_id: str) -> None:
        """It has ended."""
        self._known.pop(batch_id, None)

    @asynccontextmanager
    async def turn(
        self, standing: Standing, ended: Callable[[], None], *, stopped: bool
    ) -> AsyncGenerator[None]:
        """Waits for the batch's turn, unless it was stopped; the turn ends with the block.

        ended: called, perhaps several times, when the block should end because another batch waits.
        """
        mine = _Turn(standing, ended, asyncio.get_running_loop().create_future())
        self._turns[standing.id] = mine
        self._grant()
        if stopped:
            self.skip(standing.id)
        try:
            await mine.granted
            yield
        finally:
            self._count(mine)
            del self._turns[standing.id]
            self._grant()

    def skip(self, batch_id: str) -> None:
        """The batch need not wait: it was stopped."""
        turn = self._turns.get(batch_id)
        if turn is not None and turn.began is None:
            self._begin(turn)

    def look(self) -> None:
        """Counts the time of all that run, and ends turns of those that have had more than one that waits."""
        now = time.time()
        running = [one for one in self._turns.values() if one.began is not None]
        for one in running:
            self._count(one)
        waiting = sorted(self._waiting(), key=lambda one: one.standing.order(now))
        running.sort(key=lambda one: one.standing.order(now), reverse=True)
        over = [one for one in running if self._clock() - (one.began or 0.0) >= self._slice_s]
        for next_one, one in zip(waiting, over, strict=False):
            if next_one.standing.order(now) < one.standing.order(now):
                one.ended()

    def _waiting(self) -> Iterable[_Turn]:
        return (one for one in self._turns.values() if one.began is None and not one.granted.done())

    def _grant(self) -> None:
        now = time.time()
        free = self._most - sum(one.began is not None for one in self._turns.values())
        for one in sorted(self._waiting(), key=lambda one: one.standing.order(now))[: max(0, free)]:
            self._begin(one)

    def _begin(self, turn: _Turn) -> None:
        if not turn.granted.done():
            turn.granted.set_result(None)
            turn.began = turn.counted_to = self._clock()

    def _count(self, turn: _Turn) -> None:
        if turn.began is not None:
            now = self._clock()
            turn.standing.ran_s += now - turn.counted_to
            turn.counted_to = now
