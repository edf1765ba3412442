"""One run of a batch job: from its input through its workers into the journal, and from there to its output.

In the driver's process, on one event loop. It trusts nothing but the journal: the output is written when
that, read anew from where it lies, says of every row how it ended.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import os
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

from penstock.data.execution.retry import RetryPolicy
from penstock.data.job import manifest
from penstock.data.job.driver import Driver, Limits
from penstock.data.job.manifest import FINISHED, Record
from penstock.data.job.output import Columns, Sink, errors_place, failed_place, output_form, sharing
from penstock.data.job.prefix import Waiting
from penstock.data.job.progress import Watcher
from penstock.data.job.report import Prices, Report, Tally, report
from penstock.data.job.shutdown import Stop
from penstock.data.job.spec import Asking, Order
from penstock.data.job.worker_pool import Crew
from penstock.data.journal import segment
from penstock.data.journal.index import Index
from penstock.data.journal.lock import Claim, claim, taken_over
from penstock.data.journal.segment import Entry
from penstock.data.results.columns import result_columns
from penstock.data.results.outcome import SKIPPED, Failure, Outcome
from penstock.data.rows.input_columns import is_batch_line
from penstock.data.storage.paths import StoragePath, storage_path
from penstock.data.storage.readers import FileFormat, InputRow
from penstock.data.storage.source import InputFiles, find_input
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
            self._watcher.begun(self._record, self.tally)
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
            _check_same(before.source, now)
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
        _check_neighbours(order, output_form(order, now.format))
        check_columns(order, now)
        if order.lines:
            check_ids(now)
        _check_reuse(order)
        return Record(order=order, source=now.digested(), total=_total(now))

    def _check_input(self) -> None:
        """Raises: ConfigError when the rows are not those any more that were numbered."""
        _check_same(self._record.source, found_source(self.order))

    async def _all_rows(self, holder: Claim) -> str:
        """Why it ended: FINISHED, or what stopped it."""
        for turn in range(_PASSES):
            if turn:
                await asyncio.to_thread(self._check_input)
            index = await self._index()
            retry = self._retry_failed and turn == 0
            other = await asyncio.to_thread(_other, self.order, self._spool / "other")
            rows = _Rows(self.order, self._record.source, index, other, retry=retry)
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


class _Rows:
    """The rows of a job that have to be run, as requests; those that cannot be asked, as ended ones.

    total: rows of the input up to the order's limit; known at the end.
    """

    def __init__(
        self, order: Order, source: InputFiles, index: Index, other: Index | None, *, retry: bool
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

    def _waiting(self, row: InputRow) -> Waiting | Entry:
        try:
            waiting = self._asking.waiting(row)
        except Exception as error:
            if not isinstance(error, Error):
                log.warning("Row %d failed in our own code.", row.number, exc_info=error)
            failure = Failure.from_error(error, "read" if row.fields is None else "preprocess")
            return Entry(row.number, Outcome(state="failed", failure=failure))
        if waiting is None:
            return Entry(row.number, SKIPPED)
        waiting.deaths = 0 if self._retry else self._index.deaths.get(row.number, 0)
        if waiting.key is None:
            return waiting
        if (same := self._index.keys.get(waiting.key)) is not None:
            return Entry(row.number, of=same)
        if self._other is not None and (other := self._other.keys.get(waiting.key)) is not None:
            return Entry(row.number, self._other.end(other), key=waiting.key, reused=True)
        return waiting


def side_by_side(make: Callable[[InputRow], Made], rows: Iterator[InputRow]) -> Iterator[Made]:
    """What is made of each row, in their order, by several threads: it may read pictures from a bucket."""

    def make_all(some: list[InputRow]) -> list[Made]:
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
    if manifest.read(order.journal) is not None:
        return
    there = order.where.files() if order.folder else order.where.exists()
    if there:
        raise ConfigError(f"'{order.output}' exists, and no job of ours has begun it. Name another output.")


def _check_neighbours(order: Order, form: FileFormat) -> None:
    """Whether the files of failed rows are free, and no other job's.

    Raises: ConfigError.
    """
    failed = failed_place(order, form)
    beside = [failed, errors_place(order)] if order.lines else [failed]
    for one in beside:
        if one.exists():
            raise ConfigError(
                f"'{one.url}' exists, where this job would write rows that fail. Move it, or name another "
                "output."
            )
    for output in sharing(order, form):
        if manifest.read(storage_path(output).with_added_suffix(".journal")) is not None:
            raise ConfigError(
                f"'{output}' is a job's output, too, and writes rows that fail to '{failed.url}' as this one "
                "would. Name another output."
            )


def found_source(order: Order) -> InputFiles:
    """What the order's inputs mean; without its own output, where that lies in one of their folders.

    Raises: SourceNotFound; ConfigError when the output is named as an input.
    """
    output_form(order, "jsonl")
    forms: list[FileFormat] = ["jsonl", "parquet", "csv"]
    own = {_real(one) for one in (order.where, errors_place(order), *(failed_place(order, f) for f in forms))}
    below = tuple(f"{_real(one)}/" for one in (order.where, order.journal))

    def is_output(where: StoragePath) -> bool:
        url = _real(where)
        return url in own or url.startswith(below)

    return find_input(order.inputs, order.input_form, is_output)


def _real(where: StoragePath) -> str:
    return os.path.realpath(where.url) if where.is_local else where.url


def _total(source: InputFiles) -> int | None:
    """Rows of the input, where counting them costs little; all of it can be read then."""
    local = all(part.path.is_local for part in source.parts)
    return source.count() if local or source.format == "parquet" else None


def with_lines(order: Order, source: InputFiles) -> Order:
    """The order, knowing whether its input is of OpenAI's batch form, by the first row that can be read."""
    first = next((row.fields for row in source.rows() if row.fields is not None), None)
    return msgspec.structs.replace(order, lines=first is not None and is_batch_line(first))


