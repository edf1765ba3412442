"""Feeds the workers of a job from its queue until no row is left: through their deaths, up to its limits.

Used by the job for one pass through its rows. What has ended is in the journal before it is counted here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator
from functools import partial
from typing import Protocol

from penstock.data.execution.retry import RetryPolicy
from penstock.data.job.prefix import Waiting
from penstock.data.job.protocol import Crew, Done, Hand, WorkerLost
from penstock.data.job.queue import Queue, Reused
from penstock.data.job.report import BUDGET, Limits, Tally, Watcher
from penstock.data.job.worker import done_of
from penstock.data.journal.lock import Claim, taken_over
from penstock.data.journal.segment import Entry, Segment
from penstock.data.journal.segment_reader import ended_in
from penstock.data.storage.paths import StoragePath
from penstock.errors import Error

_LOOK_S = 0.2
_LOSSES_IN_A_ROW = 3
"""Of one worker's processes, with no row ended between them."""


class Stop:
    """First asked: no new rows, those that run may end. Asked again: at once. For one event loop."""

    def __init__(self) -> None:
        self.why: str | None = None
        self._asked = asyncio.Event()
        self._now = asyncio.Event()

    def ask(self, why: str) -> None:
        """The reason of the first time counts."""
        if self.why is not None:
            self._now.set()
            return
        self.why = why
        self._asked.set()

    def at_once(self) -> None:
        self._now.set()

    @property
    def asked(self) -> bool:
        return self.why is not None

    async def wait(self) -> None:
        await self._asked.wait()

    async def wait_now(self, limit_s: float) -> None:
        """Returns when it was asked again, or when the time is over, counted from now."""
        try:
            async with asyncio.timeout(limit_s):
                await self._now.wait()
        except TimeoutError:
            return


class Rows(Protocol):
    """Rows to run, and rows that have ended without."""

    def __iter__(self) -> Iterator[Waiting | Entry]: ...


