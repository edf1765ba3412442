"""Feeds the workers of a job from its queue until no row is left, through their crashes and up to the limits.

Used by the job for one pass over its rows. A row is in the journal before it is counted here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from penstock.data.execution.retry import RetryPolicy
from penstock.data.job.prefix import PendingRow
from penstock.data.job.protocol import RowCompleted, WorkerHandle, WorkerLost, WorkerPool
from penstock.data.job.queue import Queue
from penstock.data.job.report import BUDGET, Limits, ProgressListener, RunStats
from penstock.data.job.worker import row_completed
from penstock.data.journal.lock import JobLock, lost_lock
from penstock.data.journal.segment import Entry, Segment
from penstock.data.journal.segment_reader import outcomes_in
from penstock.data.storage.paths import StoragePath
from penstock.errors import Error
from penstock.on_thread import opened

_LOOK_S = 0.2
_LOSSES_IN_A_ROW = 3
"""Consecutive crashes of one worker without a completed row after which it is not restarted."""


class ShutdownRequest:
    """First request: no new rows, running ones may end. Second: stop at once. For one event loop."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._requested = asyncio.Event()
        self._forced = asyncio.Event()

    def request(self, reason: str) -> None:
        """Sets the reason. Called again, it stops the job at once."""
        if self.reason is not None:
            self._forced.set()
            return
        self.reason = reason
        self._requested.set()

    def force(self) -> None:
        self._forced.set()

    @property
    def requested(self) -> bool:
        return self.reason is not None

    async def wait(self) -> None:
        await self._requested.wait()

    async def wait_forced(self, limit_s: float | None) -> None:
        """Returns when a second request comes, or after `limit_s`; None for no limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._forced.wait()
        except TimeoutError:
            return


async def _run_together(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Runs the coroutines concurrently; when one raises, cancels the others and re-raises."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class Driver:
    """One pass. run_number: prefix of the names of its segments."""

    pool: WorkerPool
    journal: StoragePath
    run_number: int
    retry_policy: RetryPolicy
    listener: ProgressListener
    stats: RunStats
    stop: ShutdownRequest
    limits: Limits
    lock: JobLock

    def __post_init__(self) -> None:
        self._writing = threading.Lock()
        self._errors: list[BaseException] = []
        self._completed_by = Counter[str]()
        self._cancelled = asyncio.Event()

    async def run(self, rows: Iterable[PendingRow | Entry], *, group: bool) -> None:
        """Until every row is completed or, after a stop, the running rows are or their time is up.

        rows: rows to run, and entries for rows that need none.
        Raises: errors of the input; the last worker's error when no worker is left.
        """
        self._loop = asyncio.get_running_loop()
        name = f"{self.run_number:04d}-driver"
        on_broken = partial(self._loop.call_soon_threadsafe, self._fail)
        segment = opened(lambda: Segment(self.journal, name, on_broken), Segment.close)
        async with segment as self._segment:
            self._queue = Queue(
                self._pending(rows),
                group=group,
                on_reused=lambda row, of: self._write(Entry(row, duplicate_of=of)),
            )
            filling = asyncio.create_task(self._queue.read_ahead())
            beside = [asyncio.create_task(self._monitor()), asyncio.create_task(self._watch_the_clock())]
            for task in beside:
                task.add_done_callback(self._on_ended_beside)
            try:
                if await self._has_work():
                    with ExitStack() as connected:
                        connected.callback(self.pool.connect())
                        workers = range(1, self.pool.size + 1)
                        await _run_together(self._run_worker(number) for number in workers)
            finally:
                for task in beside:
                    task.cancel()
                self._queue.close()
                await asyncio.gather(*beside, filling, return_exceptions=True)
        await asyncio.sleep(0)  # what the segment's thread has called
        if self._queue.error is not None:
            raise self._queue.error
        if self.lock.lost():
            raise lost_lock(self.journal)
        if self._errors and not self._queue.complete and not self.stop.requested:
            raise self._errors[-1]

    async def _has_work(self) -> bool:
        """Whether any row has to run; if not, no engine is started."""
        while not self._queue.waiting and not self._done():
            await self._queue.changed()
        return not self._done()

    def _pending(self, rows: Iterable[PendingRow | Entry]) -> Iterator[PendingRow]:
        """Rows to run; the others are written to the journal. On the reader's thread."""
        for row in rows:
            if self.stop.requested:
                return
            if isinstance(row, PendingRow):
                yield row
            else:
                self._write(row)

    def _write(self, entry: Entry) -> None:
        """Journals a row that no worker ran. On any thread."""
        state, failure = ("ok", None) if (end := entry.outcome) is None else (end.state, end.failure)
        done = RowCompleted(entry.row, state, failure and failure.code)
        with self._writing:
            self._segment.append(entry, lambda: self._loop.call_soon_threadsafe(self._count, done))

    def _on_ended_beside(self, task: asyncio.Task[None]) -> None:
        """Such as by an error of the user's listener: without it nobody would see that the lock is lost."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self._cancelled.set()
        self._queue.wake()

    def _count(self, done: RowCompleted) -> None:
        self.stats.add(done)
        self._check_limits()

    async def _run_worker(self, number: int) -> None:
        """One worker, restarted when its process crashes."""
        losses, born = 0, 0
        while not self._done():
            born += 1
            name = f"{self.run_number:04d}-engine-{number}" + (f"-{born}" if born > 1 else "")
            worker = self.pool.make_worker(self.journal, name, self.retry_policy)
            try:
                await self._feed(worker, name, f"engine {number}")
                break
            except WorkerLost as lost:
                await self._recover_from_crash(name, lost)
                losses = 1 if self._completed_by[name] else losses + 1
                if losses >= _LOSSES_IN_A_ROW:
                    self._retire_worker(lost)
                    break
            except Error as error:
                self._retire_worker(error)
                break
            finally:
                self._record_completed(name, await worker.stop())
                self._queue.release(name)
                self.listener.on_phase(f"engine {number}", "gone")

    async def _feed(self, worker: WorkerHandle, name: str, label: str) -> None:
        starting = asyncio.create_task(worker.start(partial(self.listener.on_phase, label)))
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return
            starting.result()
        finally:
            stopping.cancel()
            starting.cancel()
            await asyncio.wait({starting})  # it may clean up, and `stop` must not run beside it
        self.listener.on_phase(label, "ready")
        self.stats.ready()
        self._queue.register(name, label)
        room = 1
        while not self._done():
            items = [] if self.stop.requested else self._queue.take(name, room)
            if not items and not self._queue.running(name):
                await self._queue.changed()
                continue
            step = await worker.step(items, len(items) == room and not self.stop.requested)
            self._record_completed(name, step.done)
            room = max(step.room, 0 if self._queue.running(name) else 1)

    def _record_completed(self, name: str, done: Iterable[RowCompleted]) -> None:
        for one in self._queue.record_completed(name, done):
            self._completed_by[name] += 1
            self.stats.add(one)
        self._check_limits()

    def _check_limits(self) -> None:
        if (reason := self.limits.reached(self.stats)) is not None:
            self._request_stop(reason)

    async def _recover_from_crash(self, name: str, lost: WorkerLost) -> None:
        """Counts rows that the crashed worker journaled; its other rows run again, with one more death."""
        self.stats.worker_deaths += 1
        self.listener.on_message(f"{lost} Its rows are run again.")
        recovered = await asyncio.to_thread(outcomes_in, self.journal, name, self._queue.rows_of(name))
        self._record_completed(name, [row_completed(row, outcome) for row, outcome in recovered])
        for row in self._queue.requeue_crashed(name):
            with self._writing:
                self._segment.append(Entry(row.number, deaths=row.deaths), lambda: None)

    def _retire_worker(self, error: Error) -> None:
        self._errors.append(error)
        if len(self._errors) < self.pool.size:
            self.listener.on_message(f"Continuing without one worker: {error}")

    def _done(self) -> bool:
        if self._cancelled.is_set() or self._queue.error is not None:
            return True
        if self.stop.requested:
            return not self._queue.in_progress
        return self._queue.drained

    def _request_stop(self, reason: str) -> None:
        if not self.stop.requested:
            self.stop.request(reason)

    async def _monitor(self) -> None:
        """Reports progress, and stops when the lock is lost."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.stats.running = self._queue.in_progress
            self.listener.on_tick(self.stats)
            if self.lock.lost():
                self.stop.request("another driver has taken over")
                self.stop.force()

    async def _watch_the_clock(self) -> None:
        """Enforces the time limit, and wakes waiting workers after any stop."""
        limit_s, ran_s = self.limits.seconds, time.monotonic() - self.stats.started
        try:
            async with asyncio.timeout(None if limit_s is None else limit_s - ran_s):
                await self.stop.wait()
        except TimeoutError:
            self._request_stop(f"{BUDGET}: the limit of {limit_s:g} s is reached")
        self._queue.wake()
        await self.stop.wait_forced(self.limits.grace_s)
        self._cancelled.set()
        self._queue.wake()
