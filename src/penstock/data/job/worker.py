"""Runs rows on one backend, and journals each outcome before it reports it.

Above it: the driver, which passes rows by `step`, in its own process or to a Ray actor. Below it: the window
and the journal. It does not know where rows come from.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from penstock.data.backends.protocol import Backend
from penstock.data.execution.retry import RetryPolicy
from penstock.data.execution.window import Window
from penstock.data.job.protocol import RowCompleted, WorkerHandle, WorkerUpdate, WorkItem
from penstock.data.journal.segment import Entry, Segment
from penstock.data.results.outcome import Failure, Outcome, failed
from penstock.data.results.responses import ResponseUsage, checked
from penstock.data.storage.paths import StoragePath
from penstock.engine import Progress, no_progress
from penstock.errors import Error
from penstock.on_thread import completed

log = logging.getLogger(__name__)

_MAX_SILENCE_S = 0.5
"""A step with nothing to report returns after this time, as a sign of life."""

_POLL_S = 0.005
"""How often a step looks whether there is room for another row."""


class BatchWorker:
    """One backend, its window and its segment."""

    def __init__(
        self,
        backend: Backend,
        segment: Callable[[Callable[[Error], object]], Segment],
        retry_policy: RetryPolicy,
        *,
        exclusive: bool = True,
    ) -> None:
        """segment: called once the backend runs, with a handler of its failure. exclusive: see `Window`."""
        self._backend, self._make_segment = backend, segment
        self._window = Window(backend, retry_policy, exclusive=exclusive)
        self._segment: Segment | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: list[RowCompleted] = []
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    async def start(self, progress: Progress = no_progress) -> None:
        """Raises: what the backend raises when it cannot start."""
        await self._backend.start(progress)
        self._loop = asyncio.get_running_loop()
        self._segment = self._make_segment(partial(self._loop.call_soon_threadsafe, self._fail))

    async def step(self, items: list[WorkItem], has_more: bool = True) -> WorkerUpdate:
        """Takes rows; returns when some are completed or, with `has_more`, when there is room for more.

        has_more: whether more rows are waiting.
        Raises: what made the backend unusable, then at every call; its rows are not completed.
        """
        for item in items:
            task = asyncio.create_task(self._run(item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await self._wait(has_more)
        if self._error is not None and not self._done:
            raise self._error
        self._changed.clear()
        done, self._done = self._done, []
        return WorkerUpdate(done, self._window.available_slots())

    async def stop(self) -> list[RowCompleted]:
        """Cancels running rows, without outcomes; returns the rows that were completed."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._window.close()
            if self._segment is not None:
                await completed(asyncio.to_thread(self._segment.close))
            await asyncio.sleep(0)  # lets the segment's last callbacks run
        finally:
            await self._backend.stop()
        done, self._done = self._done, []
        return done

    async def _wait(self, has_more: bool) -> None:
        await asyncio.sleep(0)  # the rows just taken begin
        ends = time.monotonic() + _MAX_SILENCE_S
        while not (has_more and self._window.available_slots()) and (left_s := ends - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S if has_more else left_s):
                    await self._changed.wait()
                    return

    async def _run(self, item: WorkItem) -> None:
        try:
            outcome = await self._outcome(item)
            done = row_completed(item.row, outcome)
            assert self._segment is not None
            tokens = (done.prompt_tokens, done.cached_tokens, done.output_tokens)
            self._segment.append(
                Entry(item.row, outcome, key=item.key, tokens=tokens),
                lambda: self._loop.call_soon_threadsafe(self._report, done),
            )
        except Exception as error:
            self._fail(error)

    async def _outcome(self, item: WorkItem) -> Outcome:
        """Raises: Penstock's errors, since then no row can run; any other exception fails only its row."""
        try:
            return checked(item.request.path, await self._window.run(item.request, item.deaths))
        except Error:
            raise
        except Exception as error:
            log.warning("Row %d failed in our own code.", item.row, exc_info=error)
            return failed(Failure.from_error(error, "engine"))

    def _report(self, done: RowCompleted) -> None:
        self._done.append(done)
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()


class _Used(msgspec.Struct):
    usage: ResponseUsage | None = None


_used = msgspec.json.Decoder(_Used).decode


def row_completed(row: int, outcome: Outcome) -> RowCompleted:
    """An outcome in short."""
    failure, usage = outcome.failure, ResponseUsage()
    if outcome.state == "ok":
        with suppress(msgspec.DecodeError):
            usage = _used(outcome.body).usage or usage
    prompt, cached, generated = usage.counts()
    code, attempts = failure.code if failure else None, outcome.attempts
    return RowCompleted(row, outcome.state, code, prompt or 0, cached or 0, generated or 0, attempts)


@dataclass(eq=False)
class InProcessPool:
    """One worker in this process, over a backend in another. connect: before a backend is made."""

    backend: Callable[[], Backend]
    connect: Callable[[], Callable[[], None]] = lambda: lambda: None
    size = 1

    def make_worker(self, journal: StoragePath, segment: str, retry_policy: RetryPolicy) -> WorkerHandle:
        return BatchWorker(self.backend(), partial(Segment, journal, segment), retry_policy, exclusive=False)
