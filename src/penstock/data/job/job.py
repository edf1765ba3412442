"""One run of a batch job: from its input through its workers into the journal, and from there to its output.

In the driver's process, on one event loop. It trusts nothing but the journal: the output is written when
that, read anew from where it lies, says of every row how it ended.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock.data.execution.retry import RetryPolicy
from penstock.data.job import manifest
from penstock.data.job.driver import Driver, ShutdownRequest
from penstock.data.job.manifest import FINISHED, JobManifest
from penstock.data.job.output import Columns, OutputWriter, output_format
from penstock.data.job.pending import PendingRows, RequestBuilder
from penstock.data.job.protocol import WorkerPool
from penstock.data.job.report import JobReport, Limits, Prices, ProgressListener, RunStats, report
from penstock.data.job.spec import JobSpec
from penstock.data.job.validation import (
    check_columns,
    check_custom_ids,
    check_neighbours,
    check_new,
    check_reuse,
    check_same,
    detect_batch_lines,
    find_job_input,
)
from penstock.data.journal import segment
from penstock.data.journal.index import Index
from penstock.data.journal.lock import JobLock, acquire_lock, lost_lock
from penstock.data.results.columns import result_columns
from penstock.data.results.outcome import Outcome
from penstock.data.storage.source import InputFiles
from penstock.errors import ConfigError, Error

log = logging.getLogger(__name__)

_PASSES = 3
"""Through the rows that the journal lacks; another one finds what a lost machine had not on disk."""


class Job:
    """A job that was asked for by `order`, or that an earlier driver left at `order.output`."""

    def __init__(
        self,
        spec: JobSpec,
        pool: WorkerPool,
        *,
        limits: Limits | None = None,
        listener: ProgressListener | None = None,
        prices: Prices | None = None,
        retry_failed: bool = False,
    ) -> None:
        self.spec, self.stop = spec, ShutdownRequest()
        self._pool, self._limits = pool, limits or Limits()
        self._listener, self._prices = listener or ProgressListener(), prices
        self._retry_failed = retry_failed
        self._at = spec.journal
        self.stats = RunStats()

    @classmethod
    def load_spec(cls, output: str) -> JobSpec:
        """The order of an unfinished, or finished, job. Raises: ConfigError when there is none."""
        asked = JobSpec(inputs=(), output=output)
        found = manifest.read(asked.journal)
        if found is None:
            at = asked.journal.url
            raise ConfigError(f"'{output}' has no journal beside it ('{at}'): nothing to go on with.")
        return found.spec

    async def run(self) -> JobReport:
        """Until every row has ended and the output is there, or until it is stopped.

        Raises: ConfigError; OutputLocked; Unavailable and EngineStartFailed when no worker can
        go on. Completed rows are in the journal: run the job again to resume it.
        """
        now = await asyncio.to_thread(find_job_input, self.spec)
        async with self._claimed() as lock:
            self._manifest = await asyncio.to_thread(self._opened, now)
            record = self._manifest
            inputs = [part.url for part in record.source.parts]
            self._listener.on_start(record.spec.output, inputs, record.total)
            why = await self._all_rows(lock)
            return await self._end(why, lock)

    @asynccontextmanager
    async def _claimed(self) -> AsyncGenerator[JobLock]:
        await asyncio.to_thread(check_new, self.spec)
        lock = await asyncio.to_thread(acquire_lock, self._at)
        self._spool = Path(tempfile.mkdtemp(prefix="penstock-batch-"))
        try:
            yield lock
        finally:
            await asyncio.to_thread(lock.release)
            shutil.rmtree(self._spool, ignore_errors=True)

    def _opened(self, now: InputFiles) -> JobManifest:
        """The record of this job, new or continued. Raises: ConfigError when its input has changed."""
        before = manifest.read(self._at)
        if before is None:
            opened = self._first(now)
        else:
            check_same(before.source, now)
            self.spec = msgspec.structs.replace(self.spec, is_openai_batch=before.spec.is_openai_batch)
            opened = msgspec.structs.replace(before, spec=self.spec, stop_reason=None, report=None)
            if opened.total is None:
                opened = msgspec.structs.replace(opened, total=_total(now))
        manifest.write(self._at, opened)
        return opened

    def _first(self, now: InputFiles) -> JobManifest:
        """The record of a new job, once it is known that it can be run, and resumed. Raises: ConfigError."""
        self.spec = spec = detect_batch_lines(self.spec, now)
        RequestBuilder(spec)
        check_neighbours(spec, output_format(spec, now.format))
        check_columns(spec, now)
        if spec.is_openai_batch:
            check_custom_ids(now)
        check_reuse(spec)
        return JobManifest(spec=spec, source=now.digested(), total=_total(now))

    def _check_input(self) -> None:
        """Raises: ConfigError when the rows are not those any more that were numbered."""
        check_same(self._manifest.source, find_job_input(self.spec))

    async def _all_rows(self, lock: JobLock) -> str:
        """Why it ended: FINISHED, or what stopped it."""
        for turn in range(_PASSES):
            if turn:
                await asyncio.to_thread(self._check_input)
            index = await self._index()
            retry = self._retry_failed and turn == 0
            other = await asyncio.to_thread(_other, self.spec, self._spool / "other")
            rows = PendingRows(self.spec, self._manifest.source, index, other, retry=retry)
            self.stats.total = self._limited(self._manifest.total)
            self.stats.before = rows.ended_before()
            driver = Driver(
                self._pool,
                self._at,
                await asyncio.to_thread(segment.attempt, self._at),
                self._retry_policy(),
                listener=self._listener,
                stats=self.stats,
                stop=self.stop,
                limits=self._limits,
                lock=lock,
            )
            await driver.run(rows, group=self.spec.group_prefixes)
            await asyncio.to_thread(index.close)
            if self.stop.reason is not None:
                return self.stop.reason
            self.stats.total = rows.total
            if self.spec.limit is None:
                self._manifest = msgspec.structs.replace(self._manifest, total=rows.total)
            if await self._complete(rows.total):
                return FINISHED
        raise Error("The journal still lacks rows after they were run; is its disk in order?")

    async def _complete(self, rows: int) -> bool:
        self._final = await self._index()
        return sum(self._final.counts().values()) >= rows

    async def _end(self, why: str, lock: JobLock) -> JobReport:
        """Raises: OutputLocked where another driver has the output by now: then it is that one's to write."""
        files: list[str] = []
        index = self._final if why == FINISHED else await self._index()
        if why == FINISHED:
            await asyncio.to_thread(self._check_input)
            if lock.lost():
                raise lost_lock(self._at)
            self._listener.on_message("Writing the output ...")
            files = await asyncio.to_thread(self._sink().write, index)
        if lock.lost():
            raise lost_lock(self._at)
        told = report(self.spec.output, why, index, self.stats, files, self._prices)
        done = msgspec.structs.replace(self._manifest, stop_reason=why, report=told)
        await asyncio.to_thread(manifest.write, self._at, done)
        await asyncio.to_thread(index.close)
        return told

    def _sink(self) -> OutputWriter:
        return OutputWriter(self.spec, self._manifest.source, _columns(self.spec))

    async def _index(self) -> Index:
        return await asyncio.to_thread(Index, self._at, None if self._at.is_local else self._spool)

    def _retry_policy(self) -> RetryPolicy:
        spec = self.spec
        return RetryPolicy(
            max_attempts=spec.max_attempts, max_deaths=spec.max_deaths, deadline_s=spec.deadline_s
        )

    def _limited(self, total: int | None) -> int | None:
        limit = self.spec.limit
        return total if limit is None or total is None else min(limit, total)


def _columns(spec: JobSpec) -> Columns:
    task = spec.task()
    keep_all = output_format(spec, "jsonl") == "parquet"

    def shown(end: Outcome) -> dict[str, object]:
        found = result_columns(task, end)
        return found if keep_all else {name: value for name, value in found.items() if value is not None}

    return shown


def _other(spec: JobSpec, spool: Path) -> Index | None:
    """The journal of another output, whose answers count for this one. Raises: ConfigError."""
    if spec.reuse_from is None:
        return None
    check_reuse(spec)
    spool.mkdir(exist_ok=True)
    return Index(msgspec.structs.replace(spec, output=spec.reuse_from).journal, spool)


def _total(source: InputFiles) -> int | None:
    """Rows of the input, where counting them costs little; all of it can be read then."""
    local = all(part.path.is_local for part in source.parts)
    return source.count() if local or source.format == "parquet" else None
