"""Runs one batch from validation to its files, by the jobs of `penstock batch`; again after any crash.

What has been done is in the job's journal; what the batch is, in its record. Above it: the context.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import sub
from typing import Literal, NamedTuple

import msgspec

from penstock.data.job.job import Job
from penstock.data.job.manifest import FINISHED
from penstock.data.job.protocol import WorkerPool
from penstock.data.job.report import JobReport, Limits, ProgressListener, RunStats
from penstock.data.job.spec import JobSpec
from penstock.data.results.outcome import Failure
from penstock.data.storage.paths import StoragePath
from penstock.errors import Error, NotFound, QuotaExhausted
from penstock.jobs.batches import FOLDER, JOURNAL, BatchStore
from penstock.jobs.files import FileStore
from penstock.jobs.records import OUTPUT, BatchRecord, Fault, FileRecord, Status, now_s
from penstock.jobs.storage import JobStorage
from penstock.jobs.turns import Standing, TurnQueue
from penstock.jobs.validation import ENDPOINTS, CheckedInput, Resolve
from penstock.on_thread import completed

log = logging.getLogger(__name__)

MakePool = Callable[[BatchRecord, Standing, Resolve], WorkerPool]
"""What answers a batch's rows, by what names of models mean for its key."""


class RowCounts(NamedTuple):
    """Of rows that a batch has completed, and their tokens."""

    rows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0


Count = Callable[[BatchRecord, RowCounts], bool]
"""Called with what a batch has completed since the last call. Returns whether a budget is used up."""

Reason = Literal["cancelled", "expired", "quota"]
_CODES = {
    "cancelled": "batch_cancelled",
    "expired": "batch_expired",
    "quota": QuotaExhausted.code,
}
_LEFT = {
    "cancelled": "The batch was cancelled before this request was done.",
    "expired": "This request was not done before the completion window of the batch ended.",
    "quota": "A budget of the tenant was used up before this request was done. Its operator can raise it.",
}
_GRACE_S = 30.0
"""For running requests, after a cancel or at the end of the window."""

_ENDING_S = 600.0
"""A stopped batch that fails for so long to write its files ends without them."""