_LOOKED_AT = 100
"""Rows that say which columns an input has."""


def check_columns(order: Order, source: InputFiles) -> None:
    """Whether the input has the columns that the prompt names. Raises: ConfigError."""
    looked = (row.fields for row in islice(source.rows(), _LOOKED_AT))
    rows = [fields for fields in looked if fields is not None]
    there = list(dict.fromkeys(name for fields in rows for name in fields))
    for name in sorted(Asking(order).columns - set(there)) if rows else ():
        close = difflib.get_close_matches(name, there, 1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        if source.format == "csv" and len(there) == 1 and any(mark in there[0] for mark in ";\t|"):
            meant = " Columns of a CSV file are separated by commas."
        raise ConfigError(
            f"The prompt names the column {name!r}; the input has {', '.join(map(repr, there))}.{meant}"
        )


def check_ids(source: InputFiles) -> None:
    """Whether each line of OpenAI's batch form has an id of its own. Raises: ConfigError."""
    seen: dict[str, int] = {}
    for row in source.rows():
        name = (row.fields or {}).get("custom_id")
        if isinstance(name, str) and seen.setdefault(name, row.number) != row.number:
            raise ConfigError(
                f"Rows {seen[name]} and {row.number} have the same custom_id, {name!r}: their answers could "
                "not be told apart. Give each its own."
            )


def _columns(order: Order) -> Columns:
    task = order.task()
    keep_all = output_form(order, "jsonl") == "parquet"

    def shown(end: Outcome) -> dict[str, object]:
        found = result_columns(task, end)
        return found if keep_all else {name: value for name, value in found.items() if value is not None}

    return shown


def _check_same(before: InputFiles, now: InputFiles) -> None:
    if change := before.changed(now):
        raise ConfigError(
            f"The input is not what it was when this job began: {change} Put it back, or start anew with "
            "another output."
        )


def _check_reuse(order: Order) -> None:
    if order.reuse_from is not None:
        other = msgspec.structs.replace(order, output=order.reuse_from)
        if manifest.read(other.journal) is None:
            raise ConfigError(f"'{order.reuse_from}' has no journal beside it to take answers from.")


def _other(order: Order, spool: Path) -> Index | None:
    """The journal of another output, whose answers count for this one. Raises: ConfigError."""
    if order.reuse_from is None:
        return None
    _check_reuse(order)
    spool.mkdir(exist_ok=True)
    return Index(msgspec.structs.replace(order, output=order.reuse_from).journal, spool)
