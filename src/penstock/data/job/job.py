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
from penstock.data.job.driver import Driver, Stop
from penstock.data.job.manifest import FINISHED, Record
from penstock.data.job.output import Columns, Sink, output_form
from penstock.data.job.pending import Asking, PendingRows
from penstock.data.job.protocol import Crew
from penstock.data.job.report import Limits, Prices, Report, Tally, Watcher, report
from penstock.data.job.spec import Order
from penstock.data.job.validation import (
    check_columns,
    check_ids,
    check_neighbours,
    check_new,
    check_reuse,
    check_same,
    found_source,
    with_lines,
)
from penstock.data.journal import segment
from penstock.data.journal.index import Index
from penstock.data.journal.lock import Claim, claim, taken_over
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
        order: Order,
        crew: Crew,
        *,
        limits: Limits | None = None,
        watcher: Watcher | None = None,
        prices: Prices | None = None,
        retry_failed: bool = False,
    ) -> None:
        self.order, self.stop = order, Stop()
        self._crew, self._limits = crew, limits or Limits()
        self._watcher, self._prices = watcher or Watcher(), prices
        self._retry_failed = retry_failed
        self._at = order.journal
        self.tally = Tally()

    @classmethod
    def left_at(cls, output: str) -> Order:
        """The order of an unfinished, or finished, job. Raises: ConfigError when there is none."""
        asked = Order(inputs=(), output=output)
        found = manifest.read(asked.journal)
        if found is None:
            at = asked.journal.url
            raise ConfigError(f"'{output}' has no journal beside it ('{at}'): nothing to go on with.")
        return found.order

    async def run(self) -> Report:
        """Until every row has ended and the output is there, or until it is stopped.

        Raises: ConfigError for what cannot be done as asked; Taken; Unavailable and EngineStartFailed when
        no worker can go on. Whatever ended is kept in the journal; run it again to go on.
        """
        now = await asyncio.to_thread(found_source, self.order)
        async with self._claimed() as holder:
            self._record = await asyncio.to_thread(self._opened, now)
            record = self._record
            inputs = [part.url for part in record.source.parts]
            self._watcher.begun(record.order.output, inputs, record.total)
            why = await self._all_rows(holder)
            return await self._end(why, holder)

    @asynccontextmanager
    async def _claimed(self) -> AsyncGenerator[Claim]:
        await asyncio.to_thread(check_new, self.order)
        holder = await asyncio.to_thread(claim, self._at)
        self._spool = Path(tempfile.mkdtemp(prefix="penstock-batch-"))
        try:
            yield holder
        finally:
            await asyncio.to_thread(holder.free)
            shutil.rmtree(self._spool, ignore_errors=True)

    def _opened(self, now: InputFiles) -> Record:
        """The record of this job, new or continued. Raises: ConfigError when its input has changed."""
        before = manifest.read(self._at)
        if before is None:
            opened = self._first(now)
        else:
            check_same(before.source, now)
            self.order = msgspec.structs.replace(self.order, lines=before.order.lines)
            opened = msgspec.structs.replace(before, order=self.order, ended=None, report=None)
            if opened.total is None:
                opened = msgspec.structs.replace(opened, total=_total(now))
        manifest.write(self._at, opened)
        return opened

    def _first(self, now: InputFiles) -> Record:
        """The record of a new job, once it is known that it can be run, and resumed. Raises: ConfigError."""
        self.order = order = with_lines(self.order, now)
        Asking(order)
        check_neighbours(order, output_form(order, now.format))
        check_columns(order, now)
        if order.lines:
            check_ids(now)
        check_reuse(order)
        return Record(order=order, source=now.digested(), total=_total(now))

    def _check_input(self) -> None:
        """Raises: ConfigError when the rows are not those any more that were numbered."""
        check_same(self._record.source, found_source(self.order))

    async def _all_rows(self, holder: Claim) -> str:
        """Why it ended: FINISHED, or what stopped it."""
        for turn in range(_PASSES):
            if turn:
                await asyncio.to_thread(self._check_input)
            index = await self._index()
            retry = self._retry_failed and turn == 0
            other = await asyncio.to_thread(_other, self.order, self._spool / "other")
            rows = PendingRows(self.order, self._record.source, index, other, retry=retry)
            self.tally.total = self._limited(self._record.total)
            self.tally.before = rows.ended_before()
            driver = Driver(
                self._crew,
                self._at,
                await asyncio.to_thread(segment.attempt, self._at),
                self._retry_policy(),
                watcher=self._watcher,
                tally=self.tally,
                stop=self.stop,
                limits=self._limits,
                holder=holder,
            )
            await driver.run(rows, group=self.order.group_prefixes)
            await asyncio.to_thread(index.close)
            if self.stop.why is not None:
                return self.stop.why
            self.tally.total = rows.total
            if self.order.limit is None:
                self._record = msgspec.structs.replace(self._record, total=rows.total)
            if await self._complete(rows.total):
                return FINISHED
        raise Error("The journal still lacks rows after they were run; is its disk in order?")

    async def _complete(self, rows: int) -> bool:
        self._final = await self._index()
        return sum(self._final.counts().values()) >= rows

    async def _end(self, why: str, holder: Claim) -> Report:
        """Raises: Taken where another driver has the output by now: then it is that one's to write."""
        files: list[str] = []
        index = self._final if why == FINISHED else await self._index()
        if why == FINISHED:
            await asyncio.to_thread(self._check_input)
            if holder.lost():
                raise taken_over(self._at)
            self._watcher.said("Writing the output ...")
            files = await asyncio.to_thread(self._sink().write, index)
        if holder.lost():
            raise taken_over(self._at)
        told = report(self.order.output, why, index, self.tally, files, self._prices)
        done = msgspec.structs.replace(self._record, ended=why, report=told)
        await asyncio.to_thread(manifest.write, self._at, done)
        await asyncio.to_thread(index.close)
        return told

    def _sink(self) -> Sink:
        return Sink(self.order, self._record.source, _columns(self.order))

    async def _index(self) -> Index:
        return await asyncio.to_thread(Index, self._at, None if self._at.is_local else self._spool)

    def _retry_policy(self) -> RetryPolicy:
        order = self.order
        return RetryPolicy(max_attempts=order.attempts, max_deaths=order.deaths, deadline_s=order.deadline_s)

    def _limited(self, total: int | None) -> int | None:
        limit = self.order.limit
        return total if limit is None or total is None else min(limit, total)


def _columns(order: Order) -> Columns:
    task = order.task()
    keep_all = output_form(order, "jsonl") == "parquet"

    def shown(end: Outcome) -> dict[str, object]:
        found = result_columns(task, end)
        return found if keep_all else {name: value for name, value in found.items() if value is not None}

    return shown


def _other(order: Order, spool: Path) -> Index | None:
    """The journal of another output, whose answers count for this one. Raises: ConfigError."""
    if order.reuse_from is None:
        return None
    check_reuse(order)
    spool.mkdir(exist_ok=True)
    return Index(msgspec.structs.replace(order, output=order.reuse_from).journal, spool)


def _total(source: InputFiles) -> int | None:
    """Rows of the input, where counting them costs little; all of it can be read then."""
    local = all(part.path.is_local for part in source.parts)
    return source.count() if local or source.format == "parquet" else None
