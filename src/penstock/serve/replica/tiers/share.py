"""Batch's share of one replica: which of its requests run, which wait here, and which give way.

Those over the limit wait here and not in the engine, so that none of them stands before an online request.
When an online request would wait for a seat, or the limit is cut, the youngest batch requests are aborted and
wait again: they lose the least work, and all lost work together stays below 5 % of what was done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from penstock.engine import Load
from penstock.serve.replica.tiers.controller import Controller, Sample, Targets

_LOST_SHARE = 0.05
_PACE = 0.25  # of a long step, between two starts: most steps are several times shorter than the long ones
_HOLD = 0.5  # of a long step, after an online request: it waits for a step to end, and then no row joins it
_ALONE_S = 1.0  # after batch's last request, before what online takes counts as without batch


@dataclass(eq=False, slots=True)
class BatchRequest:
    """One that runs or waits. start: called when it may run. abort: takes it out of the engine, if it has
    sent nothing yet; returns whether it could.
    """

    start: Callable[[], None]
    abort: Callable[[], bool] = field(default=lambda: False)
    since: float = 0.0


class BatchShare:
    """Knows no event loop: `layer` calls `tick` every `TICK_S` while there is batch. Units: seconds."""

    def __init__(self, load: Callable[[], Load], targets: Targets, clock: Callable[[], float]) -> None:
        self._load = load
        self._clock = clock
        self._controller = Controller(targets)
        self._waiting: deque[BatchRequest] = deque()
        self._running: dict[BatchRequest, None] = {}
        self._online = self._seats = 0
        self._ttft_s = 0.0
        self._next_start, self._due_at = 0.0, inf
        self._batch_at = -inf
        self._done_s = self._lost_s = 0.0
        self.requeued = 0
        """Batch requests that were aborted and run again."""

    @property
    def limit(self) -> int:
        return self._controller.limit

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether there is no batch."""
        return not self._running and not self._waiting

    # -- online

    def online_began(self) -> None:
        """An online request goes to the engine."""
        self._online += 1
        if self._waiting:
            self._next_start = max(self._next_start, self._clock() + _HOLD * self._load().step_s)
        if self._running and self._seats and self._online + self.running > self._seats:
            self._abort(1)

    def online_ended(self) -> None:
        self._online -= 1

    def first_token(self, ttft_s: float) -> None:
        """An online request has got its first token."""
        self._ttft_s = max(self._ttft_s, ttft_s)
        if not self._running and self._clock() - self._batch_at > _ALONE_S:
            self._controller.learn(ttft_s, self._load().step_s)

    # -- batch

    def enter(self, request: BatchRequest, again: bool = False) -> None:
        """Queues it, and starts what may run now. again: before all others, since it was aborted."""
        (self._waiting.appendleft if again else self._waiting.append)(request)
        self._seats = self._seats or self._load().seats  # before the first tick
        self._start()

    def leave(self, request: BatchRequest) -> None:
        """It has ended, or its client has gone."""
        if request in self._running:
            del self._running[request]
            self._batch_at = self._clock()
            self._done_s += self._batch_at - request.since
        elif request in self._waiting:
            self._waiting.remove(request)
        self._start()

    def tick(self) -> None:
        """Adapts the limit, aborts what is over it, and starts what may run."""
        load = self._load()
        sample = Sample(self._online, self.running, bool(self._waiting), self._ttft_s, load)
        self._ttft_s, self._seats = 0.0, load.seats
        self._controller.tick(sample, self._clock())
        if self._controller.gives_way:
            self._abort(self.running - self.limit)
        self._start()

    def _start(self) -> None:
        """While there is online work, one at a time: each adds a prefill to a step that all share."""
        now = self._clock()
        room = self.limit
        if self._online and self._seats:
            room = min(room, self._seats - self._online)
        while self._waiting and self.running < room and self._may_start(now):
            request = self._waiting.popleft()
            request.since = now
            self._running[request] = None
            self._next_start, self._due_at = now + _PACE * self._load().step_s, inf
            request.start()

    def _may_start(self, now: float) -> bool:
        """Whether it is a row's time. One that has room waits a long step at most, whatever comes online."""
        if self._controller.quiet(now) or now >= self._next_start:
            return True
        self._due_at = min(self._due_at, now + self._load().step_s)
        return now >= self._due_at

    def _abort(self, count: int) -> None:
        """Aborts up to so many, the youngest first, as far as their work may be lost."""
        now = self._clock()
        for request in list(reversed(self._running)):
            if count <= 0 or self._lost_s + now - request.since > _LOST_SHARE * self._done_s:
                return
            if request.abort():
                count -= 1
                del self._running[request]
                self._lost_s += now - request.since
                self.requeued += 1