async def _all(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Returns when all have; what one of them raises ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Driver:
    """One pass. attempt: the number that its segments begin with."""

    def __init__(
        self,
        crew: Crew,
        journal: StoragePath,
        attempt: int,
        retry_policy: RetryPolicy,
        *,
        watcher: Watcher,
        tally: Tally,
        stop: Stop,
        limits: Limits,
        holder: Claim,
    ) -> None:
        self._crew, self._journal, self._attempt, self._retry_policy = crew, journal, attempt, retry_policy
        self._watcher, self._tally, self._stop = watcher, tally, stop
        self._limits, self._holder = limits, holder
        self._writing = threading.Lock()
        self._errors: list[Error] = []
        self._ended_by = Counter[str]()
        self._stopped = asyncio.Event()

    async def run(self, rows: Rows, *, group: bool) -> None:
        """Until every row has ended, or `stop` was asked and what ran has ended or its time is over.

        Raises: the input's errors; the last worker's when none can go on.
        """
        self._loop = asyncio.get_running_loop()
        self._segment = await asyncio.to_thread(
            Segment, self._journal, f"{self._attempt:04d}-driver", self._unkept
        )
        self._queue = Queue(self._unended(rows), group=group, answered=self._reuse)
        filling = asyncio.create_task(self._queue.fill())
        beside = [asyncio.create_task(self._look()), asyncio.create_task(self._end_in_time())]
        try:
            if await self._wanted():
                await self._crew.open()
                await _all(self._keep_working(number) for number in range(1, self._crew.size + 1))
        finally:
            for task in beside:
                task.cancel()
            self._queue.close()
            await asyncio.gather(*beside, filling, return_exceptions=True)
            await self._crew.close()
            await asyncio.to_thread(self._segment.close)
            await asyncio.sleep(0)
        if self._queue.error is not None:
            raise self._queue.error
        if self._holder.lost():
            raise taken_over(self._journal)
        if self._errors and not self._queue.complete and not self._stop.asked:
            raise self._errors[-1]

    async def _wanted(self) -> bool:
        """Whether any row has to be run: without, no engine is started."""
        while not self._queue.waiting and not self._over():
            await self._queue.changed()
        return not self._over()

    def _unended(self, rows: Iterable[Waiting | Entry]) -> Iterator[Waiting]:
        """On the reader's thread."""
        for row in rows:
            if isinstance(row, Waiting):
                yield row
            else:
                self._write(row)

    def _reuse(self, reused: list[Reused]) -> None:
        for one in reused:
            self._write(Entry(one.row, of=one.of))

    def _write(self, entry: Entry) -> None:
        """A row that ended without a worker. On any thread."""
        done = done_of(entry.row, entry.end) if entry.end is not None else Done(entry.row, "ok")
        with self._writing:
            self._segment.keep(entry, partial(self._count, done, reused=done.state == "ok"))

    def _unkept(self, error: Error) -> None:
        """On any thread: the segment cannot be written."""

        def end() -> None:
            self._errors.append(error)
            self._stopped.set()
            self._queue.wake()

        self._loop.call_soon_threadsafe(end)

    def _count(self, done: Done, *, reused: bool) -> None:
        def count() -> None:
            self._tally.add(Done(done.row, done.state, done.code, message=done.message))
            self._tally.reused += reused
            self._look_at_limits()

        self._loop.call_soon_threadsafe(count)

    async def _keep_working(self, number: int) -> None:
        """One worker, made anew when its process dies."""
        losses, born = 0, 0
        while not self._over():
            born += 1
            name = f"{self._attempt:04d}-engine-{number}" + (f"-{born}" if born > 1 else "")
            hand = self._crew.hand(self._journal, name, self._retry_policy)
            try:
                await self._work(hand, name, f"engine {number}")
                break
            except WorkerLost as lost:
                await self._bury(name, lost)
                losses = 1 if self._ended_by[name] else losses + 1
                if losses >= _LOSSES_IN_A_ROW:
                    self._give_up(lost)
                    break
            except Error as error:
                self._give_up(error)
                break
            finally:
                self._settle(name, await hand.stop())
                self._queue.left(name)
                self._watcher.phase(f"engine {number}", "gone")

    async def _work(self, hand: Hand, name: str, label: str) -> None:
        starting = asyncio.create_task(hand.start(partial(self._watcher.phase, label)))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return
            starting.result()
        finally:
            stopping.cancel()
            starting.cancel()
        self._watcher.phase(label, "ready")
        self._tally.ready()
        self._queue.join(name, label)
        room = 1
        while not self._over():
            leases = [] if self._stop.asked else self._queue.take(name, room)
            if not leases and not self._queue.running(name):
                await self._queue.changed()
                continue
            step = await hand.step(leases, len(leases) == room and not self._stop.asked)
            self._settle(name, step.done)
            room = max(step.room, 0 if self._queue.running(name) else 1)

    def _settle(self, name: str, done: Iterable[Done]) -> None:
        for one in self._queue.ended(name, done):
            self._ended_by[name] += 1
            self._tally.add(one)
        self._look_at_limits()

    def _look_at_limits(self) -> None:
        limits, tally = self._limits, self._tally
        if limits.tokens is not None and tally.tokens >= limits.tokens:
            self._end(f"{BUDGET}: {tally.tokens:,} tokens, the limit is {limits.tokens:,}")
        if limits.failures is not None and tally.failed >= limits.failures:
            self._end(f"{BUDGET}: {tally.failed:,} rows failed, the limit is {limits.failures:,}")

    async def _bury(self, name: str, lost: WorkerLost) -> None:
        """What the dead worker has kept has ended; the rest of its rows has one death more."""
        self._tally.worker_deaths += 1
        self._watcher.said(f"{lost} Its rows are run again.")
        kept = await asyncio.to_thread(ended_in, self._journal, name, self._queue.rows_of(name))
        self._settle(name, [done_of(row, end) for row, end in kept])
        for row in self._queue.lost(name):
            with self._writing:
                self._segment.keep(Entry(row.number, deaths=row.deaths), lambda: None)

    def _give_up(self, error: Error) -> None:
        self._errors.append(error)
        if len(self._errors) < self._crew.size:
            self._watcher.said(f"One worker less: {error}")

    def _over(self) -> bool:
        if self._stopped.is_set() or self._queue.error is not None:
            return True
        if self._stop.asked:
            return not self._queue.leased
        return self._queue.over

    def _end(self, why: str) -> None:
        if not self._stop.asked:
            self._stop.ask(why)

    async def _look(self) -> None:
        """Tells of progress, and notices what nobody else would."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._tally.running = self._queue.leased
            self._watcher.look(self._tally)
            if self._holder.lost():
                self._stop.ask("another driver has taken over")
                self._stop.at_once()

    async def _end_in_time(self) -> None:
        """Stops by the clock; and lets those that wait notice that it was stopped, however it was."""
        timer = None
        if self._limits.seconds is not None:
            left = self._limits.seconds - (time.monotonic() - self._tally.begun)
            why = f"{BUDGET}: {self._limits.seconds:g} s are over"
            timer = self._loop.call_later(max(0.0, left), self._end, why)
        try:
            await self._stop.wait()
            self._queue.wake()
            await self._stop.wait_now(self._limits.grace_s)
            self._stopped.set()
            self._queue.wake()
        finally:
            if timer is not None:
                timer.cancel()
