"""The window of rows over one backend: always full, refilled row by row, through deaths and refusals.

Above it: a job's worker, or a stage of a Ray Data pipeline. Below it: one backend. It lives on one event
loop. Rows get their turns in the order of asking. One that an engine died with is tried again apart from the
others, with ever fewer beside it, until it has an end or is known to be what kills.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec

from penstock.data.backends.protocol import Answer, Backend
from penstock.data.execution.patience import Patience
from penstock.data.execution.retry import BUSY, failed, may_pass, outcome_of
from penstock.data.results.outcome import Failure, Outcome
from penstock.data.rows.request import Request
from penstock.errors import EngineDead, Error, Unavailable

_LOOK_S = 0.005
"""Between looks at an engine that may have begun with what it was given."""

_DEATHS_IN_A_ROW = 3
"""More than poison needs, with no row answered in between: then it is the engine."""

_SUSPECTS = 256
"""How many there were at a death elsewhere."""


class Window:
    """Rows in flight over `backend`, which has been started.

    alone: whether the backend serves this window only. Then suspects run with nothing else beside them.
    most: rows in flight at a time; None for as many as the backend wants.
    """

    def __init__(
        self,
        backend: Backend,
        patience: Patience | None = None,
        *,
        alone: bool = True,
        most: int | None = None,
    ) -> None:
        self.backend = backend
        self.patience = patience or Patience()
        self._alone = alone
        self._most = most
        self._waiting: list[deque[_Row]] = [deque() for _ in range(self.patience.deaths)]
        self._flying: set[_Row] = set()
        self._suspects: set[_Row] = set()
        self._suspected = _SUSPECTS
        self._pump: asyncio.Task[None] | None = None
        self._revival: asyncio.Task[None] | None = None
        self._born = 0.0
        self._deaths_in_a_row = 0
        self._out_since: float | None = None
        self._broken: Error | None = None

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def room(self) -> int:
        """How many rows more could start now; 0 while an engine is made anew or suspects run alone."""
        if self._revival is not None or (self._alone and self._level()):
            return 0
        return max(0, self._free() - len(self._waiting[0]))

    async def wait_room(self) -> int:
        """Returns as soon as a row could start: how many could. Raises: as `run`."""
        while not (room := self.room()):
            if self._broken is not None:
                raise self._broken
            await asyncio.sleep(_LOOK_S)
        return room

    async def run(self, request: Request, deaths: int = 0) -> Outcome:
        """The row's one end. deaths: of engines, with this row in them, before now.

        Raises: what the backend raises when it cannot be made anew, EngineDead when it only dies, Unavailable
        when it was out of reach for too long. The row has no end then.
        """
        row = _Row(request, deaths)
        if deaths:
            self._suspects.add(row)
        try:
            async with asyncio.timeout(None) as limit:
                outcome = await self._tries(row, limit)
        except TimeoutError:
            outcome = self._gave_up(
                row, "deadline_exceeded", f"No answer within {self.patience.deadline_s} s, its deadline."
            )
        finally:
            self._suspects.discard(row)
            self._admit()
        return row.ended(outcome)

    async def _tries(self, row: _Row, limit: asyncio.Timeout) -> Outcome:
        while row.deaths < self.patience.deaths:
            try:
                await self._turn(row, limit)
                answer = await self.backend.ask(row.request)
            except EngineDead as death:
                if self._broken is not None:
                    raise self._broken from death
                row.deaths += 1
                await self._died(row, death)
                continue
            except Unavailable as error:
                self._leave(row)
                await self._unreached(row, error)
                continue
            finally:
                self._leave(row)
            self._deaths_in_a_row = 0
            if answer.status in BUSY:
                if self._waited_out(row, answer):
                    return outcome_of(answer, row.attempts)
            else:
                self._out_since = row.busy_since = None
                row.failures += 1
                if not may_pass(answer) or row.failures >= self.patience.attempts:
                    return outcome_of(answer, row.attempts)
            await self._refused(row, answer)
        self._deaths_in_a_row = 0
        return self._gave_up(row, "poison_row", f"{row.deaths} engines died with this row in them.")

    async def _turn(self, row: _Row, limit: asyncio.Timeout) -> None:
        """Returns when the row may run; it is in flight then."""
        if self._broken is not None:
            raise self._broken
        row.turn = asyncio.get_running_loop().create_future()
        self._waiting[row.deaths].append(row)
        self._admit()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._look())
        await row.turn
        if row.starts() and self.patience.deadline_s is not None:
            limit.reschedule(asyncio.get_running_loop().time() + self.patience.deadline_s)

    async def _look(self) -> None:
        while any(self._waiting):
            await asyncio.sleep(_LOOK_S)
            self._admit()

    def _admit(self) -> None:
        while self._revival is None and (row := self._next()) is not None:
            if not row.turn.done():  # else it was cancelled while it waited
                self._flying.add(row)
                row.turn.set_result(None)

    def _next(self) -> _Row | None:
        if level := self._level():
            beside = len(self._flying) if self._alone else sum(row.deaths > 0 for row in self._flying)
            if self._waiting[level] and beside < self.patience.width(self._suspected, level):
                return self._waiting[level].popleft()
            if self._alone:
                return None
        if self._waiting[0] and self._free() > 0:
            return self._waiting[0].popleft()
        return None

    def _free(self) -> int:
        wanted = self.backend.room(len(self._flying))
        return wanted if self._most is None else min(wanted, self._most - len(self._flying))

    def _level(self) -> int:
        """Most deaths that a row here has seen; 0 where none is a suspect."""
        return max((row.deaths for row in self._suspects), default=0)

    def _leave(self, row: _Row) -> None:
        """Its place is free for others. Does nothing when it has none."""
        if row in self._flying:
            self._flying.discard(row)
            self._admit()

    async def _died(self, row: _Row, death: EngineDead) -> None:
        """Returns when there is an engine again: made once for all rows that were in the old one."""
        if row.deaths < self.patience.deaths:
            self._suspects.add(row)
        else:
            self._suspects.discard(row)
        if self._revival is None and row.started >= self._born:
            self._suspected = max(len(self._flying), len(self._suspects))
            self._revival = asyncio.create_task(self._revive(death))
            self._revival.add_done_callback(_retrieved)
        self._leave(row)
        if self._revival is not None:
            await asyncio.shield(self._revival)

    async def _revive(self, death: EngineDead) -> None:
        try:
            self._deaths_in_a_row += 1
            if self._deaths_in_a_row > self.patience.deaths + _DEATHS_IN_A_ROW:
                raise death
            await self.backend.start()
            self._born = time.monotonic()
        except Error as error:
            self._break(error)
            raise
        finally:
            self._revival = None
        self._admit()

    async def _unreached(self, row: _Row, error: Unavailable) -> None:
        now = time.monotonic()
        self._out_since = self._out_since or now
        if now - self._out_since > self.patience.outage_s:
            self._break(error)
            raise error
        row.unreached += 1
        await asyncio.sleep(self.patience.pause(row.unreached))

    def _waited_out(self, row: _Row, answer: Answer) -> bool:
        """Whether a row was told to come later for too long, while others were answered.

        Raises: Unavailable when all were.
        """
        now = time.monotonic()
        self._out_since = self._out_since or now
        row.busy_since = row.busy_since or now
        if now - self._out_since > self.patience.outage_s:
            failure = outcome_of(answer, row.attempts).failure
            why = failure.message if failure is not None else ""
            error = Unavailable(
                f"Every request was refused for {self.patience.outage_s:g} s (status {answer.status}): {why}"
            )
            self._break(error)
            raise error
        return now - row.busy_since > self.patience.outage_s

    async def _refused(self, row: _Row, answer: Answer) -> None:
        await asyncio.sleep(self.patience.pause(row.attempts, answer.retry_after_s))
        row.attempts += 1

    def _break(self, error: Error) -> None:
        """No row will get an answer here any more: those that wait are told now, others when they come."""
        self._broken = error
        for rows in self._waiting:
            for row in rows:
                if not row.turn.done():
                    row.turn.set_exception(error)
            rows.clear()

    def _gave_up(self, row: _Row, code: str, message: str) -> Outcome:
        return failed(Failure(code=code, message=message, stage="engine", attempts=row.attempts))


def _retrieved(task: asyncio.Task[None]) -> None:
    """Nobody waits for it where all rows were cancelled; asyncio would complain then."""
    if not task.cancelled():
        task.exception()


class _Row:
    """One row between `run` and its end."""

    __slots__ = (
        "attempts",
        "busy_since",
        "deaths",
        "failures",
        "first",
        "request",
        "started",
        "turn",
        "unreached",
    )

    def __init__(self, request: Request, deaths: int) -> None:
        self.request = request
        self.deaths = deaths
        self.attempts = 1
        self.failures = self.unreached = 0
        self.busy_since: float | None = None
        self.first: float | None = None
        self.started = 0.0
        self.turn: asyncio.Future[None]

    def starts(self) -> bool:
        """Whether this is its first try, which begins now."""
        self.started = time.monotonic()
        if self.first is not None:
            return False
        self.first = self.started
        return True

    def ended(self, outcome: Outcome) -> Outcome:
        """The outcome with what the row went through."""
        began = self.first if self.first is not None else time.monotonic()
        started = max(self.started, began)
        return msgspec.structs.replace(
            outcome,
            attempts=self.attempts,
            deaths=self.deaths,
            waited_s=started - began,
            took_s=time.monotonic() - started,
        )
