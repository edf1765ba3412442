"""One run of a batch job: from its input through its workers into the journal, and from there to its output.

In the driver's process, on one event loop. It trusts nothing but the journal: the output is written when
that, read anew from where it lies, says of every row how it ended.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import islice, takewhile
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.data import journal, record
from penstock.data.claim import Claim, claim
from penstock.data.columns import columns
from penstock.data.crew import Crew
from penstock.data.driver import Driver, Limits
from penstock.data.fault import failure_of
from penstock.data.fields import is_line
from penstock.data.index import Index
from penstock.data.journal import Entry
from penstock.data.order import Asking, Order
from penstock.data.outcome import SKIPPED, Outcome
from penstock.data.patience import Patience
from penstock.data.place import place
from penstock.data.prefix import Waiting
from penstock.data.reader import Row, Source, source
from penstock.data.record import FINISHED, Record
from penstock.data.report import Prices, Report, Tally, report
from penstock.data.sink import Columns, Sink, failed_place, output_form
from penstock.data.stop import Stop
from penstock.data.watcher import Watcher
from penstock.errors import ConfigError, Error

log = logging.getLogger(__name__)

_THREADS, _ROWS_OF_A_THREAD = 8, 8
"""That make requests of rows."""

Made = TypeVar("Made")

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
        found = record.read(asked.journal)
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
            self._watcher.begun(self._record, self.tally)
            why = await self._all_rows(holder)
            return await self._end(why)

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

    def _opened(self, now: Source) -> Record:
        """The record of this job, new or continued. Raises: ConfigError when its input has changed."""
        before = record.read(self._at)
        if before is None:
            self.order = with_lines(self.order, now)
            output_form(self.order, now.form)
        if before is not None and (change := before.source.changed(now)):
            raise ConfigError(
                f"The input is not what it was when this job began: {change} Put it back, or start anew with "
                "another output."
            )
        if before is not None:
            self.order = msgspec.structs.replace(self.order, lines=before.order.lines)
        total = before.total if before is not None else None
        opened = Record(order=self.order, source=now, total=total if total is not None else _total(now))
        if before is not None:
            opened = msgspec.structs.replace(opened, begun_s=before.begun_s)
        record.write(self._at, opened)
        return opened

    async def _all_rows(self, holder: Claim) -> str:
        """Why it ended: FINISHED, or what stopped it."""
        for turn in range(_PASSES):
            index = await self._index()
            retry = self._retry_failed and turn == 0
            other = await asyncio.to_thread(_other, self.order, self._spool / "other")
            rows = _Rows(self.order, self._record.source, index, other, retry=retry)
            self.tally.total = self._limited(self._record.total)
            self.tally.before = rows.ended_before()
            driver = Driver(
                self._crew,
                self._at,
                await asyncio.to_thread(journal.attempt, self._at),
                self._patience(),
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
            self._record = msgspec.structs.replace(self._record, total=rows.total)
            if await self._complete():
                return FINISHED
        raise Error("The journal still lacks rows after they were run; is its disk in order?")

    async def _complete(self) -> bool:
        self._final = await self._index()
        states = self._final.counts()
        return sum(states.values()) >= (self._limited(self._record.total) or 0)

    async def _end(self, why: str) -> Report:
        files: list[str] = []
        index = self._final if why == FINISHED else await self._index()
        if why == FINISHED:
            self._watcher.said("Writing the output ...")
            files = await asyncio.to_thread(self._sink().write, index)
        told = report(self.order.output, why, index, self.tally, files, self._prices)
        done = msgspec.structs.replace(self._record, ended=why, report=told)
        await asyncio.to_thread(record.write, self._at, done)
        await asyncio.to_thread(index.close)
        return told

    def _sink(self) -> Sink:
        return Sink(self.order, self._record.source, _columns(self.order))

    async def _index(self) -> Index:
        return await asyncio.to_thread(Index, self._at, None if self._at.is_local else self._spool)

    def _patience(self) -> Patience:
        order = self.order
        return Patience(attempts=order.attempts, deaths=order.deaths, deadline_s=order.deadline_s)

    def _limited(self, total: int | None) -> int | None:
        limit = self.order.limit
        return total if limit is None or total is None else min(limit, total)


class _Rows:
    """The rows of a job that have to be run, as requests; those that cannot be asked, as ended ones.

    total: rows of the input up to the order's limit; known at the end.
    """

    def __init__(
        self, order: Order, source: Source, index: Index, other: Index | None, *, retry: bool
    ) -> None:
        self.total = 0
        self._order, self._source, self._index = order, source, index
        self._asking, self._retry = Asking(order), retry
        self._other = other

    def ended_before(self) -> int:
        """Rows that earlier runs have ended, and that are not run again."""
        counts = self._index.counts()
        return sum(counts.values()) - (counts["failed"] if self._retry else 0)

    def __iter__(self) -> Iterator[Waiting | Entry]:
        limit = self._order.limit
        rows = self._source.rows(self._wanted)
        return side_by_side(self._waiting, takewhile(lambda row: limit is None or row.number < limit, rows))

    def _wanted(self, number: int) -> bool:
        """Asked of every row by the reader, in order."""
        if self._order.limit is None or number < self._order.limit:
            self.total = number + 1
        state = self._index.state(number)
        return state is None or (self._retry and state == "failed")

    def _waiting(self, row: Row) -> Waiting | Entry:
        try:
            waiting = self._asking.waiting(row)
        except Exception as error:
            if not isinstance(error, Error):
                log.warning("Row %d failed in our own code.", row.number, exc_info=error)
            failure = failure_of(error, "read" if row.fields is None else "preprocess")
            return Entry(row.number, Outcome(state="failed", failure=failure))
        if waiting is None:
            return Entry(row.number, SKIPPED)
        waiting.deaths = 0 if self._retry else self._index.deaths.get(row.number, 0)
        if waiting.key is None:
            return waiting
        if (same := self._index.keys.get(waiting.key)) is not None:
            return Entry(row.number, of=same)
        if self._other is not None and (other := self._other.keys.get(waiting.key)) is not None:
            return Entry(row.number, self._other.end(other), key=waiting.key)
        return waiting


def side_by_side(make: Callable[[Row], Made], rows: Iterator[Row]) -> Iterator[Made]:
    """What is made of each row, in their order, by several threads: it may read pictures from a bucket."""

    def make_all(some: list[Row]) -> list[Made]:
        return [make(row) for row in some]

    with ThreadPoolExecutor(_THREADS, "rows") as pool:
        made: deque[Future[list[Made]]] = deque()
        while some := list(islice(rows, _ROWS_OF_A_THREAD)):
            made.append(pool.submit(make_all, some))
            if len(made) > _THREADS:
                yield from made.popleft().result()
        while made:
            yield from made.popleft().result()


def check_new(order: Order) -> None:
    """Whether `order` may write to its output, which is new, or its own unfinished one.

    Raises: ConfigError, with what to do instead.
    """
    output_form(order, "jsonl")
    if (record.read(order.journal)) is None and order.where.exists():
        raise ConfigError(f"'{order.output}' exists, and no job of ours has begun it. Name another output.")


def found_source(order: Order) -> Source:
    """Raises: SourceNotFound; ConfigError when the output lies within the input."""
    now = source(order.inputs, order.input_form)
    form = output_form(order, now.form)
    own = {order.where.url, failed_place(order, form).url}
    for part in now.parts:
        if part.url in own or part.url.startswith(f"{order.where.url}/"):
            raise ConfigError(f"'{part.url}' would be input and output; write the output elsewhere.")
    return now


def _total(source: Source) -> int | None:
    """Rows of the input, where counting them costs little."""
    local = all(place(part.url).is_local for part in source.parts)
    cheap = source.form == "parquet" or (local and not source.parts[0].url.endswith(".gz"))
    return source.count() if cheap else None


def with_lines(order: Order, source: Source) -> Order:
    """The order, knowing whether its input is a file of OpenAI's batch form, judging by its first row."""
    first = next(iter(source.rows(lambda number: number == 0)), None)
    lines = first is not None and first.fields is not None and is_line(first.fields)
    return msgspec.structs.replace(order, lines=lines)


def _columns(order: Order) -> Columns:
    task = order.task()
    keep_all = output_form(order, "jsonl") == "parquet"

    def shown(end: Outcome) -> dict[str, object]:
        found = columns(task, end)
        return found if keep_all else {name: value for name, value in found.items() if value is not None}

    return shown


def _other(order: Order, spool: Path) -> Index | None:
    """The journal of another output, whose answers count for this one. Raises: ConfigError."""
    if order.reuse_from is None:
        return None
    other = msgspec.structs.replace(order, output=order.reuse_from)
    if record.read(other.journal) is None:
        raise ConfigError(f"'{order.reuse_from}' has no journal beside it to take answers from.")
    spool.mkdir(exist_ok=True)
    return Index(other.journal, spool)
