"""The rows in flight on one backend: refilled row by row, through engine deaths and refusals.

Above it: a job's worker, or a stage of a Ray Data pipeline. Below it: one backend. It lives on one event
loop. Rows start in the order of their calls. Rows that were in an engine when it died (suspects) are retried
in quarantine, fewer at a time after each death, until one that kills engines by itself is found.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from penstock.data.backends.protocol import Backend, Response, RowInterrupted
from penstock.data.execution.retry import (
    BUSY_STATUSES,
    RetryPolicy,
    classify_response,
    is_retryable,
    refuses_all,
    response_failure,
)
from penstock.data.results.outcome import Failure, Outcome, failed
from penstock.data.rows.request import RowRequest
from penstock.errors import EngineDead, Error, Unavailable
from penstock.transport.continuation import Made

_POLL_S = 0.005
"""How often to check whether the engine has scheduled the requests already sent to it."""

_MOST_POISON_ROWS = 4
"""If there are deaths enough for so many, and no answer between them, the engine is at fault."""

_REFUSED_ROWS = 16
"""So many rows refused with 403, without an answered one between, show that it is not about a row."""

_ASSUMED_SUSPECTS = 256
"""Rows in flight at a death in another process, where their number is unknown."""


class Window:
    """Rows in flight on `backend`, which has been started.

    exclusive: whether the backend serves this window only; then nothing else runs beside suspects.
    max_in_flight: rows at a time; None for as many as the backend takes.
    """

    def __init__(
        self,
        backend: Backend,
        retry_policy: RetryPolicy | None = None,
        *,
        exclusive: bool = True,
        max_in_flight: int | None = None,
    ) -> None:
        self.backend = backend
        self.retry_policy = retry_policy or RetryPolicy()
        self._exclusive = exclusive
        self._max_in_flight = max_in_flight
        self._waiting: list[deque[_Row]] = [deque() for _ in range(self.retry_policy.max_deaths)]
        self._in_flight: set[_Row] = set()
        self._suspects: set[_Row] = set()
        self._suspects_at_death = _ASSUMED_SUSPECTS
        self._poller: asyncio.Task[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._restarted_at = 0.0
        self._deaths_in_a_row = 0
        self._running = 0
        self._outage_since: float | None = None
        self._refused: dict[_Row, float] = {}
        self._answered_at = 0.0
        self._broken: Error | None = None

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def available_slots(self) -> int:
        """How many more rows could start now; 0 while the engine restarts or suspects run by themselves."""
        if self._restart is not None or (self._exclusive and self._max_suspect_deaths()):
            return 0
        return max(0, self._free_slots() - len(self._waiting[0]))

    async def run(self, request: RowRequest, deaths: int = 0) -> Outcome:
        """The row's final outcome. deaths: of engines while they ran this row, before now.

        Raises: what the backend raises when it cannot restart, EngineDead when it keeps dying, Unavailable
        when it could not be reached for `outage_s`. The row has no outcome then.
        """
        row = _Row(request, deaths)
        if deaths:
            self._suspects.add(row)
        self._running += 1
        try:
            async with asyncio.timeout(None) as limit:
                outcome = await self._run_tries(row, limit)
        except TimeoutError:
            outcome = self._failed(
                row,
                "deadline_exceeded",
                f"No answer within its deadline of {self.retry_policy.deadline_s} s.",
            )
        except asyncio.CancelledError:
            if self._running == 1:  # without rows nothing tells when the outage ends
                self._outage_since = None
            raise
        finally:
            self._running -= 1
            if row in self._suspects:
                self._suspects.discard(row)
                self._admit()
        return row.finished(outcome)

    async def close(self) -> None:
        """Gives up a restart of the engine. Call it when no row runs any more."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait({self._restart})

    async def _run_tries(self, row: _Row, limit: asyncio.Timeout) -> Outcome:
        while row.deaths < self.retry_policy.max_deaths:
            try:
                await self._wait_turn(row, limit)
                response = await self.backend.send(row.request)
            except EngineDead as death:
                if self._broken is not None:
                    raise self._broken from death
                row.deaths += 1
                row.go_on_with(death.made if isinstance(death, RowInterrupted) else None)
                await self._on_death(row, death)
                continue
            except Unavailable as error:
                if self._broken is not None:
                    raise self._broken from None
                self._release(row)
                await self._on_unreachable(row, error)
                continue
            finally:
                self._release(row)
            self._deaths_in_a_row = 0
            if response.status in BUSY_STATUSES:
                if self._busy_too_long(row, response):
                    return classify_response(response, row.attempts)
            elif not self._may_refuse_all(row, response):
                self._outage_since = row.busy_since = None
                row.failures += 1
                is_final = not is_retryable(response) and row not in self._refused
                if is_final or row.failures >= self.retry_policy.max_attempts:
                    return classify_response(response, row.attempts)
                row.go_on_with(None)
            await asyncio.sleep(self.retry_policy.backoff_s(row.attempts, response.retry_after_s))
            row.attempts += 1
        return self._failed(row, "poison_row", f"{row.deaths} engines died while they ran this row.")

    async def _wait_turn(self, row: _Row, limit: asyncio.Timeout) -> None:
        """Returns when the row may run; it is in flight from then on."""
        if self._broken is not None:
            raise self._broken
        row.turn = asyncio.get_running_loop().create_future()
        self._waiting[row.deaths].append(row)
        self._admit()
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            await row.turn
        except asyncio.CancelledError:
            with suppress(ValueError):  # it was its turn already
                self._waiting[row.deaths].remove(row)
            raise
        if row.start_try() and self.retry_policy.deadline_s is not None:
            limit.reschedule(asyncio.get_running_loop().time() + self.retry_policy.deadline_s)

    async def _poll(self) -> None:
        while any(self._waiting):
            await asyncio.sleep(_POLL_S)
            self._admit()

    def _admit(self) -> None:
        while self._restart is None and (row := self._next_row()) is not None:
            if not row.turn.done():  # not cancelled while it waited
                self._in_flight.add(row)
                row.turn.set_result(None)

    def _next_row(self) -> _Row | None:
        if level := self._max_suspect_deaths():
            beside = (
                len(self._in_flight) if self._exclusive else sum(row.deaths > 0 for row in self._in_flight)
            )
            if self._waiting[level] and beside < self.retry_policy.quarantine_concurrency(
                self._suspects_at_death, level
            ):
                return self._waiting[level].popleft()
            if self._exclusive:
                return None
        if self._waiting[0] and self._free_slots() > 0:
            return self._waiting[0].popleft()
        return None

    def _free_slots(self) -> int:
        wanted, sent = self.backend.available_slots(len(self._in_flight)), len(self._in_flight)
        return wanted if self._max_in_flight is None else min(wanted, self._max_in_flight - sent)

    def _max_suspect_deaths(self) -> int:
        """The most deaths that any suspect has been in; 0 without suspects."""
        return max((row.deaths for row in self._suspects), default=0)

    def _release(self, row: _Row) -> None:
        """Frees the row's slot. Does nothing when it has none."""
        if row in self._in_flight:
            self._in_flight.discard(row)
            self._admit()

    async def _on_death(self, row: _Row, death: EngineDead) -> None:
        """Returns when an engine runs again, restarted once for all rows that were in the old one."""
        if row.deaths < self.retry_policy.max_deaths:
            self._suspects.add(row)
        else:
            self._suspects.discard(row)
        if self._restart is None and row.started >= self._restarted_at:
            self._suspects_at_death = max(len(self._in_flight), len(self._suspects))
            self._restart = asyncio.create_task(self._restart_backend(death))
            self._restart.add_done_callback(_consume_exception)
        self._release(row)
        if self._restart is not None:
            await asyncio.shield(self._restart)
        if 1 < row.deaths < self.retry_policy.max_deaths:  # a lost node's engines are not all known at once
            await asyncio.sleep(self.retry_policy.backoff_s(row.deaths + 1))

    async def _restart_backend(self, death: EngineDead) -> None:
        try:
            self._deaths_in_a_row += 1
            if self._deaths_in_a_row > self.retry_policy.max_deaths * _MOST_POISON_ROWS:
                raise death
            await self.backend.start()
            self._restarted_at = time.monotonic()
        except Error as error:
            self._give_up(error)
        finally:
            self._restart = None

    async def _on_unreachable(self, row: _Row, error: Unavailable) -> None:
        now = time.monotonic()
        self._outage_since = self._outage_since or now
        if now - self._outage_since > self.retry_policy.outage_s:
            self._give_up(error)
        row.unreached += 1
        await asyncio.sleep(self.retry_policy.backoff_s(row.unreached))

    def _busy_too_long(self, row: _Row, response: Response) -> bool:
        """Whether this row was answered 429 or 503 for too long, while others were served.

        Raises: Unavailable when all rows were.
        """
        now = time.monotonic()
        self._outage_since = self._outage_since or now
        row.busy_since = row.busy_since or now
        if now - self._outage_since > self.retry_policy.outage_s:
            outage = f"{self.retry_policy.outage_s:g} s (status {response.status})"
            why = response_failure(response, row.attempts).message
            self._give_up(Unavailable(f"Every request was refused for {outage}: {why}"))
        return now - row.busy_since > self.retry_policy.outage_s

    def _may_refuse_all(self, row: _Row, response: Response) -> bool:
        """Whether it is not known yet if others are refused as this row is; it is tried again until then.

        Raises: Unavailable when all are: by a response that can only mean that, or by many in a row, with no
        row in flight from before the first of them.
        """
        now, is_all = time.monotonic(), refuses_all(row.request, response)
        if is_all is False:
            self._answered_at = now
            self._refused.clear()
            return False
        self._refused.setdefault(row, now)
        since = next(iter(self._refused.values()))
        are_new = all(one.started > since for one in self._in_flight)
        if is_all or (are_new and len(self._refused) >= _REFUSED_ROWS):
            why = response_failure(response, row.attempts).message.rstrip(".")
            hint = " (--no-chat sends prompts as they are)" if response.status == 400 else ""
            self._give_up(
                Unavailable(
                    f"The job is refused, not one of its rows (status {response.status}): {why}. Put that "
                    f"right{hint} and run the command again to continue; no row is lost."
                )
            )
        last, row.refused_at = row.refused_at, now
        may_be_answered = any(one not in self._refused for one in self._in_flight)
        return may_be_answered and (last is None or last > self._answered_at)

    def _give_up(self, error: Error) -> NoReturn:
        """Raises the error here, in all rows that wait, and in later ones: the backend is lost."""
        self._broken = error
        for rows in self._waiting:
            for row in rows:
                if not row.turn.done():
                    row.turn.set_exception(error)
            rows.clear()
        raise error

    def _failed(self, row: _Row, code: str, message: str) -> Outcome:
        return failed(Failure(code=code, message=message, stage="engine", attempts=row.attempts))


