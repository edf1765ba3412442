"""One run of a batch job: from the input through workers into the journal, and from there to the output.

In the driver's process, on one event loop. Only the journal is trusted: the output is written when the
journal, read again from disk or bucket, has an outcome for every row.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path

import msgspec

from penstock.data.execution.retry import RetryPolicy
from penstock.data.job import manifest
from penstock.data.job.driver import Driver, ShutdownRequest
from penstock.data.job.manifest import FINISHED, JobManifest
from penstock.data.job.output import OutputWriter, output_format
from penstock.data.job.pending import PendingRows, RequestBuilder
from penstock.data.job.protocol import WorkerPool
from penstock.data.job.report import JobReport, Limits, Prices, ProgressListener, RunStats, report
from penstock.data.job.spec import JobSpec
from penstock.data.job.validation import (
    begins_anew,
    check_columns,
    check_custom_ids,
    check_neighbours,
    check_new,
    check_reuse,
    check_same,
    detect_batch_lines,
    discard,
    find_job_input,
)
from penstock.data.journal import segment
from penstock.data.journal.index import Index
from penstock.data.journal.lock import JobLock, acquire_lock
from penstock.data.results.outcome import Failure, failed
from penstock.data.storage.source import InputFiles
from penstock.errors import ConfigError, Error
from penstock.on_thread import completed, opened
from penstock.temporary_folder import temporary_folder

log = logging.getLogger(__name__)

_CUT = "Plain prompts get at most 16 tokens, the API's default, unless --max-tokens or the row says more."

_PASSES = 3
"""Passes over rows that the journal lacks. A second one runs rows that a lost machine had not synced."""


class Job:
    """A job, new or continued from the journal at `spec.output`."""

    def __init__(
        self,
        spec: JobSpec,
        pool: WorkerPool,
        *,
        limits: Limits | None = None,
        listener: ProgressListener | None = None,
        prices: Prices | None = None,
        retry_failed: bool = False,
        on_stop: Callable[[], Failure | None] = lambda: None,
        check: Callable[[JobSpec], None] = lambda before: None,
    ) -> None:
        """on_stop: the failure of rows that a stop leaves without an outcome; None: they run when resumed.
        check: of the spec that the job began with, once no other driver can begin one; raises ConfigError.
        """
        self.spec, self.stop = spec, ShutdownRequest()
        self._pool, self._limits = pool, limits or Limits()
        self._listener, self._prices = listener or ProgressListener(), prices
        self._retry_failed, self._on_stop, self._check = retry_failed, on_stop, check
        self._journal = spec.journal
        self.stats = RunStats()

    @classmethod
    def load_spec(cls, output: str) -> JobSpec:
        """The spec of an existing job, finished or not. Raises: ConfigError when there is none."""
        journal = JobSpec(inputs=(), output=output).journal
        found = manifest.read(journal)
        if found is None:
            raise ConfigError(
                f"'{output}' has no journal beside it ('{journal.url}'): there is no job to resume."
            )
        return found.spec

    async def run(self) -> JobReport:
        """Returns when every row is completed and the output is written, or after a stop.

        Raises: ConfigError; OutputLocked; Unavailable and EngineStartFailed when no worker can
        go on. Completed rows are in the journal: run the job again to resume it.
        """
        now = await asyncio.to_thread(find_job_input, self.spec)
        async with self._locked() as lock:
            self._manifest = await completed(asyncio.to_thread(self._open, now))
            inputs = [part.url for part in self._manifest.source.parts]
            self._listener.on_start(self.spec.output, inputs, self._manifest.total)
            if self.spec.completes_prompts and "max_tokens" not in self.spec.defaults:
                self._listener.on_message(_CUT)
            other = await asyncio.to_thread(_reused_index, self.spec, self._spool / "other")
            try:
                reason, index = await self._run_rows(lock, other)
                with closing(index):
                    return await self._finish(reason, index, lock)
            except Exception as error:
                with suppress(Exception):  # such as a full disk, or another driver that has taken over
                    await asyncio.to_thread(lock.check)
                    failed_now = msgspec.structs.replace(self._manifest, stop_reason=f"failed: {error}")
                    await completed(asyncio.to_thread(manifest.write, self._journal, failed_now))
                raise
            finally:
                if other is not None:
                    await asyncio.to_thread(other.close)

    @asynccontextmanager
    async def _locked(self) -> AsyncGenerator[JobLock]:
        await asyncio.to_thread(check_new, self.spec)
        spool = opened(lambda: temporary_folder("batch"), partial(shutil.rmtree, ignore_errors=True))
        locking = opened(lambda: acquire_lock(self._journal), lambda lock: lock.release())
        async with spool as self._spool, locking as lock:
            yield lock

    def _open(self, now: InputFiles) -> JobManifest:
        """The manifest of this job, new or continued. Raises: ConfigError when its input has changed."""
        before = manifest.read(self._journal)
        if before is not None and begins_anew(before, self.spec, now):
            discard(before)
            before = None
        if before is None:
            opened = self._new_manifest(now)
        else:
            self._check(before.spec)
            check_same(before.source, now)
            self.spec = msgspec.structs.replace(self.spec, is_openai_batch=before.spec.is_openai_batch)
            opened = msgspec.structs.replace(before, spec=self.spec, stop_reason=None, report=None)
            if opened.total is None:
                opened = msgspec.structs.replace(opened, total=_total(now))
        manifest.write(self._journal, opened)
        return opened

    def _new_manifest(self, now: InputFiles) -> JobManifest:
        """The manifest of a new job, after checks that it can run and be resumed. Raises: ConfigError."""
        self.spec = spec = detect_batch_lines(self.spec, now)
        RequestBuilder(spec)
        check_neighbours(spec, output_format(spec, now.format))
        if taken := check_columns(spec, now):
            self._listener.on_message(f"Columns taken as parameters of the requests: {', '.join(taken)}.")
        if spec.is_openai_batch:
            check_custom_ids(now)
        check_reuse(spec)
        return JobManifest(spec=spec, source=now.digested(), total=_total(now))

    def _check_input(self) -> None:
        """Raises: ConfigError when the input changed since its rows were numbered."""
        before = self._manifest.source
        check_same(before, before.now() if before.is_local else find_job_input(self.spec))

    async def _run_rows(self, lock: JobLock, other: Index | None) -> tuple[str, Index]:
        """FINISHED, or the reason of the stop; and what is in the journal then.

        other: the index whose answers are reused.
        """
        for number in range(_PASSES):
            if number:
                await asyncio.to_thread(self._check_input)
            driver = Driver(
                self._pool,
                self._journal,
                await asyncio.to_thread(segment.next_run, self._journal),
                RetryPolicy(self.spec.max_attempts, deadline_s=self.spec.deadline_s),
                listener=self._listener,
                stats=self.stats,
                stop=self.stop,
                limits=self._limits,
                lock=lock,
            )
            with closing(await self._index()) as index:
                retry = self._retry_failed and number == 0
                rows = PendingRows(self.spec, self._manifest.source, index, other, retry=retry)
                self.stats.total = self._known_total()
                self.stats.before = rows.ended_before() - self.stats.completed
                self.stats.failed_before = rows.failed_before() - self.stats.failed
                await driver.run(rows, group=self.spec.group_prefixes)
            total = rows.total
            known = self._known_total()
            has_run_all = known is not None and self.stats.before + self.stats.completed >= known
            if self.stop.reason is not None and not has_run_all:
                if (failure := self._on_stop()) is None:
                    return self.stop.reason, await self._index()
                total = await completed(asyncio.to_thread(self._fail_unfinished, failure))
            self.stats.total = total
            if self.spec.limit is None:
                self._manifest = msgspec.structs.replace(self._manifest, total=total)
            index = await self._index()
            if sum(index.counts().values()) >= total:
                return FINISHED, index
        raise Error("The journal still lacks rows after they were run. Check its disk.")

    def _fail_unfinished(self, failure: Failure) -> int:
        """Gives the failure to each row without an outcome. Returns the number of all rows."""
        total = self._known_total()
        total = self._manifest.source.count() if total is None else total
        index = Index(self._journal, self._spool)  # no answer is read, so no file is opened
        name = f"{segment.next_run(self._journal):04d}-closed"
        with closing(segment.Segment(self._journal, name)) as stopped:
            for row in range(total):
                if index.state(row) is None:
                    stopped.append(segment.Entry(row, failed(failure)), lambda: None)
        return total

    async def _finish(self, reason: str, index: Index, lock: JobLock) -> JobReport:
        """Raises: OutputLocked when another driver has taken over, which then writes the output."""
        files: list[str] = []
        if reason == FINISHED:
            await asyncio.to_thread(self._check_input)
            await asyncio.to_thread(lock.check)
            self._listener.on_message("Writing the output ...")
            self._listener.on_writing()
            write = OutputWriter(self.spec, self._manifest.source).write
            files = await completed(asyncio.to_thread(write, index))
            await asyncio.to_thread(self._check_input)  # whose columns were read once more
        await asyncio.to_thread(lock.check)
        finished = report(self.spec.output, reason, index, self.stats, files, self._prices)
        last = msgspec.structs.replace(self._manifest, stop_reason=reason, report=finished)
        await completed(asyncio.to_thread(manifest.write, self._journal, last))
        return finished

    async def _index(self) -> Index:
        return await asyncio.to_thread(Index, self._journal, self._spool)

    def _known_total(self) -> int | None:
        """Rows up to the limit, if they are counted."""
        limit, total = self.spec.limit, self._manifest.total
        return total if limit is None or total is None else min(limit, total)


def _reused_index(spec: JobSpec, spool: Path) -> Index | None:
    """The journal of another output whose answers are reused. Raises: ConfigError."""
    if spec.reuse_from is None:
        return None
    check_reuse(spec)
    spool.mkdir(exist_ok=True)
    return Index(msgspec.structs.replace(spec, output=spec.reuse_from).journal, spool)


def _total(source: InputFiles) -> int | None:
    """Rows of the input, if they are cheap to count: local files, or Parquet."""
    return source.count() if source.is_local or source.format == "parquet" else None