_MOST_PAUSE_S = 30.0
_TURN_OVER = "turn over"


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What all batches of a service share. resolve: what names mean for a batch's key. check: the input of a
    batch, on a thread. count: its usage.
    """

    storage: JobStorage
    files: FileStore
    batches: BatchStore
    make_pool: MakePool
    resolve: Callable[[BatchRecord], Resolve]
    check: Callable[[StoragePath, BatchRecord], CheckedInput]
    turns: TurnQueue
    validating: asyncio.Semaphore
    count: Count | None = None


class RunningBatch(ProgressListener):
    """One batch, until it has ended; listens to its job. `stop` may be called at any moment."""

    def __init__(self, batch_id: str, context: BatchContext) -> None:
        self._id, self._context = batch_id, context
        self._reason: Reason | None = None
        self._stopped_s = 0.0
        self._faults: list[Fault] = []
        self._job: Job | None = None
        record = self._record()
        self._standing = Standing(record.id, record.created_at, record.expires_at)

    def stop(self, reason: Reason) -> None:
        """Lets running requests end, for a while, and ends the batch with what was done."""
        if self._reason is None:
            self._reason, self._stopped_s = reason, time.monotonic()
            self._context.turns.skip(self._id)
            if self._job is not None:
                self._request_stop(self._job, reason)

    def _end_turn(self) -> None:
        """Lets all running requests end; later it goes on."""
        if self._job is not None and not self._job.stop.requested:
            self._job.stop.request(_TURN_OVER)

    def _request_stop(self, job: Job, reason: Reason) -> None:
        if not job.stop.requested:
            job.stop.request(reason)
        asyncio.get_running_loop().call_later(_GRACE_S, job.stop.force)

    async def run(self) -> None:
        """Tries again whatever fails; returns when the batch has ended."""
        record = self._record()
        if record.status == "cancelling":
            self.stop("cancelled")
        left_s = max(0, record.expires_at - now_s())
        timer = asyncio.get_running_loop().call_later(left_s, self.stop, "expired")
        self._context.turns.add(self._standing)
        failures = 0
        try:
            while not self._record().ended:
                try:
                    await self._advance()
                    failures, self._faults = 0, []
                except Exception as error:
                    failures += 1
                    await self._on_failure(error, failures)
        finally:
            timer.cancel()
            self._context.turns.remove(self._id)

    async def _on_failure(self, error: Exception, failures: int) -> None:
        """Waits before the next try, or ends a batch that was stopped long ago; never raises."""
        public = error if isinstance(error, Error) else Error()
        self._faults = [Fault(public.code, str(public))]
        if self._reason is not None and time.monotonic() - self._stopped_s > _ENDING_S:
            with suppress(Error):  # storage is away: all is tried again
                await self._end("failed" if self._reason == "quota" else self._reason, self._faults)
                return
        pause_s = min(_MOST_PAUSE_S, 0.5 * 2 ** min(failures, 6))
        trace = None if public is error else error
        log.warning("Batch %s failed; retrying in %g s: %s", self._id, pause_s, error, exc_info=trace)
        await asyncio.sleep(pause_s)

    async def _advance(self) -> None:
        """Raises: any exception, when it is to be tried again."""
        try:
            at, _ = await self._context.files.content(self._record().input_file_id)
        except NotFound as error:
            await self._end("failed", [Fault(error.code, str(error))])
            return
        if self._record().status == "cancelling":  # stored, and not said to this task yet
            self.stop("cancelled")
        if self._record().status == "validating" and self._reason is None:
            async with self._context.validating:
                await self._validate(at)
        if self._record().ended:
            return
        if not self._record().total:
            await self._end("cancelled" if self._reason == "cancelled" else "expired", self._faults)
            return
        stopped = self._reason is not None
        async with self._context.turns.turn(self._standing, self._end_turn, stopped=stopped):
            report = await self._run_rows(at)
            if report.ended == FINISHED:
                await self._finish(report)

    async def _validate(self, at: StoragePath) -> None:
        found = await asyncio.to_thread(self._context.check, at, self._record())
        if found.faults:
            await self._end("failed", found.faults)
            return

        def valid(record: BatchRecord) -> BatchRecord:
            known = msgspec.structs.replace(record, total=found.lines, models=sorted(found.models))
            return known.to("in_progress") if record.status == "validating" else known

        await self._context.batches.change(self._id, valid)

    async def _run_rows(self, at: StoragePath) -> JobReport:
        """All rows, or until its turn is over. A batch that was stopped has none left afterwards."""
        self._counted = RowCounts()
        self._finalizing: list[asyncio.Task[BatchRecord]] = []
        record = self._record()
        pool = self._context.make_pool(record, self._standing, self._context.resolve(record))
        self._job = job = Job(
            self._spec(at), pool, limits=Limits(grace_s=None), listener=self, on_stop=self._unfinished
        )
        if self._context.count is not None and self._context.count(record, RowCounts()):
            self.stop("quota")
        if self._reason is not None:
            self._request_stop(job, self._reason)
        try:
            return await job.run()
        finally:
            if job.stats.completed:  # else it may not know yet what earlier runs have completed
                self.on_tick(job.stats)  # since the last tick
            self._job = None
            await asyncio.gather(*self._finalizing, return_exceptions=True)  # the next status replaces it

    def _unfinished(self) -> Failure | None:
        """The failure of rows that were not done when the batch was stopped."""
        if self._reason is None:
            return None
        return Failure(code=_CODES[self._reason], message=_LEFT[self._reason], stage="engine", attempts=0)

    def on_tick(self, stats: RunStats) -> None:
        done = stats.before - stats.failed_before + stats.ok + stats.skipped
        failed = stats.failed_before + stats.failed
        self._context.batches.progress[self._id] = done, failed
        now = RowCounts(
            stats.completed, stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens, stats.failed
        )
        new, self._counted = RowCounts(*map(sub, now, self._counted)), now
        self._standing.advance(
            new.rows, new.prompt_tokens + new.output_tokens, self._record().total - done - failed
        )
        if self._context.count is not None and self._context.count(self._record(), new):
            self.stop("quota")

    def on_writing(self) -> None:
        def finalizing(record: BatchRecord) -> BatchRecord:
            return record.to("finalizing") if record.status == "in_progress" else record

        self._finalizing.append(asyncio.create_task(self._context.batches.change(self._id, finalizing)))

    def on_message(self, text: str) -> None:
        log.info("Batch %s: %s", self._id, text)

    async def _finish(self, report: JobReport) -> None:
        """Its files first, under the ids that were set aside for them; then its state; then its leftovers."""
        context, record = self._context, self._record()
        folder = f"{FOLDER}/{self._id}"
        output = await self._file(record, record.output_file, f"{folder}/output.jsonl", "output", report.ok)
        error = await self._file(
            record, record.error_file, f"{folder}/output.errors.jsonl", "error", report.failed
        )

        def ended(record: BatchRecord) -> BatchRecord:
            status = "completed"
            if "batch_expired" in report.errors:  # it may have been cancelled after that
                status = "expired"
            elif record.status == "cancelling":
                status = "cancelled"
            return record.to(
                status, completed=report.ok, failed=report.failed, output_file_id=output, error_file_id=error
            )

        await context.batches.change(self._id, ended)
        unwanted = ["output.failed.jsonl", *([] if output else ["output.jsonl"])]

        def remove() -> None:
            context.storage.remove_tree(f"{folder}/{JOURNAL}")
            for name in unwanted:
                (context.storage.root / folder / name).remove()

        await completed(asyncio.to_thread(remove))

    async def _file(self, record: BatchRecord, file_id: str, path: str, kind: str, rows: int) -> str | None:
        """The id of a file that the batch has written; None for one without lines."""
        if not rows:
            return None
        size = await asyncio.to_thread(self._context.storage.size_bytes, path)
        await self._context.files.add(
            FileRecord(
                id=file_id,
                bytes=size or 0,
                created_at=now_s(),
                filename=f"{record.id}_{kind}.jsonl",
                purpose=OUTPUT,
                path=path,
                expires_at=now_s() + record.output_expires_s,
                tenant=record.tenant,
            )
        )
        return file_id

    async def _end(self, status: Status, faults: list[Fault]) -> None:
        """Without files."""
        await self._context.batches.change(self._id, lambda record: record.to(status, errors=faults))

    def _record(self) -> BatchRecord:
        return self._context.batches.get(self._id)

    def _spec(self, at: StoragePath) -> JobSpec:
        record = self._record()
        return JobSpec(
            inputs=(at.url,),
            output=(self._context.storage.root / FOLDER / record.id / "output.jsonl").url,
            input_form="jsonl",
            reuse="off",
            read_files=False,
            own_paths=(record.endpoint,) if record.endpoint not in ENDPOINTS else (),
        )