def _consume_exception(task: asyncio.Task[None]) -> None:
    """Where all rows were cancelled, nothing awaits the task, and asyncio would log its exception."""
    if not task.cancelled():
        task.exception()


@dataclass(eq=False, slots=True)
class _Row:
    """One row during `run`."""

    request: RowRequest
    deaths: int
    attempts: int = 1
    failures: int = 0
    unreached: int = 0
    busy_since: float | None = None
    refused_at: float | None = None
    first: float | None = None
    started: float = 0.0
    turn: asyncio.Future[None] = field(init=False)

    def go_on_with(self, made: Made | None) -> None:
        """The next try."""
        if made is not self.request.made:
            self.request = msgspec.structs.replace(self.request, made=made)

    def start_try(self) -> bool:
        """A try begins now; whether it is the first."""
        self.started = time.monotonic()
        if self.first is not None:
            return False
        self.first = self.started
        return True

    def finished(self, outcome: Outcome) -> Outcome:
        """The outcome with the row's attempts, deaths and times."""
        began = self.first if self.first is not None else time.monotonic()
        started = max(self.started, began)
        return msgspec.structs.replace(
            outcome,
            attempts=self.attempts,
            deaths=self.deaths,
            waited_s=started - began,
            took_s=time.monotonic() - started,
        )
